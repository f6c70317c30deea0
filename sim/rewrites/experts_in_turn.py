"""Experts that run one after another, each with weights and ops of its own, divided among ranks.

Of p ranks each has as many of the experts of every layer, and their ops. A rank finds and gathers the rows of its own
tokens for all experts, one all-to-all sends them, its experts run in turn on the rows of all ranks for them, another
all-to-all sends the results back, and the rank adds them to its tokens in the order of the experts; so in backward.
This is what DeepSpeed-MoE does with the experts of a rank (Rajbhandari et al., ICML 2022, section 5; its `Experts`).

The trace of one device has for each expert what finds its rows, the expert, and what adds its results. So that rows
are sent together, ops of a layer are put in the order above first (`in_order`), which changes no value. An update of
several experts is divided by rank.

The ranks of a layer are numbered by the load of their experts, largest first, as in `sim.rewrites.experts`. The rank
that is simulated has the first rank's experts; where it has an expert, rank r has the one in the same place among its
own (`Chosen`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError
from sim.rewrites.dimensions import operands
from sim.rewrites.order import must_precede
from sim.rewrites.rewriter import Rewriter
from sim.rewrites.slots import OPTIMIZER, parameters_of, split_updates
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.op import Op
from sim.trace.origin import Chosen, Expr, Same, map_leaves
from sim.trace.tensor import Tensor

OF_ONE = re.compile(r"(h(\d+)\.mlp\.expert)(\d+)(\..*)")
_WEIGHT = re.compile(r"h\d+\.mlp\.expert\d+\.(gate|up|down)\.(weight|bias)")
_OF_WEIGHT = re.compile(rf"{_WEIGHT.pattern}(\..*)?")
_AT_TOKENS = re.compile(r"\.(find|scores|weight|combine)(\..*)?|\.dispatch(\.bwd.*|\.out\.(?!grad).*)?")
"""Steps that the rank of a token does for each expert: they find and gather rows, and add up weighted results."""


@dataclass(frozen=True)
class Turns:
    """The experts of a trace that run one after another, as so many ranks divide them.

    ranks: among which. places: per layer and expert, its rank and its place among that rank's.
    expert: per op the layer and the expert that it is a step of, for those that are.
    tensors, ops: of what belongs to an expert, by id, its like of each rank, by rank; of what is an expert's at the
        tokens, too. all_of: of such a tensor its like of each expert, those of the first rank first.
    """

    ranks: int
    places: Mapping[tuple[int, int], tuple[int, int]]
    expert: Mapping[int, tuple[int, int]]
    tensors: Mapping[int, tuple[int, ...]]
    ops: Mapping[int, tuple[int, ...]]
    all_of: Mapping[int, tuple[int, ...]]


def experts_in_turn(trace: Trace) -> dict[int, list[int]]:
    """Per layer how many rows each expert has that runs by itself; {} for a trace without such experts."""
    layers = {int(of[2]): None for name in weights_in_turn(trace) if (of := OF_ONE.fullmatch(name))}
    loads = trace.meta.get("expert_loads") or [{}]
    by_layer = loads[0] if isinstance(loads[0], dict) else {}
    return {layer: list(by_layer.get(str(layer), ())) for layer in layers}


def weights_in_turn(trace: Trace) -> list[str]:
    """Names of the weights of experts that run one after another."""
    names = trace.tensor_columns.name
    return [name for t, name in enumerate(names) if trace.producer[t] < 0 and _WEIGHT.fullmatch(name)]


def refused(trace: Trace, ranks: int) -> str:
    """Why experts that run one after another do not divide among so many ranks, "" where they do."""
    names = trace.op_columns.name
    have = {(int(of[2]), int(of[3])) for name in names if (of := OF_ONE.fullmatch(name))}
    for layer, loads in experts_in_turn(trace).items():
        if not loads:
            return f"the trace does not say how many rows each expert of layer {layer} has (meta['expert_loads'])"
        idle = [expert for expert in range(len(loads)) if (layer, expert) not in have]
        if idle:
            return f"no token chose expert {idle[0]} of layer {layer}, so that the trace has no ops of it"
        if len(loads) % ranks:
            return f"{ranks} does not divide the {len(loads)} experts"
    return ""


def in_order(trace: Trace, ranks: int) -> Trace:
    """The trace with the steps of a layer's experts in the order of expert parallelism, and updates of each rank's
    experts in ops of their own."""
    of_all = _places(trace, ranks)

    def part_of(parameter: str) -> int:
        of = OF_ONE.fullmatch(parameter)
        return 0 if of is None else 1 + of_all[int(of[2]), int(of[3])][0]

    trace = split_updates(trace, lambda slot: part_of(slot.parameter))
    steps, new = _by_name(trace), Rewriter(trace)
    order, ids, c = list(range(len(trace.ops))), new.all_tensors(), trace.op_columns
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for op, of in enumerate(map(OF_ONE.fullmatch, c.name)):
        if of is not None and c.kind[op] != OPTIMIZER:
            first, _ = spans.setdefault((int(of[2]), int(c.phase[op])), (op, op))
            spans[int(of[2]), int(c.phase[op])] = first, op
    for first, last in spans.values():
        level: dict[int, int] = {}
        for op in range(first, last + 1):
            made = {int(trace.producer[t]) for t in trace.reads(op)}
            before = (other for other in must_precede(trace, op) if other in level)
            crossed = (level[other] + (other in made and (other in steps) != (op in steps)) for other in before)
            level[op] = max(crossed, default=int(op in steps))
        order[first : last + 1] = sorted(range(first, last + 1), key=level.__getitem__)
    ops = trace.ops
    for i in order:
        new.op(ops[i], reads=[ids[t] for t in ops[i].reads], writes=[ids[t] for t in ops[i].writes])
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def turns(trace: Trace, ranks: int) -> Turns:
    """How so many ranks divide the experts of a trace that is `in_order`."""
    return kept(trace, "expert_turns", ranks, lambda: _turns(trace, ranks))


def places(loads: Sequence[int], ranks: int) -> dict[int, tuple[int, int]]:
    """Per expert of a layer its rank and its place among that rank's. loads: rows of each."""
    each = len(loads) // ranks
    groups = [range(k, k + each) for k in range(0, len(loads), each)]
    groups.sort(key=lambda group: sum(loads[k] for k in group), reverse=True)
    return {k: (r, i) for r, group in enumerate(groups) for i, k in enumerate(group)}


