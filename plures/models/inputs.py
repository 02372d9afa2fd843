"""What models ask of the rows that they read."""

from plures.errors import UsageError

Shape = tuple[int, ...]


def image(name: str, shape: Shape, least: int) -> tuple[int, int, int]:
    """Channels, height and width of a row, if it is an image that the model can read."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UsageError(
            f"model {name} needs images of at least {least}x{least}, got rows of shape {tuple(shape)}; "
            "choose another model, e.g. mlp, or other data"
        )
    return shape


def tokens(name: str, shape: Shape, n_tokens: int) -> None:
    """Refuse rows that are no rows of tokens."""
    if len(shape) != 1 or n_tokens < 1:
        raise UsageError(
            f"model {name} needs rows of tokens, got rows of shape {tuple(shape)}"
            f"{'' if n_tokens else ' that hold no tokens'}; choose another model, e.g. mlp, or other data"
        )


def after(side: int, *steps: str) -> int:
    """The side of an image after 5x5 and 3x3 convolutions without padding, and 2x2 pooling."""
    for step in steps:
        side = {"5": side - 4, "3": side - 2, "pool": side // 2}[step]
    return side
