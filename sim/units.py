"""Converts quantities as people write them, "80 GiB" or "25 GB/s", to integers and back.

Used at the edges only. Inside the program sizes are bytes, times nanoseconds, rates bytes or operations per second, all
`int`. The list of units is closed and case-sensitive: GB (10⁹) is not GiB (2³⁰), bits are spelt out (Gbit), and a
number without a unit is refused. Arithmetic is exact; a fraction is rounded to the nearest whole number, and refused if
that is zero.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import SupportsIndex

from sim.errors import UnitError, near

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

Units = Mapping[str, Fraction]

BYTES: Units = {f"{p}B": Fraction(n) for p, n in (_DECIMAL | _BINARY).items()}
"""Sizes, in bytes."""

RATES: Units = {f"{unit}/s": n for unit, n in BYTES.items()} | {
    f"{p}bit/s": Fraction(n, 8) for p, n in _DECIMAL.items()
}
"""Rates of a link or memory, in bytes per second; network rates in bits."""

FLOPS: Units = {f"{p}FLOP/s": Fraction(n) for p, n in _DECIMAL.items()} | {"EFLOP/s": Fraction(10**18)}
"""Rates of an engine, in floating-point operations per second."""

TIMES: Units = {"ns": Fraction(1), "us": Fraction(10**3), "ms": Fraction(10**6), "s": Fraction(10**9)}
"""Times, in nanoseconds."""

POWERS: Units = {"mW": Fraction(1, 1000), "W": Fraction(1), "kW": Fraction(1000)}
"""Power, in watts: joules per op-second."""

ENERGIES: Units = {"pJ/B": Fraction(1, 10**12), "nJ/B": Fraction(1, 10**9), "pJ/bit": Fraction(8, 10**12)}
"""Energy of a copy, in joules per byte."""

FREQUENCIES: Units = {f"{p}Hz": Fraction(_DECIMAL[p]) for p in ("M", "G")}
"""Clocks, in cycles per second."""

WIDTHS: Units = {"bit": Fraction(1)}
"""Widths of vector registers, in bits."""

# Common spellings that are wrong or ambiguous, and what was meant.
_MEANT = {
    "Gb": "GB or Gbit", "Mb": "MB or Mbit", "Tb": "TB or Tbit", "kb": "kB or kbit",
    "Gb/s": "GB/s or Gbit/s", "Mb/s": "MB/s or Mbit/s", "Tb/s": "TB/s or Tbit/s",
    "Gbps": "Gbit/s", "Mbps": "Mbit/s", "Tbps": "Tbit/s", "GBps": "GB/s", "MBps": "MB/s", "TBps": "TB/s",
    "GT/s": "GB/s", "KB": "kB", "K": "kB", "M": "MB", "G": "GB", "T": "TB", "KB/s": "kB/s", "sec": "s",
    "TFLOPS": "TFLOP/s", "TFLOPs": "TFLOP/s", "TFLOPS/s": "TFLOP/s", "TFLOP": "TFLOP/s", "TF": "TFLOP/s",
    "GFLOPS": "GFLOP/s", "PFLOPS": "PFLOP/s", "TOPS": "TFLOP/s", "usec": "us", "µs": "us", "μs": "us",
}  # fmt: skip

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+(?:_\d+)*)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*(\S(?:.*\S)?)?\s*", re.ASCII)
_LARGEST = 2**63 - 1


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "80 GiB" or "8 GB". Raises UnitError.

    >>> parse_bytes("0.1 GB"), parse_bytes("8 GiB")
    (100000000, 8589934592)
    """
    return _whole(text, BYTES, "a size such as '80 GiB'")


def parse_rate(text: str) -> int:
    """Bytes per second of a rate such as "25 GB/s" or "200 Gbit/s". Raises UnitError.

    >>> parse_rate("200 Gbit/s")
    25000000000
    """
    return _whole(text, RATES, "a rate such as '25 GB/s'")


def parse_flops(text: str) -> int:
    """Operations per second of a rate such as "312 TFLOP/s". Raises UnitError."""
    return _whole(text, FLOPS, "a compute rate such as '312 TFLOP/s'")


def parse_time(text: str) -> int:
    """Nanoseconds of a time such as "10 us" or "1.3 ms". Raises UnitError.

    >>> parse_time("1.3 ms")
    1300000
    """
    return _whole(text, TIMES, "a time such as '10 us'")


def parse_frequency(text: str) -> int:
    """Cycles per second of a clock such as "1.2 GHz". Raises UnitError."""
    return _whole(text, FREQUENCIES, "a clock such as '1.2 GHz'")


def parse_width(text: str) -> int:
    """Bits of a vector such as "512 bit". Raises UnitError."""
    return _whole(text, WIDTHS, "a width such as '512 bit'")


def parse_power(text: str) -> float:
    """Watts of a power such as "231 W". Raises UnitError."""
    return float(_exact(text, POWERS, "a power such as '231 W'"))


def parse_energy(text: str) -> float:
    """Joules per byte of an energy such as "62.5 pJ/B" or "7 pJ/bit". Raises UnitError."""
    return float(_exact(text, ENERGIES, "an energy per byte such as '60 pJ/B'"))


