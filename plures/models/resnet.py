"""Deep convolutional models: residual networks and VGG.

Weights are initialised as torch does. GroupNorm has two groups, as is usual in federated learning; it has as many
weights as BatchNorm and no statistics.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.models.inputs import Shape, check_image

Norm = Literal["batch", "group"]

_GROUPS = 2


def _norm(kind: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(_GROUPS, channels)


def _global_average_pool(x: Tensor) -> Tensor:
    """The mean of each channel over the whole image."""
    return x.mean((-2, -1))


class _ConvNorm(nn.Module):
    """A convolution with 'same' padding, then normalisation."""

    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = _norm(norm, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class _Padded(nn.Module):
    """A shortcut without weights: subsampled by the stride, with zeros in the new channels."""

    def __init__(self, n_new: int, stride: int) -> None:
        super().__init__()
        self.n_new, self.stride = n_new, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.n_new))


class _Basic(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    growth = 1

    def __init__(self, n_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = _ConvNorm(n_in, width, 3, stride, norm)
        self.second = _ConvNorm(width, width, 3, 1, norm)
        same = stride == 1 and n_in == width
        self.shortcut = nn.Identity() if same else self.make_shortcut(n_in, width, stride, norm)

    def make_shortcut(self, n_in: int, n_out: int, stride: int, norm: Norm) -> nn.Module:
        """The shortcut for a block that changes the size or the number of channels."""
        return _ConvNorm(n_in, n_out, 1, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class _BasicPadded(_Basic):
    def make_shortcut(self, n_in: int, n_out: int, stride: int, norm: Norm) -> nn.Module:
        return _Padded(n_out - n_in, stride)


class _Bottleneck(nn.Module):
    """A 3x3 convolution, which has the stride, between two 1x1 convolutions; with a shortcut."""

    growth = 4

    def __init__(self, n_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        n_out = self.growth * width
        self.first = _ConvNorm(n_in, width, 1, 1, norm)
        self.second = _ConvNorm(width, width, 3, stride, norm)
        self.third = _ConvNorm(width, n_out, 1, 1, norm)
        same = stride == 1 and n_in == n_out
        self.shortcut = nn.Identity() if same else _ConvNorm(n_in, n_out, 1, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.relu(self.third(y) + self.shortcut(x))


class _ResNet(nn.Module):
    """A stem, stages `layer1`, `layer2`, ... of residual blocks, global average pooling, and a head."""

    name: str
    least: int  # smallest height and width of images, in pixels
    norm: Norm = "batch"
    large_stem: bool  # True: 7x7 with stride 2 and max-pooling; False: 3x3
    block: type[_Basic | _Bottleneck]
    widths: tuple[int, ...]  # channels of each stage; all stages but the first halve the image
    depths: tuple[int, ...]  # number of blocks of each stage

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        n_in, _, _ = check_image(self.name, shape, self.least)
        kernel, stride = (7, 2) if self.large_stem else (3, 1)
        self.stem = _ConvNorm(n_in, self.widths[0], kernel, stride, self.norm)
        n_in, self.stages = self.widths[0], [f"layer{k}" for k in range(1, len(self.widths) + 1)]
        for stage, width, depth in zip(self.stages, self.widths, self.depths, strict=True):
            blocks = []
            for i in range(depth):
                stride = 2 if i == 0 and stage != "layer1" else 1
                blocks.append(self.block(n_in, width, stride, self.norm))
                n_in = width * self.block.growth
            setattr(self, stage, nn.Sequential(*blocks))
        self.head = nn.Linear(n_in, n_classes)
        self.block_names = ["stem", *self.stages, "head"]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        if self.large_stem:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return self.head(_global_average_pool(x))


class ResNet18(_ResNet):
    """ResNet-18 for images of at least 64x64 pixels: 7x7 stem with stride 2, max-pooling, BatchNorm."""

    name, least, large_stem = "resnet18", 16, True
    block, widths, depths = _Basic, (64, 128, 256, 512), (2, 2, 2, 2)


class ResNet18Gn(ResNet18):
    """resnet18 with GroupNorm."""

    name, norm = "resnet18-gn", "group"


class ResNet18Small(ResNet18):
    """ResNet-18 for small images: 3x3 stem, no max-pooling, BatchNorm."""

    name, least, large_stem = "resnet18-small", 8, False


class ResNet18SmallGn(ResNet18Small):
    """resnet18-small with GroupNorm."""

    name, norm = "resnet18-small-gn", "group"


class ResNet50(_ResNet):
    """ResNet-50: bottleneck blocks, 7x7 stem with stride 2, max-pooling, GroupNorm."""

    name, least, norm, large_stem = "resnet50", 16, "group", True
    block, widths, depths = _Bottleneck, (64, 128, 256, 512), (3, 4, 6, 3)


class ResNet8(_ResNet):
    """The CIFAR ResNet with 8 layers: 16, 32 and 64 channels, shortcuts without weights, BatchNorm."""

    name, least, large_stem = "resnet8", 8, False
    block, widths, depths = _BasicPadded, (16, 32, 64), (1, 1, 1)


class ResNet8Gn(ResNet8):
    """resnet8 with GroupNorm."""

    name, norm = "resnet8-gn", "group"


class ResNet20(ResNet8):
    """The CIFAR ResNet with 20 layers: 16, 32 and 64 channels, shortcuts without weights, BatchNorm."""

    name, depths = "resnet20", (3, 3, 3)


class ResNet20Gn(ResNet20):
    """resnet20 with GroupNorm."""

    name, norm = "resnet20-gn", "group"


class _PreActivated(nn.Module):
    """Two 3x3 convolutions, each after normalisation and ReLU, with a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = _norm("group", n_in)
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.norm2 = _norm("group", n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.shortcut = None if n_in == n_out else nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.norm1(x))
        y = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        return y + (x if self.shortcut is None else self.shortcut(active))


