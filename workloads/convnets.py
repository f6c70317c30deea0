"""The convolutional networks that older systems were measured on, layer by layer.

- alexnet: Krizhevsky, Sutskever, Hinton 2012, with local response norm and two groups, in one tower.
- vgg-16: Simonyan, Zisserman 2014, arXiv:1409.1556, configuration D.
- googlenet: Szegedy et al. 2014, arXiv:1409.4842, table 1, without the two auxiliary classifiers.
- resnet-50, -101, -152: He et al. 2015, arXiv:1512.03385, with the stride in the 3 x 3 convolution, as in
  torchvision and Hugging Face, and the residual sum of a block in place.
- inception-v4: Szegedy et al. 2016, arXiv:1602.07261, figures 3 to 9.

`tape.layer` numbers the repeated parts: convolutions and dense layers of alexnet and vgg-16, modules or blocks of
the others, whose stem and head belong to no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workloads.image_layers import (
    ImageTape,
    adaptive_pool,
    add_in_place,
    average_pool,
    batch_norm,
    concatenate,
    conv,
    dense,
    global_mean,
    local_response_norm,
    max_pool,
    relu,
)
from workloads.primitives import dropout
from workloads.tape import Value

Kernel = int | tuple[int, int]


@dataclass(frozen=True)
class Net:
    """A network.

    forward: appends its forward pass to a tape, from images to logits.
    image: height and width of its usual images in pixels.
    dropout: its usual probability.
    """

    forward: Callable[[ImageTape, Value, int, float], Value]
    image: int
    dropout: float


def alexnet(tape: ImageTape, x: Value, classes: int, probability: float) -> Value:
    """Five convolutions and three dense layers."""
    for i, (filters, kernel, stride, padding, groups) in enumerate(
        ((96, 11, 4, 2, 1), (256, 5, 1, 2, 2), (384, 3, 1, 1, 1), (384, 3, 1, 1, 2), (256, 3, 1, 1, 2))
    ):
        tape.layer = i
        x = conv(tape, f"conv{i + 1}", x, filters, kernel, stride=stride, padding=padding, groups=groups, bias=True)
        x = relu(tape, f"relu{i + 1}", x)
        if i < 2:
            x = local_response_norm(tape, f"lrn{i + 1}", x)
        if i in (0, 1, 4):
            x = max_pool(tape, f"pool{i + 1}", x, 3, 2)
    x = adaptive_pool(tape, "avgpool", x, 6)
    return _classifier(tape, x, classes, probability, first=5)


def vgg16(tape: ImageTape, x: Value, classes: int, probability: float) -> Value:
    """Thirteen convolutions in five stages, and three dense layers."""
    number = 0
    for stage, (repeats, filters) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))):
        for _ in range(repeats):
            tape.layer = number
            x = conv(tape, f"conv{number + 1}", x, filters, 3, padding=1, bias=True)
            x = relu(tape, f"relu{number + 1}", x)
            number += 1
        x = max_pool(tape, f"pool{stage + 1}", x, 2, 2)
    x = adaptive_pool(tape, "avgpool", x, 7)
    return _classifier(tape, x, classes, probability, first=number)


def _classifier(tape: ImageTape, x: Value, classes: int, probability: float, first: int) -> Value:
    """The head: two dense layers of 4096 with dropout over the flattened pixels, then the last layer."""
    x = x.viewed(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])
    for i in range(2):
        tape.layer = first + i
        x = dense(tape, f"fc{i + 1}", x, 4096)
        x = dropout(tape, f"drop{i + 1}", relu(tape, f"fc{i + 1}.relu", x), probability)
    tape.layer = first + 2
    return dense(tape, "fc3", x, classes)


def googlenet(tape: ImageTape, x: Value, classes: int, probability: float) -> Value:
    """A stem and nine inception modules."""

    def unit(name: str, x: Value, filters: int, kernel: int, stride: int = 1) -> Value:
        x = conv(tape, name, x, filters, kernel, stride=stride, padding=kernel // 2, bias=True)
        return relu(tape, f"{name}.relu", x)

    x = max_pool(tape, "pool1", unit("conv1", x, 64, 7, 2), 3, 2, up=True)
    x = local_response_norm(tape, "lrn1", x)
    x = unit("conv2", unit("conv2.reduce", x, 64, 1), 192, 3)
    x = max_pool(tape, "pool2", local_response_norm(tape, "lrn2", x), 3, 2, up=True)
    for i, (name, filters1, reduce3, filters3, reduce5, filters5, pool) in enumerate(GOOGLENET):
        tape.layer = i
        parts = [
            unit(f"{name}.1x1", x, filters1, 1),
            unit(f"{name}.3x3", unit(f"{name}.3x3.reduce", x, reduce3, 1), filters3, 3),
            unit(f"{name}.5x5", unit(f"{name}.5x5.reduce", x, reduce5, 1), filters5, 5),
            unit(f"{name}.pool.proj", max_pool(tape, f"{name}.pool", x, 3, 1, 1), pool, 1),
        ]
        x = concatenate(tape, f"{name}.concat", parts)
        if name in ("3b", "4e"):
            x = max_pool(tape, f"pool{name[0]}", x, 3, 2, up=True)
    tape.layer = -1
    x = dropout(tape, "drop", global_mean(tape, "avgpool", x), probability)
    return dense(tape, "fc", x, classes)


GOOGLENET = (
    ("3a", 64, 96, 128, 16, 32, 32),
    ("3b", 128, 128, 192, 32, 96, 64),
    ("4a", 192, 96, 208, 16, 48, 64),
    ("4b", 160, 112, 224, 24, 64, 64),
    ("4c", 128, 128, 256, 24, 64, 64),
    ("4d", 112, 144, 288, 32, 64, 64),
    ("4e", 256, 160, 320, 32, 128, 128),
    ("5a", 256, 160, 320, 32, 128, 128),
    ("5b", 384, 192, 384, 48, 128, 128),
)
"""Per module: name, then numbers of filters: 1x1; 3x3 reduction, 3x3; 5x5 reduction, 5x5; projection after pooling."""


def resnet(depths: tuple[int, ...]) -> Callable[[ImageTape, Value, int, float], Value]:
    """A residual network of bottleneck blocks; `depths` are the numbers of blocks per stage."""

    def forward(tape: ImageTape, x: Value, classes: int, probability: float) -> Value:
        x = _normed(tape, "stem", x, 64, 7, stride=2, padding=3)
        x = max_pool(tape, "stem.pool", x, 3, 2, 1)
        number = 0
        for stage, depth in enumerate(depths):
            for i in range(depth):
                tape.layer = number
                x = _bottleneck(tape, f"block{number}", x, 64 << stage, stride=2 if stage and not i else 1, first=not i)
                number += 1
        tape.layer = -1
        x = dropout(tape, "drop", global_mean(tape, "avgpool", x), probability)
        return dense(tape, "fc", x, classes)

    return forward


def _bottleneck(tape: ImageTape, name: str, x: Value, width: int, *, stride: int, first: bool) -> Value:
    y = _normed(tape, f"{name}.1", x, width, 1)
    y = _normed(tape, f"{name}.2", y, width, 3, stride=stride, padding=1)
    y = _normed(tape, f"{name}.3", y, 4 * width, 1, act=False)
    if first:
        x = _normed(tape, f"{name}.shortcut", x, 4 * width, 1, stride=stride, act=False)
    return relu(tape, f"{name}.relu", add_in_place(tape, f"{name}.add", y, x))


def _normed(
    tape: ImageTape,
    name: str,
    x: Value,
    filters: int,
    kernel: Kernel,
    *,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    act: bool = True,
) -> Value:
    """A convolution without bias, batch norm, and relu."""
    x = conv(tape, f"{name}.conv", x, filters, kernel, stride=stride, padding=padding)
    x = batch_norm(tape, f"{name}.norm", x)
    return relu(tape, f"{name}.relu", x) if act else x


class _Inception:
    """The modules of Inception-v4; a path is a chain of convolutions, each (filters, kernel)."""

    def __init__(self, tape: ImageTape) -> None:
        self.tape = tape

    def path(self, name: str, x: Value, *steps: tuple[int, Kernel]) -> Value:
        """Convolutions with padding, so that the image keeps its size."""
        for i, (filters, kernel) in enumerate(steps):
            high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
            x = _normed(self.tape, f"{name}.{i}", x, filters, kernel, padding=(high // 2, wide // 2))
        return x

    def valid(self, name: str, x: Value, filters: int, kernel: int, stride: int) -> Value:
        """One convolution without padding."""
        return _normed(self.tape, name, x, filters, kernel, stride=stride)

    def pooled(self, name: str, x: Value, filters: int) -> Value:
        """Average pooling and a 1 x 1 convolution."""
        return self.path(name, average_pool(self.tape, f"{name}.pool", x, 3, 1, 1), (filters, 1))

    def join(self, name: str, *parts: Value) -> Value:
        """The channels of all parts, concatenated."""
        return concatenate(self.tape, f"{name}.concat", parts)

    def shrink(self, name: str, x: Value) -> Value:
        """Max pooling that halves the image."""
        return max_pool(self.tape, f"{name}.pool", x, 3, 2)

    def stem(self, x: Value) -> Value:
        """Figure 3."""
        x = self.valid("stem.1", x, 32, 3, 2)
        x = self.valid("stem.2", x, 32, 3, 1)
        x = self.path("stem.3", x, (64, 3))
        x = self.join("stem.a", self.shrink("stem.a", x), self.valid("stem.a.conv", x, 96, 3, 2))
        left = self.valid("stem.b.left.end", self.path("stem.b.left", x, (64, 1)), 96, 3, 1)
        right = self.path("stem.b.right", x, (64, 1), (64, (1, 7)), (64, (7, 1)))
        x = self.join("stem.b", left, self.valid("stem.b.right.end", right, 96, 3, 1))
        return self.join("stem.c", self.valid("stem.c.conv", x, 192, 3, 2), self.shrink("stem.c", x))

    def a(self, n: str, x: Value) -> Value:
        """Figure 4."""
        return self.join(
            n,
            self.path(f"{n}.1x1", x, (96, 1)),
            self.path(f"{n}.3x3", x, (64, 1), (96, 3)),
            self.path(f"{n}.3x3x2", x, (64, 1), (96, 3), (96, 3)),
            self.pooled(f"{n}.mean", x, 96),
        )

    def reduce_a(self, n: str, x: Value) -> Value:
        """Figure 7, with k, l, m, n = 192, 224, 256, 384."""
        deep = self.path(f"{n}.deep", x, (192, 1), (224, 3))
        parts = self.valid(f"{n}.conv", x, 384, 3, 2), self.valid(f"{n}.deep.end", deep, 256, 3, 2)
        return self.join(n, *parts, self.shrink(n, x))

    def b(self, n: str, x: Value) -> Value:
        """Figure 5."""
        return self.join(
            n,
            self.path(f"{n}.1x1", x, (384, 1)),
            self.path(f"{n}.7x7", x, (192, 1), (224, (1, 7)), (256, (7, 1))),
            self.path(f"{n}.7x7x2", x, (192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))),
            self.pooled(f"{n}.mean", x, 128),
        )

    def reduce_b(self, n: str, x: Value) -> Value:
        """Figure 8."""
        left = self.path(f"{n}.left", x, (192, 1))
        right = self.path(f"{n}.right", x, (256, 1), (256, (1, 7)), (320, (7, 1)))
        ends = self.valid(f"{n}.left.end", left, 192, 3, 2), self.valid(f"{n}.right.end", right, 320, 3, 2)
        return self.join(n, *ends, self.shrink(n, x))

    def c(self, n: str, x: Value) -> Value:
        """Figure 6."""
        wide = self.path(f"{n}.wide", x, (384, 1))
        deep = self.path(f"{n}.deep", x, (384, 1), (448, (3, 1)), (512, (1, 3)))
        return self.join(
            n,
            self.path(f"{n}.1x1", x, (256, 1)),
            self.path(f"{n}.wide.h", wide, (256, (1, 3))),
            self.path(f"{n}.wide.v", wide, (256, (3, 1))),
            self.path(f"{n}.deep.h", deep, (256, (1, 3))),
            self.path(f"{n}.deep.v", deep, (256, (3, 1))),
            self.pooled(f"{n}.mean", x, 256),
        )


def inception_v4(tape: ImageTape, x: Value, classes: int, probability: float) -> Value:
    """A stem, then 4, 7 and 3 modules with reductions in between."""
    net = _Inception(tape)
    x = net.stem(x)
    modules = [net.a] * 4 + [net.reduce_a] + [net.b] * 7 + [net.reduce_b] + [net.c] * 3
    for i, module in enumerate(modules):
        tape.layer = i
        x = module(f"module{i}", x)
    tape.layer = -1
    x = dropout(tape, "drop", global_mean(tape, "avgpool", x), probability)
    return dense(tape, "fc", x, classes)


NETS = {
    "alexnet": Net(alexnet, 224, 0.5),
    "vgg-16": Net(vgg16, 224, 0.5),
    "googlenet": Net(googlenet, 224, 0.4),
    "resnet-50": Net(resnet((3, 4, 6, 3)), 224, 0.0),
    "resnet-101": Net(resnet((3, 4, 23, 3)), 224, 0.0),
    "resnet-152": Net(resnet((3, 8, 36, 3)), 224, 0.0),
    "inception-v4": Net(inception_v4, 299, 0.2),
}
"""The networks by name."""