def of_weight_in_turn(name: str) -> bool:
    """Whether a tensor of this name is a weight of one expert, a copy or a part of it, or its gradient or state."""
    return bool(_OF_WEIGHT.fullmatch(name))


def _places(trace: Trace, ranks: int) -> dict[tuple[int, int], tuple[int, int]]:
    layers = experts_in_turn(trace)
    return {(layer, k): place for layer, loads in layers.items() for k, place in places(loads, ranks).items()}


def _by_name(trace: Trace) -> dict[int, tuple[int, int]]:
    """The steps of experts in forward and backward: of each the layer and the expert."""
    found = {}
    for op, of in enumerate(map(OF_ONE.fullmatch, trace.op_columns.name)):
        if of is not None and trace.op_columns.kind[op] != OPTIMIZER and not _AT_TOKENS.fullmatch(of[4]):
            found[op] = int(of[2]), int(of[3])
    return found


def _turns(trace: Trace, ranks: int) -> Turns:
    of_all, steps, parameters = _places(trace, ranks), _by_name(trace), parameters_of(trace)
    expert_at = {(layer, *place): expert for (layer, expert), place in of_all.items()}
    each = {layer: 1 + max(i for of, _, i in expert_at if of == layer) for layer, _ in of_all}
    updates: dict[tuple[int, int], list[int]] = {}
    for op in np.flatnonzero(trace.op_columns.kind == OPTIMIZER).tolist():
        named = [OF_ONE.fullmatch(parameters[t] or "") for t in trace.writes(op)]
        groups = {(int(of[2]), of_all[int(of[2]), int(of[3])][0]) for of in named if of is not None}
        if len(groups) == 1 and None not in named:
            one = groups.pop()
            updates.setdefault(one, []).append(op)
            steps[op] = one[0], expert_at[*one, 0]
    ops: dict[int, tuple[int, ...]] = {}
    for (layer, _), own in updates.items():
        likes = [updates.get((layer, r), []) for r in range(ranks)]
        if any(len(like) != len(own) for like in likes):
            raise TraceError(f"ep: updates of the experts of layer {layer} differ from rank to rank")
        ops.update(dict(zip(own, zip(*likes, strict=True), strict=True)))

    def likes_of(names: Sequence[str], some: Iterable[int]) -> dict[int, dict[int, int]]:
        """Per item that has an expert's name, its like of each expert of its layer."""
        by_name, found = {name: i for i, name in enumerate(names)}, {}
        for i in some:
            of = OF_ONE.fullmatch(names[i])
            if of is not None and (int(of[2]), int(of[3])) in of_all:
                number = ranks * each[int(of[2])]
                alike = {k: by_name.get(f"{of[1]}{k}{of[4]}", -1) for k in range(number)}
                if min(alike.values()) < 0:
                    lacking = next(k for k, like in alike.items() if like < 0)
                    raise TraceError(f"ep: {names[i]!r} has no like of expert {lacking}")
                found[i] = alike
        return found

    def of_ranks(layer: int, expert: int, alike: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(alike[expert_at[layer, r, of_all[layer, expert][1]]] for r in range(ranks))

    names = trace.op_columns.name
    for op, alike in likes_of(names, [op for op in steps if trace.op_columns.kind[op] != OPTIMIZER]).items():
        ops[op] = of_ranks(*steps[op], alike)
    used = {t for op in steps for t in (*trace.reads(op), *trace.writes(op))}
    tensors, all_of, columns = {}, {}, trace.tensor_columns.name
    for t, alike in likes_of(columns, sorted(used)).items():
        of = OF_ONE.fullmatch(columns[t])
        assert of is not None
        layer = int(of[2])
        tensors[t] = of_ranks(layer, int(of[3]), alike)
        in_place = [expert_at[layer, r, i] for r in range(ranks) for i in range(each[layer])]
        all_of[t] = tuple(alike[k] for k in in_place)
    return Turns(ranks, of_all, steps, tensors, ops, all_of)


class ExpertTurns:
    """What the first of `ranks` ranks has of experts that run one after another; as `ExpertShare`.

    ops: the steps of its own experts. has: the tensors of these. ops_elsewhere, elsewhere: those of other ranks'.
    """

    def __init__(self, trace: Trace, ranks: int, rows: NDArray[np.bool_]) -> None:
        self.trace, self.ranks, self.rows, self.turns = trace, ranks, rows, turns(trace, ranks)
        first = {op for op, (layer, expert) in self.turns.expert.items() if not self.turns.places[layer, expert][0]}
        self.ops, self.ops_elsewhere = frozenset(first), frozenset(self.turns.expert.keys() - first)
        own = {t for t, likes in self.turns.tensors.items() if likes[0] == t}
        self.has = frozenset(own)
        produced = {t for op in self.ops_elsewhere for t in trace.writes(op)}
        starts = {t for t in self.turns.tensors if trace.producer[t] < 0}
        self.elsewhere = frozenset((starts | produced) & self.turns.tensors.keys() - own)

    def claim(self, of: Expr) -> Expr:
        """This rank's tensor where others have those of their experts."""
        return self._chosen(of, self.turns.tensors)

    def claim_op(self, of: Expr) -> Expr:
        """This rank's op where others have those of their experts."""
        return self._chosen(of, self.turns.ops)

    def _chosen(self, of: Expr, likes: Mapping[int, tuple[int, ...]]) -> Expr:
        def like(rank: int) -> Expr:
            return map_leaves(of, lambda leaf: Same(likes[leaf.id][rank], leaf.iteration, leaf.behind))

        return Chosen(tuple(map(like, range(self.ranks))), 0)

    def crosses(self, t: int, op: Op) -> bool:
        """Whether an op needs a tensor on another rank than its producer wrote it: at the tokens', or the experts'."""
        producer = int(self.trace.producer[t])
        steps = self.turns.expert
        return producer >= 0 and t in self.turns.all_of and (producer in steps) != (op.id in steps)

    def together(self, t: int, to_experts: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tensors that are sent together with one, to the experts or back, and those that arrive."""
        every = self.turns.all_of[t]
        own = every[: len(every) // self.ranks]
        return (every, own) if to_experts else (own, every)

    def saved_for(self, t: Tensor, by_expert: bool) -> str:
        """Why a tensor is kept for backward at the experts, or at the tokens; "" if it is not read there."""
        ops, phase, steps = self.trace.ops, self.trace.op_columns.phase, self.turns.expert
        readers = (r for r in self.trace.readers(t.id) if phase[r] == 1 and (r in steps) == by_expert)
        return t.saved_for if any(t.id in operands(ops[r]) for r in readers) else ""

    def weights(self, t: Tensor) -> dict[str, Any]:
        """Fields of a tensor of one expert: it is whole."""
        return {}

    def rows_or_weights(self, t: Tensor, size: int, parts: int) -> dict[str, Any]:
        """Fields of a tensor of a microbatch, one of so many. size: its bytes."""
        if not self.rows[t.id] or not t.shape:
            return {"bytes": size}
        rows, rest = divmod(t.shape[0], parts)
        return {"bytes": size, "shape": None if rest else (rows, *t.shape[1:])}

    def share(self, op: Op, of_group: dict[str, Any], touched: int) -> dict[str, Any]:
        """Of the fields of an op of a group's microbatch those of this rank: all."""
        return of_group

    def undivided(self, op: Op) -> dict[str, Any]:
        """Fields of an op on the weights of this rank's experts: its own."""
        return {}


__all__ = [
    "OF_ONE",
    "ExpertTurns",
    "Turns",
    "experts_in_turn",
    "in_order",
    "of_weight_in_turn",
    "places",
    "refused",
    "turns",
    "weights_in_turn",
]
