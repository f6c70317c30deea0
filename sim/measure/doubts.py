"""What in a calibration speaks against its figures: signs that other programs ran beside it. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from sim.measure.fit import OpFit, Sample

MOST_HELD_OUT = 0.5
"""The largest plausible median of a kind's relative errors at sizes that the fit did not have."""

MOST_SPREAD = 1.0
"""By what fraction the median of a size's repeats may be above the fastest: beyond it most took twice as long."""

MOST_FALL = 1.5
"""How many times as long as a larger size a smaller one may take."""

MOST_WAITED = 0.25
"""The largest plausible share of the time in which the measuring thread had no core."""


def doubts(samples: Sequence[Sample], fit: OpFit) -> list[str]:
    """Signs that the machine was busy while these samples were measured, the strongest first; one of each sort.

    samples: as they were measured, the sizes of a kind and type one after another, from small to large.
    fit: made of them.
    """
    return [*_held_out(fit), *_falling(samples), *_spread(samples), *_waited(samples)]


def busy(signs: Sequence[str]) -> str:
    """One line that says what the signs mean, "" where there are none."""
    return f"the machine was probably busy, measure again when it is idle: {'; '.join(signs)}" if signs else ""


def _held_out(fit: OpFit) -> Iterator[str]:
    far = {kind: error for kind, error in fit.held_out.items() if error > MOST_HELD_OUT}
    if far:
        named = ", ".join(f"{kind} {error:.0%}" for kind, error in far.items())
        yield f"at sizes that the fit did not have it is off by more than {MOST_HELD_OUT:.0%} ({named})"


def _falling(samples: Sequence[Sample]) -> Iterator[str]:
    falls = {}
    for (kind, dtype), sizes in groupby(samples, lambda s: (s.kind, s.dtype)):
        falls[kind, dtype] = max((small.ns / large.ns for small, large in pairwise(sizes)), default=0.0)
    if falls and falls[most := max(falls, key=lambda key: falls[key])] > MOST_FALL:
        yield f"a size of {most[0]} in {most[1]} took {falls[most]:.1f} times as long as the next larger one"


def _spread(samples: Sequence[Sample]) -> Iterator[str]:
    if samples and (most := max(samples, key=lambda s: s.spread)).spread > MOST_SPREAD:
        yield f"repeats of {most.kind} in {most.dtype} took {1 + most.spread:.1f} times as long as the fastest of them"


def _waited(samples: Sequence[Sample]) -> Iterator[str]:
    waited = sum(s.waited for s in samples) / max(1, len(samples))
    if waited > MOST_WAITED:
        yield f"this program had no core in {waited:.0%} of the time"


__all__ = ["busy", "doubts"]
