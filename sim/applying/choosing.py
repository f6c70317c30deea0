"""The checkpoints nearest to a plan: candidates that a framework can express, each simulated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import groupby

from sim.applying.as_pytorch import Checkpoint, Cost, Sent, cost_of, plan_of, run_of
from sim.applying.meaning import Meaning
from sim.applying.parts import Module, counted, dispatched
from sim.applying.sending import sent_by
from sim.hardware.platform import Platform
from sim.log import EventLog
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.phases import BACKWARD, FORWARD

Timed = tuple[Module, tuple[int, ...]]
"""A module with the sweeps in which it was recomputed."""


WORSE = 0.02
"""By this part checkpoints may take more memory than none: a plan that saves nothing has a counterpart, too."""


@dataclass(frozen=True)
class Choice:
    """Checkpoints and what is sent to the host, with their run.

    checkpoints: round modules, in order.
    sent: per wrapper that sends something.
    log: the run where memory is never short.
    """

    checkpoints: tuple[Checkpoint, ...]
    sent: tuple[Sent, ...]
    log: EventLog

    @property
    def cost(self) -> Cost:
        """Peak and time of its run."""
        return cost_of(self.log)


@dataclass(frozen=True)
class Allowed:
    """What a framework's checkpoints can do.

    selective: keep the results of single ops.
    joined: one checkpoint round several modules.
    nested: checkpoints inside one another.
    sending: send saved tensors to the host.
    """

    selective: bool = True
    joined: bool = True
    nested: bool = True
    sending: bool = True


def nearest(meaning: Meaning, modules: Sequence[Module], platform: Platform, planned: Cost, allowed: Allowed) -> Choice:
    """Of checkpoints that fit, those nearest to the run in memory and time; if none fits, those of the least peak.

    None that takes clearly more memory than no checkpoint at all. Where none of what resembles the run fits, further
    modules are wrapped.
    """
    trace, budget = meaning.trace, platform.home(0).capacity

    def simulated(checkpoints: tuple[Checkpoint, ...]) -> Choice:
        sent = sent_by(meaning, modules, checkpoints) if allowed.sending else ()
        return Choice(checkpoints, sent, run_of(trace, plan_of(trace, checkpoints, sent, platform), platform))

    sets = {tuple(each.key for each in found): found for found in candidates(meaning, modules, allowed)}
    nothing = Choice((), (), run_of(trace, plan_of(trace, (), (), platform), platform))
    tried = [simulated(found) for found in sets.values()]
    choices = [c for c in tried if c.cost.peak_bytes <= (1 + WORSE) * nothing.cost.peak_bytes] or [nothing]
    fitting = [c for c in choices if c.cost.peak_bytes <= budget]
    if not fitting:
        for found in _with_more(meaning, modules, min(choices, key=lambda c: c.cost.peak_bytes).checkpoints):
            choices.append(simulated(found))
            if choices[-1].cost.peak_bytes <= budget:
                return choices[-1]
        return min(choices, key=lambda c: (c.cost.peak_bytes, c.cost.makespan_ns))

    def distance(choice: Choice) -> float:
        pairs = zip(astuple(choice.cost), astuple(planned), strict=True)
        return sum(abs(math.log(ours / theirs)) for ours, theirs in pairs)

    return min(fitting, key=distance)


def candidates(meaning: Meaning, modules: Sequence[Module], allowed: Allowed) -> list[tuple[Checkpoint, ...]]:
    """Checkpoints round the modules in which the run recomputed something, in several ways.

    A module of which a part was kept is wrapped with those results kept, or as a whole where the run recomputed at
    least half of the bytes of what backward needs. Modules of one sweep are wrapped one by one or together, and those
    that were recomputed several times under as many checkpoints.
    """
    trace = meaning.trace
    ways: list[Callable[[Module], Checkpoint | None]] = [lambda module: _whole(meaning, module)]
    if allowed.selective:
        ways = [partial(_selective, meaning, kept_in=kept_in) for kept_in in (all, any)] + ways
    found = []
    for way in ways:
        separate = [each for module in modules if (each := way(module)) is not None]
        found.append(tuple(separate))
        if allowed.joined:
            found.append(tuple(_joined(meaning, trace, separate)))
    if allowed.nested and any(len(each) > 1 for each in meaning.sweeps.values()):
        found.append(_nested(meaning, [(module, _sweeps(meaning, module)) for module in modules]))
    return found


def _with_more(
    meaning: Meaning, modules: Sequence[Module], checkpoints: Sequence[Checkpoint]
) -> Iterator[tuple[Checkpoint, ...]]:
    """The checkpoints with ever more modules wrapped as a whole, those first of which backward needs most."""
    size = meaning.trace.tensor_columns.bytes
    wrapped = {each.path for checkpoint in checkpoints for each in checkpoint.modules}
    saved = [(sum(int(size[t]) for _, t in _saved(meaning.trace, each)), each) for each in modules]
    loose = sorted((each for each in saved if each[0] and each[1].path not in wrapped), key=lambda each: -each[0])
    more = [*checkpoints]
    for _, module in loose:
        more.append(Checkpoint((module,)))
        yield tuple(more)
    yield tuple(Checkpoint((each,)) for each in modules)


# ---- one module ----------------------------------------------------------------------------------


def _saved(trace: Trace, module: Module) -> list[tuple[int, int]]:
    """Forward results of a module that its own backward needs: the op, and the tensor."""
    undoing = module.backward
    return [
        (op, t)
        for op in module.forward
        for t in trace.writes(op)
        if any(reader in undoing for reader in trace.readers(t)) or int(trace.released[t]) in undoing
    ]


def _selective(meaning: Meaning, module: Module, kept_in: Callable[[Iterable[bool]], bool]) -> Checkpoint | None:
    """A checkpoint that keeps what the run kept; it does so in every call of the module alike.

    kept_in: whether what the run kept in all calls, or in any, is kept.
    """
    if not any(op in meaning.recomputed for op in module.forward):
        return None
    trace = meaning.trace
    wanted = {op for op, _ in _saved(trace, module)} - meaning.recomputed.keys()
    # what the recomputed ops read was kept, too, unless its producer was recomputed
    made = {t: op for op in module.forward for t in trace.writes(op)}
    for op in module.forward:
        if op in meaning.recomputed:
            wanted |= {made[t] for t in trace.reads(op) if t in made} - meaning.recomputed.keys()
    calls = [dict(zip(counted(trace, call.forward), call.forward, strict=True)) for call in module.calls]
    kept = {key for call in calls for key in call if kept_in(each[key] in wanted for each in calls if key in each)}
    return Checkpoint(
        (module,), frozenset(op for call in calls for key, op in call.items() if key in kept and _may_keep(trace, op))
    )


def _may_keep(trace: Trace, op: int) -> bool:
    """Whether a selective checkpoint can keep the results of an op: it is known, and nothing writes them in place."""
    role = trace.tensor_columns.role
    results = trace.writes(op)
    in_place = any(trace.tensor_columns.replaces[t] >= 0 or trace.replaced_by[t] >= 0 for t in results)
    of_weights = bool(trace.reads(op)) and all(role[t] in PERSISTENT for t in trace.reads(op))
    return bool(dispatched(trace, op)) and not in_place and not of_weights


def _whole(meaning: Meaning, module: Module) -> Checkpoint | None:
    """A checkpoint round the whole module, if the run recomputed most of what its backward needs."""
    size = meaning.trace.tensor_columns.bytes
    saved = _saved(meaning.trace, module)
    dropped = sum(int(size[t]) for op, t in saved if op in meaning.recomputed)
    return Checkpoint((module,)) if dropped and 2 * dropped >= sum(int(size[t]) for _, t in saved) else None


# ---- several -------------------------------------------------------------------------------------


def _joined(meaning: Meaning, trace: Trace, separate: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Neighbours that the run recomputed in one sweep, under one checkpoint."""
    found: list[Checkpoint] = []
    for each in separate:
        if found and _sweep(meaning, found[-1].modules[-1]) == _sweep(meaning, each.modules[0]):
            both = Checkpoint((*found[-1].modules, *each.modules), found[-1].keep | each.keep)
            if follows(trace, found[-1].modules[-1], each.modules[0]) and _passes_one(trace, both):
                found[-1] = both
                continue
        found.append(each)
    return found


