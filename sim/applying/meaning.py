"""What a run did to each result that backward needs, read from its log: kept, recomputed or moved.

All ids are those of the trace that the policy was given. Of a plan's own trace the origin says which op stands for
which; ops that a rewrite adds (a copy, an encoding) stand for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sim.errors import PolicyError
from sim.experiment import Result
from sim.log import CAUSE, WHY, EventLog
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.op import PHASE_CODE
from sim.trace.origin import Encoded, Expr, Fused, Glue, Lossy, Microbatch, Packed, Part, leaves
from sim.trace.phases import BACKWARD, FORWARD

CHANGED: tuple[tuple[tuple[type[Expr], ...], str], ...] = (
    ((Encoded, Lossy), "keeps tensors in another code"),
    ((Part, Packed), "splits or packs tensors"),
    ((Microbatch,), "splits the batch"),
    ((Fused,), "fuses ops"),
)
"""What an origin's expressions say that a plan does to the computation itself."""


@dataclass(frozen=True)
class Meaning:
    """What a run did.

    trace: what the policy was asked to plan for.
    sweeps: forward op -> per time that it was recomputed the op of the iteration that ran next.
    moved: forward results that left the device before backward and came back -> the tier that they went to.
    away: role -> bytes of weights, gradients or optimizer state that left the device, or were placed elsewhere.
    elsewhere: names of the engines, other than the device's main one, that ran ops of the iteration.
    early: whether an update ran before the last backward op.
    changes: what the plan does beyond dropping, recomputing and moving, in words.
    """

    trace: Trace
    sweeps: Mapping[int, tuple[int, ...]]
    moved: Mapping[int, str]
    away: Mapping[str, int]
    elsewhere: tuple[str, ...]
    early: bool
    changes: tuple[str, ...]

    @property
    def recomputed(self) -> Mapping[int, int]:
        """Forward op -> the op of the iteration that ran after the sweep in which it was first recomputed."""
        return {op: each[0] for op, each in self.sweeps.items()}


def meaning_of(result: Result) -> Meaning:
    """What a run did. Raises PolicyError for one on several devices, or without the trace that was asked for."""
    log, trace = result.log, result.trace
    if trace is None:
        raise PolicyError("export: this result does not say what its policy was asked to plan for")
    if trace.devices > 1 or log.trace.devices > 1:
        raise PolicyError(
            f"export: the plan is for {max(trace.devices, log.trace.devices)} devices; only plans for one are exported"
        )
    old_op, old_tensor = _names(log.trace, trace)
    return Meaning(
        trace,
        _sweeps(log, old_op, trace),
        _moved(log, old_tensor, trace),
        _away(log),
        _elsewhere(log),
        _updates_early(log),
        _changes(log.trace),
    )


def _names(new: Trace, old: Trace) -> tuple[list[int], list[int]]:
    """Per op and per tensor of a plan's trace the id of the one that it stands for in the trace asked for, or -1."""
    if new is old or new.origin is None:
        return list(range(len(new.ops))), list(range(len(new.tensors)))
    # both refer to one base; of what the trace asked for is itself a rewrite, only the same expression is the same
    if old.origin is None:
        return [_one(expr) for expr in new.origin.ops], [_one(expr) for expr in new.origin.tensors]
    ops = {expr: i for i, expr in enumerate(old.origin.ops)}
    tensors = {expr: i for i, expr in enumerate(old.origin.tensors)}
    return [ops.get(expr, -1) for expr in new.origin.ops], [tensors.get(expr, -1) for expr in new.origin.tensors]


def _one(expr: Expr) -> int:
    found = leaves(expr)
    return found[0].id if len(found) == 1 else -1


def _sweeps(log: EventLog, old: list[int], trace: Trace) -> dict[int, tuple[int, ...]]:
    """Per forward op that was recomputed, and per time, the op of the iteration that came next."""
    order = np.lexsort((log.interval("end"), log.interval("start")))
    why, op = log.interval("why")[order].tolist(), log.interval("op")[order].tolist()
    phase = trace.op_columns.phase
    waiting: list[int] = []
    found: dict[int, tuple[int, ...]] = {}
    for what, new in zip(why, op, strict=True):
        here = old[new] if new >= 0 else -1
        if here < 0:
            continue
        if what == WHY["recompute"] and phase[here] == FORWARD:
            waiting.append(here)
        elif what == WHY["run"]:
            for earlier in waiting:
                found[earlier] = (*found.get(earlier, ()), here)
            waiting.clear()
    return found


def _moved(log: EventLog, old: list[int], trace: Trace) -> dict[int, str]:
    """Forward results that were copied to another tier, and to which."""
    home = log.platform.tier_ids[log.platform.home(0).name]
    arrived = (log.change("cause") == CAUSE["moved in"]) & (log.change("tier") != home)
    names = [tier.name for tier in log.platform.tiers]
    role, phase, found = trace.tensor_columns.role, trace.op_columns.phase, dict[int, str]()
    for tensor, tier in zip(log.change("tensor")[arrived].tolist(), log.change("tier")[arrived].tolist(), strict=True):
        t = old[tensor]
        if t < 0 or role[t] in PERSISTENT:
            continue
        if trace.producer[t] >= 0 and phase[trace.producer[t]] == FORWARD:
            found.setdefault(t, names[tier])
    return found


def _away(log: EventLog) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state that were ever in another tier than the device's, by role."""
    from sim.trace.tensor import ROLES

    home = log.platform.tier_ids[log.platform.home(0).name]
    tensors = np.unique(log.change("tensor")[(log.change("tier") != home) & (log.change("delta") > 0)])
    tensors = tensors[tensors >= 0]
    role, size = log.trace.tensor_columns.role, log.trace.tensor_columns.bytes
    found = {}
    for name in ("weight", "gradient", "optimizer_state"):
        total = int(size[tensors[role[tensors] == ROLES.index(name)]].sum())
        if total:
            found[name] = total
    return found


def _elsewhere(log: EventLog) -> tuple[str, ...]:
    main = log.platform.main_engine(0).name
    return tuple(sorted({name for name in log.trace.op_columns.engine.values() if name and name != main}))


def _updates_early(log: EventLog) -> bool:
    phases = log.trace.op_columns.phase
    updates, backward = np.flatnonzero(phases == PHASE_CODE["update"]), np.flatnonzero(phases == BACKWARD)
    return bool(len(updates) and len(backward) and updates[0] < backward[-1])


def _changes(trace: Trace) -> tuple[str, ...]:
    """What a rewritten trace computes differently, in words."""
    if trace.origin is None:
        return ()
    kinds = {type(expr) for expr in (*trace.origin.ops, *trace.origin.tensors)} - {Glue}
    return tuple(words for types, words in CHANGED if kinds & set(types))
