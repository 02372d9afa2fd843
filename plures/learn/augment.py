"""Augmentation: random changes of training images, drawn from the key of a batch, so that they can be repeated.

They are part of the training pass of a task, for one client, and so work in every executor and method. Tests see images
as they are.
"""

import torch
from torch import Tensor

from plures import seeds
from plures.errors import UsageError, unknown

KINDS = ("crop", "flip")
MARGIN = 4  # pixels of padding around an image before a window of its size is cut out
_STREAM = 1 << 20  # random numbers beside those of dropout


def parse(text: str) -> tuple[str, ...]:
    """`none`, `crop`, `flip`, or `crop,flip`."""
    if text == "none":
        return ()
    kinds = tuple(word.strip() for word in text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("augmentation", kind, ("none", *KINDS))
    return tuple(kind for kind in KINDS if kind in kinds)


def refuse_other_than_images(kinds: tuple[str, ...], example: Tensor) -> None:
    """Raise if rows are no images: channels, height and width."""
    if kinds and (example.dim() != 3 or not example.is_floating_point()):
        raise UsageError(
            f"augment is for images, with channels, height and width; rows here have the shape {tuple(example.shape)}"
        )


def augment(kinds: tuple[str, ...], x: Tensor, key: Tensor) -> Tensor:
    """Images [row, channel, height, width], each changed in its own way."""
    n = len(x)
    if "crop" in kinds:
        shift = (seeds.uniform(key, (2, n), _STREAM) * (2 * MARGIN + 1)).floor().to(torch.int64) - MARGIN
        for axis, by in ((2, shift[0]), (3, shift[1])):
            x = _shifted(x, axis, by)
    if "flip" in kinds:
        flips = seeds.uniform(key, (n, 1, 1, 1), _STREAM + 1) < 0.5
        x = torch.where(flips, x.flip(3), x)
    return x


def _shifted(x: Tensor, axis: int, by: Tensor) -> Tensor:
    """Every row moved along an axis by its own number of pixels; zeros come in from outside."""
    size = x.shape[axis]
    place = torch.arange(size) + by.unsqueeze(1)  # [row, pixel]
    inside = (place >= 0) & (place < size)
    shape = [len(x), 1, 1, 1]
    shape[axis] = size
    at = place.clamp(0, size - 1).reshape(shape).expand(x.shape)
    return x.gather(axis, at) * inside.reshape(shape).to(x.dtype)