def _nested(meaning: Meaning, run: Sequence[Timed], depth: int = 0) -> tuple[Checkpoint, ...]:
    """Checkpoints round neighbours that were recomputed in one sweep, and inside them round those of a later one.

    run: modules, each with its sweeps.
    """
    found: list[Checkpoint] = []
    for _, group in groupby((each for each in run if len(each[1]) > depth), key=lambda each: each[1][depth]):
        for part in _neighbours(meaning.trace, list(group)):
            modules = tuple(module for module, _ in part)
            inside = _nested(meaning, part, depth + 1)
            # two round the same modules recompute them twice for nothing
            found.append(inside[0] if inside and inside[0].modules == modules else Checkpoint(modules, inside=inside))
    return tuple(found)


def _neighbours(trace: Trace, run: list[Timed]) -> Iterator[list[Timed]]:
    """Modules of one sweep, divided where one checkpoint can't be round both sides."""
    part: list[Timed] = []
    for each in run:
        both = Checkpoint(tuple(module for module, _ in (*part, each)))
        if part and not (follows(trace, part[-1][0], each[0]) and _passes_one(trace, both)):
            yield part
            part = []
        part.append(each)
    yield part


def _sweeps(meaning: Meaning, module: Module) -> tuple[int, ...]:
    """The sweeps in which most of a module's ops were recomputed; none where the run kept most of them."""
    ops = module.calls[0].forward
    counts = Counter(meaning.sweeps[op] for op in ops if op in meaning.sweeps)
    return counts.most_common(1)[0][0] if counts and _whole(meaning, module) else ()