def to_bytes(value: SupportsIndex | float | str) -> int:
    """Bytes of a size: a whole number of bytes such as 7.5e9, or text with a unit. Raises UnitError.

    >>> to_bytes("7 GB") == to_bytes(7_000_000_000)
    True
    """
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__"):
        raise UnitError(f"value {value!r}: expected a whole number of bytes or a size such as '80 GiB'")
    number = operator.index(value)
    if number < 0:
        raise UnitError(f"value {number}: a size is not negative")
    return number


def parse_share(text: str) -> Fraction | None:
    """The fraction that a text such as "80%" names, None for any other text.

    >>> parse_share("80%"), parse_share("7 GB")
    (Fraction(4, 5), None)
    """
    found = re.fullmatch(r"\s*(\d{1,4}(?:\.\d{1,6})?)\s*%\s*", text, re.ASCII)
    return Fraction(found[1]) / 100 if found else None


def format_bytes(bytes: int, *, binary: bool = False, digits: int | None = 4) -> str:
    """A size as text.

    bytes: the size.
    binary: use binary units (GiB) instead of decimal ones (GB).
    digits: number of significant digits, None for all.

    >>> format_bytes(85_899_345_920), format_bytes(85_899_345_920, binary=True)
    ('85.9 GB', '80 GiB')
    """
    return _format(bytes, {u: n for u, n in BYTES.items() if u == "B" or ("i" in u) == binary}, digits)


def format_rate(bytes_per_second: int, *, digits: int | None = 4) -> str:
    """A rate as text, in decimal units: "25 GB/s"."""
    return _format(bytes_per_second, {f"{p}B/s": Fraction(n) for p, n in _DECIMAL.items()}, digits)


def format_flops(flops_per_second: int, *, digits: int | None = 4) -> str:
    """A compute rate as text: "312 TFLOP/s"."""
    return _format(flops_per_second, FLOPS, digits)


def format_time(ns: int, *, digits: int | None = 4) -> str:
    """A time as text: "1.3 ms"."""
    return _format(ns, TIMES, digits)


# ---- parsing and formatting --------------------------------------------------------------------


def format_percent(fraction: float, *, digits: int = 2, sign: bool = False) -> str:
    """A fraction in percent to so many digits, never with an exponent: "3.2 %", "58 %", "1,300 %"."""
    value = 100 * fraction
    plus = "+" if sign else ""
    rounded = f"{value:{plus},.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:{plus}.{digits}g}"
    return f"{rounded} %"


def _exact(text: object, units: Units, expected: str) -> Fraction:
    if not isinstance(text, str):
        raise UnitError(f"value {text}: expected {expected}, a string with a unit: {', '.join(units)}")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UnitError(f"value {text!r}: expected {expected}: a number and one of {', '.join(units)}")
    number, unit = match.groups()
    if unit is None:
        raise UnitError(f"value {text!r}: the unit is missing; expected {expected}, in {', '.join(units)}")
    if unit not in units:
        raise UnitError(f"value {text!r}: expected {expected}{_meant(unit, units) or ', in ' + ', '.join(units)}")
    amount = Fraction(Decimal(number)) * units[unit]  # the exponent has at most three digits
    if amount < 0:
        raise UnitError(f"value {text!r}: expected {expected}, not a negative one")
    if amount > _LARGEST:
        raise UnitError(f"value {text!r}: expected {expected}, below {_LARGEST / 10**18:.3g}e18 of the smallest unit")
    return amount


def _whole(text: object, units: Units, expected: str) -> int:
    exact = _exact(text, units, expected)
    whole = round(exact)
    if exact and not whole:
        raise UnitError(f"value {text!r}: expected {expected}, at least one {next(u for u in units if units[u] == 1)}")
    return whole


def _meant(unit: str, units: Units) -> str:
    meant = _MEANT.get(unit, "")
    if any(word in units for word in meant.split(" or ")):
        return f" (did you mean {' or '.join(repr(w) for w in meant.split(' or ') if w in units)}?)"
    folded = {known.casefold(): known for known in units}
    if unit.casefold() in folded:
        return f" (did you mean {folded[unit.casefold()]!r}?)"
    hint = near(unit, (each for each in units if len(each) > 1))  # any wrong letter is spelt like "B"
    return hint if "did you mean" in hint else ""


def _format(amount: int, units: Units, digits: int | None) -> str:
    if digits is not None and digits < 1:
        raise ValueError(f"digits must be at least 1, not {digits}")
    sign, exact = ("-", Fraction(-amount)) if amount < 0 else ("", Fraction(amount))
    ladder = sorted(units.items(), key=lambda item: item[1])
    index = max((i for i, (_, size) in enumerate(ladder) if size <= exact), default=0)
    number = _decimal(exact / ladder[index][1], digits)
    if index + 1 < len(ladder) and Fraction(number) * ladder[index][1] >= ladder[index + 1][1]:  # 999.99 MB is 1 GB
        index += 1
        number = _decimal(exact / ladder[index][1], digits)
    return f"{sign}{number} {ladder[index][0]}"


def _decimal(value: Fraction, digits: int | None) -> str:
    """A value in decimal notation without trailing zeros; exact if `digits` is None (units divide powers of ten)."""
    if digits is None:
        places = 0
        while value.denominator != 1 and (value * 10**places).denominator != 1:
            places += 1
    else:
        places = max(0, digits - len(str(int(value))))
    scaled = round(value * 10**places)
    whole, rest = divmod(scaled, 10**places)
    return f"{whole}.{rest:0{places}}".rstrip("0").rstrip(".") if places else str(whole)
