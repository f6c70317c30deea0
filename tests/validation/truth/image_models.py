"""Convolution nets as torchvision writes them, in place where it is: relu, and the sum of a residual block.

`parts` names the modules that a checkpoint is put round: a bottleneck or basic block, an inverted residual, a dense
layer, or what VGG has between two poolings. No other module has a number in its path, so that a capture finds these
layers and no more.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn


class Basic(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    growth = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(channels, width, stride)

    def forward(self, x):
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, beside a shortcut; the stride is in the middle."""

    growth = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(channels, 4 * width, stride)

    def forward(self, x):
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


def shortcut(channels: int, width: int, stride: int) -> nn.Module | None:
    if stride == 1 and channels == width:
        return None
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))


class ResNet(nn.Module):
    """He et al. 2015."""

    def __init__(self, block: type[Basic | Bottleneck], depths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        channels = 64
        self.parts = nn.ModuleList()
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for i in range(depth):
                self.parts.append(block(channels, width, 2 if stage and not i else 1))
                channels = width * block.growth
        self.mean, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 1000)

    def forward(self, x):
        x = self.pool(self.relu(self.bn(self.conv(x))))
        for part in self.parts:
            x = part(x)
        return self.fc(torch.flatten(self.mean(x), 1))


class VGG(nn.Module):
    """Simonyan and Zisserman 2014, configuration D; a part is what lies between two poolings, and the pooling."""

    def __init__(self) -> None:
        super().__init__()
        channels = 3
        self.parts = nn.ModuleList()
        for repeats, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            layers: list[nn.Module] = []
            for _ in range(repeats):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            self.parts.append(nn.Sequential(*layers, nn.MaxPool2d(2, 2)))
        self.mean = nn.AdaptiveAvgPool2d(7)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout()
        self.fc1, self.fc2, self.fc3 = nn.Linear(512 * 49, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        x = torch.flatten(self.mean(x), 1)
        x = self.drop(self.relu(self.fc1(x)))
        x = self.drop(self.relu(self.fc2(x)))
        return self.fc3(x)


class Inverted(nn.Module):
    """Expands, convolves each channel apart, and projects; the sum is not in place."""

    def __init__(self, channels: int, width: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = channels * expand
        layers: list[nn.Module] = []
        if expand != 1:
            layers += [nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden)]
        layers += [nn.ReLU6(inplace=True), nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width)]
        self.inside = nn.Sequential(*layers)
        self.sums = stride == 1 and channels == width

    def forward(self, x):
        return x + self.inside(x) if self.sums else self.inside(x)


class MobileNet(nn.Module):
    """Sandler et al. 2018, MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.relu = nn.ReLU6(inplace=True)
        channels = 32
        self.parts = nn.ModuleList()
        table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2))
        for expand, width, repeats, stride in (*table, (6, 320, 1, 1)):
            for i in range(repeats):
                self.parts.append(Inverted(channels, width, stride if not i else 1, expand))
                channels = width
        self.last, self.last_bn = nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280)
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(1280, 1000)

    def forward(self, x):
        x = self.relu(self.bn(self.conv(x)))
        for part in self.parts:
            x = part(x)
        x = self.relu(self.last_bn(self.last(x)))
        return self.fc(self.drop(torch.flatten(nn.functional.adaptive_avg_pool2d(x, (1, 1)), 1)))


class Dense(nn.Module):
    """One layer of a dense block: norm, relu and convolution twice, on all that came before."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.conv1, self.norm2 = nn.Conv2d(channels, 128, 1, bias=False), nn.BatchNorm2d(128)
        self.relu2, self.conv2 = nn.ReLU(inplace=True), nn.Conv2d(128, 32, 3, padding=1, bias=False)

    def forward(self, *features):
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseNet(nn.Module):
    """Huang et al. 2016, DenseNet-121; a part is a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.depths = (6, 12, 24, 16)
        self.parts, self.transitions = nn.ModuleList(), nn.ModuleDict()
        channels = 64
        for block, depth in enumerate(self.depths):
            for _ in range(depth):
                self.parts.append(Dense(channels))
                channels += 32
            if block < 3:
                kinds = (nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
                half = nn.Conv2d(channels, channels // 2, 1, bias=False)
                names = (f"{what}_{block}" for what in ("norm", "relu", "conv", "pool"))
                kinds = zip(names, (*kinds, half, nn.AvgPool2d(2, 2)), strict=True)
                self.transitions[f"after_{block}"] = nn.Sequential(OrderedDict(kinds))
                channels //= 2
        self.norm5, self.fc = nn.BatchNorm2d(channels), nn.Linear(channels, 1000)

    def forward(self, x):
        x = self.pool(self.relu(self.norm(self.conv(x))))
        number = 0
        for block, depth in enumerate(self.depths):
            features = [x]
            for _ in range(depth):
                features.append(self.parts[number](*features))
                number += 1
            x = torch.cat(features, 1)
            del features
            if block < 3:
                x = self.transitions[f"after_{block}"](x)
        x = nn.functional.relu(self.norm5(x), inplace=True)
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, (1, 1)), 1))


NETS = {
    "resnet-18": lambda: ResNet(Basic, (2, 2, 2, 2)),
    "resnet-50": lambda: ResNet(Bottleneck, (3, 4, 6, 3)),
    "vgg-16": VGG,
    "mobilenet-v2": MobileNet,
    "densenet-121": DenseNet,
}
"""The nets by name."""