def _sweep(meaning: Meaning, module: Module) -> int:
    """The sweep in which most of a module's ops were recomputed."""
    counts = Counter(meaning.recomputed[op] for op in module.calls[0].forward if op in meaning.recomputed)
    return counts.most_common(1)[0][0] if counts else -1


def follows(trace: Trace, first: Module, second: Module) -> bool:
    """Whether a module is called with the result of its neighbour in a list, with nothing in between."""
    (head, _, a), (tail, _, b) = first.path.rpartition("."), second.path.rpartition(".")
    if head != tail or not (a.isdecimal() and b.isdecimal()) or int(b) != int(a) + 1:
        return False
    if len(first.calls) != len(second.calls):
        return False
    phase = trace.op_columns.phase
    return all(
        all(phase[op] != FORWARD for op in range(x.forward[-1] + 1, y.forward[0])) and x.forward[-1] < y.forward[0]
        for x, y in zip(first.calls, second.calls, strict=True)
    )


def _passes_one(trace: Trace, checkpoint: Checkpoint) -> bool:
    """Whether each module hands one tensor to the next, and nothing of it is read by the forward outside of both."""
    for region in checkpoint.regions:
        ends, inside = {}, set(region.forward)
        for k, module in enumerate(checkpoint.modules):
            ends.update({op: k for call in module.calls for op in call.forward})
        last = len(checkpoint.modules) - 1
        handed = [set[int]() for _ in checkpoint.modules]
        for op in region.forward:
            for t in trace.writes(op):
                for reader in trace.readers(t):
                    own = reader in inside and ends[reader] == ends[op]  # another call of it is another reader
                    if own or trace.op_columns.phase[reader] >= BACKWARD:
                        continue
                    if ends[op] != last and (reader not in inside or ends[reader] != ends[op] + 1):
                        return False
                    handed[ends[op]].add(t)
        if any(len(tensors) != 1 for tensors in handed[:-1]):
            return False
    return True
