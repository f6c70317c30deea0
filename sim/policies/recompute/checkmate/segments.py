"""Checkpoints at the ends of segments of the forward: the plans from which a search starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sim.solvers.nodes import Nodes
from sim.solvers.rounding import Stages, fewest_reruns


def segmented(nodes: Nodes, forward: Sequence[bool]) -> Iterator[Stages]:
    """One plan for each length of a segment, in nodes: a segment's results are kept, its inside recomputed at once.

    As Chen et al. 2016 do it; the last segment before a backward is kept whole. The authors of Checkmate start their
    search from the fastest of such plans that fits.

    forward: per node whether it belongs to a forward.
    """
    for length in range(1, sum(forward) + 1):
        stages = fewest_reruns(nodes, _kept(nodes, forward, _segments(forward, length)))
        if stages is not None:
            yield stages


def _segments(forward: Sequence[bool], length: int) -> list[int]:
    """Per node its segment, -1 for what stays whole: backward nodes, and the last segment before one."""
    found, segment, used = [-1] * len(forward), -1, length
    for i, inside in enumerate(forward):
        if not inside:
            if i and forward[i - 1]:
                found[:i] = [-1 if one == segment else one for one in found[:i]]
            used = length
        else:
            segment, used = (segment + 1, 1) if used == length else (segment, used + 1)
            found[i] = segment
    return found


def _kept(nodes: Nodes, forward: Sequence[bool], segment: Sequence[int]) -> set[tuple[int, int]]:
    """The (stage, value) pairs such that the value is resident at the start of the stage."""
    count = len(nodes)
    inner: dict[int, list[tuple[int, int]]] = {}  # per segment its values that no other node of a forward reads
    anchor: dict[int, int] = {}  # per segment the first backward node that reads one of them
    border: list[tuple[int, int]] = []  # values that stay, and the last node that reads them
    for v, value in enumerate(nodes.values):
        mine, last = segment[value.producer], count if value.end else max(value.readers, default=-1)
        later = [k for k in value.readers if segment[k] != mine]
        if mine < 0 or value.end or any(forward[k] for k in later):
            border.append((v, last))
            continue
        inner.setdefault(mine, []).append((v, last))
        if later:
            anchor[mine] = min(anchor.get(mine, count), later[0])
    kept: set[tuple[int, int]] = set()
    for v, last in border:
        value = nodes.values[v]
        users = (anchor.get(segment[k], -1) for k in value.readers)
        until = min(max((last, *users)), value.overwritten_at)
        kept.update((t, v) for t in range(value.producer + 1, until + 1))
    for mine, values in inner.items():
        for v, last in values:
            value = nodes.values[v]
            first = max((k for k in value.readers if segment[k] == mine), default=value.producer)
            rerun_stage = anchor.get(mine, count)
            kept.update(
                (t, v)
                for t in (*range(value.producer + 1, first + 1), *range(rerun_stage + 1, last + 1))
                if t <= value.overwritten_at
            )
    return kept
