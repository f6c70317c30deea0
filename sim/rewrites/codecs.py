"""Formats in which a tensor takes fewer bytes: how many, and whether the values survive.

The one home of these formulas: rewrites and policies ask here how large a code is, and the law of values checks codes
against it. Elements are counted by the shape, else by the type; a tensor of unknown type has elements of four bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod

from sim.errors import TraceError
from sim.trace.tensor import Tensor

WIDTHS = {"fp64": 8, "int64": 8, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "bool": 1}
"""Bytes of an element; of types that are not named, 4."""

ULP = Fraction(1 << 52)
"""One over the relative distance of neighbouring floats."""

CSR_COLUMNS = 256
"""Columns of a sparse matrix, so that an index takes a byte."""


@dataclass(frozen=True, slots=True)
class Format:
    """A way to encode a tensor.

    name: what origins call it.
    size: bytes of the code of a tensor.
    lossless: whether decoding restores the values; for `sign` and `argmax`, all that those need who read the code.
    sparse: whether the size depends on `Tensor.zeros`.
    """

    name: str
    size: Callable[[Tensor], int]
    lossless: bool = True
    sparse: bool = False


def elements(tensor: Tensor) -> int:
    """How many elements a tensor has."""
    count = -(-tensor.bytes // WIDTHS.get(tensor.dtype, 4))
    return prod(tensor.shape) if tensor.shape is not None and prod(tensor.shape) <= tensor.bytes else count


def part_of(count: int, share: float | Fraction) -> Fraction:
    """A share of so many; a whole number where the float that is nearest to its share of them is given.

    >>> part_of(10, 0.1), 10 * Fraction(0.1) == 1
    (Fraction(1, 1), False)
    """
    exact = count * Fraction(share)
    nearest = Fraction(round(exact))
    return nearest if abs(exact - nearest) <= max(exact, Fraction(count)) / ULP else exact


def nonzero(tensor: Tensor) -> int:
    """How many elements are not zero, rounded up. Raises TraceError where the trace does not say."""
    if tensor.zeros is None:
        raise TraceError(f"tensor {tensor.name!r}: the trace does not say how many of its elements are zero")
    return ceil(elements(tensor) - part_of(elements(tensor), tensor.zeros))


def _bits(bits: int) -> Callable[[Tensor], int]:
    """So many bits for each element."""
    return lambda tensor: -(-elements(tensor) * bits // 8)


def _words_of_three(tensor: Tensor) -> int:
    """Three elements of ten bits in each word of 32 bits."""
    return 4 * -(-elements(tensor) // 3)


def _mask_and_nonzero(tensor: Tensor) -> int:
    """A bit for each element, and the elements that are not zero."""
    return -(-elements(tensor) // 8) + nonzero(tensor) * _width(tensor)


def _rows_of_nonzero(bits: int = 0) -> Callable[[Tensor], int]:
    """Elements that are not zero, each with its column in a byte, and where each row starts in four bytes.

    bits: of an element, 0 for its own width.
    """

    def size(tensor: Tensor) -> int:
        count = nonzero(tensor)
        values = -(-count * bits // 8) if bits else count * _width(tensor)
        return values + count + 4 * -(-elements(tensor) // CSR_COLUMNS)

    return size


def _width(tensor: Tensor) -> int:
    count = elements(tensor)
    return -(-tensor.bytes // count) if count else 0


FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        Format("sign", _bits(1)),
        Format("argmax", _bits(4)),
        Format("zvc", _mask_and_nonzero, sparse=True),
        Format("csr", _rows_of_nonzero(), sparse=True),
        Format("fp32", _bits(32), lossless=False),
        Format("fp16", _bits(16), lossless=False),
        Format("fp10", _words_of_three, lossless=False),
        Format("fp8", _bits(8), lossless=False),
        Format("csr_fp16", _rows_of_nonzero(16), lossless=False, sparse=True),
        Format("csr_fp10", _rows_of_nonzero(10), lossless=False, sparse=True),
        Format("csr_fp8", _rows_of_nonzero(8), lossless=False, sparse=True),
    )
}
"""Formats by name.

sign: which elements are positive (Gist's binarization). argmax: the place of each maximum in its window of up to 16
elements. zvc: zero-value compression (cDMA). csr: compressed sparse rows of 256 columns (Gist's sparse storage).
fp32, fp16, fp10, fp8: floating point of that width; csr_fp16 and so on: sparse rows of such elements.
"""

SUFFICES: Mapping[str, str] = {"relu": "sign", "max_pool": "argmax"}
"""By function of an op, the format that holds all that its backward needs of what forward saved."""


def code_bytes(name: str, tensor: Tensor) -> int:
    """Bytes of a tensor in a format. Raises TraceError where that depends on zeros that the trace does not state."""
    return FORMATS[name].size(tensor)