class WideResNet28(nn.Module):
    """Wide ResNet with 28 layers, ten times as wide as the CIFAR ResNets, with GroupNorm, without dropout."""

    block_names = ["stem", "layer1", "layer2", "layer3", "norm", "head"]
    widths = (160, 320, 640)
    depth = 4  # blocks per stage

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        channels, _, _ = check_image("wrn28-10", shape, 8)
        first, second, third = self.widths
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.layer1 = self._stage(16, first, 1)
        self.layer2 = self._stage(first, second, 2)
        self.layer3 = self._stage(second, third, 2)
        self.norm = _norm("group", third)
        self.head = nn.Linear(third, n_classes)

    def _stage(self, n_in: int, n_out: int, stride: int) -> nn.Sequential:
        rest = [_PreActivated(n_out, n_out, 1) for _ in range(self.depth - 1)]
        return nn.Sequential(_PreActivated(n_in, n_out, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.head(_global_average_pool(torch.relu(self.norm(x))))


class Vgg11(nn.Module):
    """VGG-11 with one linear layer: eight 3x3 convolutions with 64 to 512 channels, max-pooling after five of them."""

    name, batch_norm = "vgg11", False
    widths = (64, 128, 256, 256, 512, 512, 512, 512)
    pooled = (True, True, False, True, False, True, False, True)  # whether pooling follows each convolution

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        n_in, _, _ = check_image(self.name, shape, 32)
        self.block_names = [f"conv{k}" for k in range(1, len(self.widths) + 1)]
        for block, width in zip(self.block_names, self.widths, strict=True):
            conv = nn.Conv2d(n_in, width, 3, padding=1)
            norm = nn.BatchNorm2d(width) if self.batch_norm else nn.Identity()
            setattr(self, block, nn.Sequential(conv, norm))
            n_in = width
        self.head = nn.Linear(n_in, n_classes)
        self.block_names.append("head")

    def forward(self, x: Tensor) -> Tensor:
        for block, pooled in zip(self.block_names, self.pooled, strict=False):
            x = torch.relu(getattr(self, block)(x))
            if pooled:
                x = F.max_pool2d(x, 2)
        return self.head(_global_average_pool(x))


class Vgg11Bn(Vgg11):
    """vgg11 with BatchNorm after its convolutions."""

    name, batch_norm = "vgg11-bn", True
