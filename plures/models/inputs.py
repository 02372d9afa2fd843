"""Checks of the shape of a row, and the size of images after convolutions."""

from plures.errors import UsageError

Shape = tuple[int, ...]


def check_image(name: str, shape: Shape, least: int) -> tuple[int, int, int]:
    """Channels, height and width of a row; refuses rows that are not images of at least this size."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UsageError(
            f"model {name} needs images of at least {least}x{least}, got rows of shape {tuple(shape)}; "
            "choose another model, e.g. mlp, or other data"
        )
    return shape


def check_tokens(name: str, shape: Shape, n_tokens: int) -> None:
    """Refuse rows that do not hold tokens."""
    if len(shape) != 1 or n_tokens < 1:
        raise UsageError(
            f"model {name} needs rows of tokens, got rows of shape {tuple(shape)}"
            f"{'' if n_tokens else ' that hold no tokens'}; choose another model, e.g. mlp, or other data"
        )


def side_after(side: int, *steps: str) -> int:
    """The side of an image after unpadded 5x5 and 3x3 convolutions (steps "5" and "3") and 2x2 pooling ("pool")."""
    for step in steps:
        side = {"5": side - 4, "3": side - 2, "pool": side // 2}[step]
    return side
