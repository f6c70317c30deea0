"""What a calibration has measured, apart from the constants fitted to it: a profile is made of it again at any time.

Needs no PyTorch.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sim.errors import Caution, TiersimError
from sim.measure.doubts import busy, doubts
from sim.measure.fit import LinkFit, Sample, fit_copies, fit_ops
from sim.measure.profile_text import Links, Machine, profile_text
from sim.regular_files import read_file

COPIES = {"": "pinned", "_pageable": "pageable"}
"""Ends of the names of links, and the copies that they are fitted to."""


@dataclass(frozen=True)
class Copies:
    """Times of copies between a CUDA device and the host.

    sizes: bytes.
    ns: by direction (`d2h`, `h2d`), one time per size.
    """

    sizes: Sequence[int]
    ns: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Measured:
    """One calibration.

    machine: what is known without timing.
    ops: of the device.
    host: ops of the CPU on a machine with a CUDA device.
    copies: its copies: `pinned`, `pageable` and `both`, which is pinned and both directions at once.
    """

    machine: Machine
    ops: Sequence[Sample]
    host: Sequence[Sample] = ()
    copies: Mapping[str, Copies] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As values that JSON has."""
        return asdict(self)


def profile_of(measured: Measured) -> str:
    """The TOML text of the profile whose constants are fitted to what was measured.

    A Caution says where the machine was probably busy, and so do the notes of the profile. Raises TiersimError where no
    constants can be fitted.
    """
    ops = fit_ops(measured.ops)
    host = fit_ops(measured.host) if measured.host else None
    signs = doubts(measured.ops, ops) + (doubts(measured.host, host) if host else [])
    if note := busy(signs):
        warnings.warn(f"calibrate: {note}", Caution, stacklevel=2)
    return profile_text(measured.machine, ops, host, _links(measured.copies), note)


def _links(copies: Mapping[str, Copies]) -> Links | None:
    if not copies:
        return None
    fits: dict[str, LinkFit] = {}
    for suffix, name in COPIES.items():
        found = copies[name]
        fits |= {way + suffix: fit_copies(found.sizes, ns) for way, ns in found.ns.items()}
    both = copies["both"]
    factors = {way: min(1.0, fit_copies(both.sizes, ns).rate / fits[way].rate) for way, ns in both.ns.items()}
    return Links(fits, factors)


def read(path: str | os.PathLike[str]) -> Measured:
    """What the grid stored beside its rows. Raises TiersimError naming the file if it has no such data."""
    try:
        content = json.loads(read_file(Path(path)))
    except OSError as error:
        raise TiersimError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise TiersimError(f"{path}: is not JSON") from None
    stored = content.get("measured") if isinstance(content, dict) else None
    if stored is None:
        raise TiersimError(
            f"{path}: has no measured ops: it needs what `python -m sim.measure.grid -o NAME` writes without --profile"
        )
    try:
        return Measured(
            Machine(**stored["machine"]),
            [Sample(**sample) for sample in stored["ops"]],
            [Sample(**sample) for sample in stored["host"]],
            {name: Copies(**found) for name, found in stored["copies"].items()},
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise TiersimError(f"{path}: its measured ops are not what the grid writes: {error}") from None


__all__ = ["Copies", "Measured", "profile_of", "read"]
