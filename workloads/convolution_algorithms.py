"""Alternative algorithms for convolutions: less time for more workspace, as vDNN and moDNN choose.

A convolution of a trace is an implicit GEMM, which forms its operand on the fly and needs no workspace. The
alternatives, with their workspace and their own arithmetic (N samples, C input and K output channels, R x S filter,
P x Q result, per group):

- `gemm`: writes the lowered input, CRS x NPQ, and multiplies it; same arithmetic.
  Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, arXiv:1410.0759, section 3.
- `fft`: stride 1. Half spectra (complex, 8 bytes) of input, filters and result, of padded size; transforms
  of 2.5 n log2 n FLOPs per plane of n points, 8 FLOPs per complex multiply-add.
  Mathieu, Henaff, LeCun, "Fast Training of Convolutional Networks through FFTs", 2013, arXiv:1312.5851.
- `winograd`: 3 x 3 filters, stride 1, the non-fused form F(4 x 4, 3 x 3): 36 products for 16 results.
  Transformed tiles of input, filters and result. Lavin, Gray, "Fast Algorithms for Convolutional Neural
  Networks", 2015, arXiv:1509.09308; the FLOPs of its transforms are counted here from the matrices there.

The time factor is the ratio of arithmetic, divided by the FLOP rate relative to an implicit GEMM. That rate is an
estimate (`RATE`), not a measurement: real libraries differ by shape and version.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from sim.trace.op import Implementation
from workloads.precision import BYTES

RATE = {"gemm": 1.1, "fft": 0.4, "winograd": 0.5}
"""FLOP/s of each algorithm's own arithmetic, relative to those of an implicit GEMM; estimates.

An explicit GEMM computes no addresses. Transforms are memory-bound, and products of many small matrices reach a smaller
fraction of the peak than one large product."""
TILE = 6
"""Edge of an input tile of F(4 x 4, 3 x 3)."""
STEP = 4
"""Edge of the results that one tile yields."""
TILE_FLOPS = {"input": 12 * 19, "filter": 9 * 12, "result": 10 * 13}
"""FLOPs to transform one tile: number of one-dimensional transforms (all columns, then all rows) times their FLOPs.

The one-dimensional ones multiply 6 numbers by B^T, 3 by G and 6 by A^T, sharing sums between rows."""


@dataclass(frozen=True)
class Convolution:
    """Shape of a two-dimensional convolution.

    batch: samples.
    channels: of the input.
    size: height and width of the input.
    filters: channels of the result.
    kernel, padding: (vertical, horizontal).
    stride: in both directions.
    groups: channels are divided into that many independent groups.
    """

    batch: int
    channels: int
    size: tuple[int, int]
    filters: int
    kernel: tuple[int, int]
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    groups: int = 1

    @property
    def result(self) -> tuple[int, int]:
        """Height and width of the result."""
        return self._along(0), self._along(1)

    def _along(self, axis: int) -> int:
        return (self.size[axis] + 2 * self.padding[axis] - self.kernel[axis]) // self.stride + 1

    @property
    def inner(self) -> int:
        """Products that are summed for one element of the result."""
        return self.channels // self.groups * self.kernel[0] * self.kernel[1]

    @property
    def flops(self) -> int:
        """FLOPs of an implicit GEMM: 2 per multiply-add, as counted by torch.utils.flop_counter."""
        return 2 * self.batch * self.filters * self.result[0] * self.result[1] * self.inner

    def implementations(self, dtype: str) -> tuple[Implementation, ...]:
        """The alternatives that support this shape, for data of type `dtype`."""
        if self.kernel == (1, 1):
            return ()  # an implicit GEMM is a plain one, and there is nothing to transform
        alternatives = [Implementation("gemm", self._factor("gemm", self.flops), self._lowered() * BYTES[dtype])]
        if self.stride == 1:
            alternatives.append(Implementation("fft", *self._fft()))
            if self.kernel == (3, 3):
                alternatives.append(Implementation("winograd", *self._winograd(BYTES[dtype])))
        return tuple(alternatives)

    def _factor(self, algorithm: str, arithmetic: float) -> float:
        return round(arithmetic / (RATE[algorithm] * self.flops), 4)

    def _planes(self) -> tuple[int, int, int]:
        """How many single-channel planes the input, the filters and the result have."""
        filters = self.filters * (self.channels // self.groups)
        return self.batch * self.channels, filters, self.batch * self.filters

    def _lowered(self) -> int:
        return self.groups * self.inner * self.batch * self.result[0] * self.result[1]

    def _fft(self) -> tuple[float, int]:
        high, wide = (2 * ceil((n + k - 1) / 2) for n, k in zip(self.size, self.kernel, strict=True))
        half = high * (wide // 2 + 1)
        planes = sum(self._planes())
        transforms = planes * 2.5 * high * wide * log2(high * wide)
        products = 8 * self.batch * self.filters * (self.channels // self.groups) * half
        return self._factor("fft", transforms + products), 8 * planes * half

    def _winograd(self, element: int) -> tuple[float, int]:
        tiles = ceil(self.result[0] / STEP) * ceil(self.result[1] / STEP)
        inputs, filters, results = self._planes()
        transforms = (
            inputs * tiles * TILE_FLOPS["input"]
            + filters * TILE_FLOPS["filter"]
            + results * tiles * TILE_FLOPS["result"]
        )
        products = 2 * TILE**2 * tiles * self.batch * self.filters * (self.channels // self.groups)
        values = TILE**2 * (inputs * tiles + filters + results * tiles)
        return self._factor("winograd", transforms + products), values * element
