"""Small models for numbers and images."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from plures.models.inputs import Shape, check_image, side_after


class Mlp(nn.Module):
    """A fully connected network with one hidden layer of 64 units, or of the sizes in its name, as mlp:64,64."""

    def __init__(self, shape: Shape, n_classes: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        first, *others = sizes or (64,)
        self.hidden = nn.Linear(math.prod(shape), first)
        self.more = nn.ModuleList(nn.Linear(n_in, n_out) for n_in, n_out in pairwise((first, *others)))
        self.head = nn.Linear((first, *others)[-1], n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.hidden(x.flatten(1)))
        for layer in self.more:
            x = torch.relu(layer(x))
        return self.head(x)


class Cnn4(nn.Module):
    """FedALA's 4-layer CNN: two 5x5 convolutions with 32 and 64 channels and pooling, a hidden layer of 512 units."""

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        channels, height, width = check_image("cnn4", shape, 16)
        size = 64 * side_after(height, "5", "pool", "5", "pool") * side_after(width, "5", "pool", "5", "pool")
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.hidden = nn.Linear(size, 512)
        self.head = nn.Linear(512, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.max_pool2d(self.conv1(x), 2))
        x = torch.relu(nn.functional.max_pool2d(self.conv2(x), 2))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class RodCnn(nn.Module):
    """Fed-RoD's CNNs: two 5x5 convolutions and 50 features for grey images, three 3x3 and 64 for colour images."""

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        channels, height, width = check_image("rod-cnn", shape, 16)
        if channels == 1:
            size = 64 * side_after(height, "5", "pool", "5", "pool") * side_after(width, "5", "pool", "5", "pool")
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
            self.conv3 = None
            self.hidden, self.head = nn.Linear(size, 50), nn.Linear(50, n_classes, bias=False)
        else:
            steps = ("3", "pool", "3", "pool", "3")
            size = 64 * side_after(height, *steps) * side_after(width, *steps)
            self.conv1, self.conv2 = nn.Conv2d(channels, 32, 3), nn.Conv2d(32, 64, 3)
            self.conv3 = nn.Conv2d(64, 64, 3)
            self.hidden, self.head = nn.Linear(size, 64), nn.Linear(64, n_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.max_pool2d(self.conv1(x), 2))
        x = torch.relu(nn.functional.max_pool2d(self.conv2(x), 2))
        if self.conv3 is not None:
            x = torch.relu(self.conv3(x))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class HnCnn(nn.Module):
    """The CNN of pFedHN and pFedLA: two 5x5 convolutions with 16 and 32 channels, hidden layers of 120 and 84 units."""

    batch_norm = False

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        channels, height, width = check_image("hncnn", shape, 16)
        size = 32 * side_after(height, "5", "pool", "5", "pool") * side_after(width, "5", "pool", "5", "pool")
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.norm1 = nn.BatchNorm2d(16) if self.batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.norm2 = nn.BatchNorm2d(32) if self.batch_norm else nn.Identity()
        self.hidden1 = nn.Linear(size, 120)
        self.hidden2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        x = torch.relu(self.hidden2(torch.relu(self.hidden1(x.flatten(1)))))
        return self.head(x)


class HnCnnBn(HnCnn):
    """hncnn with BatchNorm after its convolutions, as in pFedLA on CIFAR."""

    batch_norm = True
