"""vDNN: layer inputs are offloaded while their layer runs, and the layer ends when its copies have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from sim.declared import OneOf
from sim.errors import OutOfMemory, PolicyError
from sim.log import FIRST_RUNS, WHY, EventLog
from sim.plan import Action, Drop, Move, Plan, Problem, Wait
from sim.policies.base import Beside, Policy, by_parameter
from sim.rewrites.rewrite import choose_implementation
from sim.solvers.cascade import cascade
from sim.solvers.undoing import forward_of
from sim.trace.chain import BACKWARD, backward_ops, forward_ops
from sim.trace.graph import Trace
from sim.trace.op import KINDS
from sim.trace.tensor import ROLE_CODE

FEATURE_MAPS = (ROLE_CODE["activation"], ROLE_CODE["input"])


@dataclass(frozen=True, kw_only=True)
class Vdnn(Policy):
    """Copy a layer's inputs to the host while the layer runs, and back during the backward of a later one.

    Forward: a tensor that backward needs is offloaded beside the last layer that reads it; the layer ends when
    both its computation and its copies have ended, and then the device's copy is released. Backward of
    layer n: inputs that are not resident are fetched while the device waits; beside it the input
    of the nearest layer below n that has not been fetched is prefetched, but the search ends at the first
    compute-intensive layer that has nothing left to fetch; again both streams are waited for. A layer is a forward op
    with the in-place ops behind it. The last layer that is not an activation function, the classifier, weights, and
    tensors that no later layer reads (masks, statistics) stay.
    Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
        Network Design", MICRO 2016, arXiv:1602.08124; prefetch window, offload sets and the passes of
        `dyn` as in its public re-implementations.
    Bounds: forward = sum of max(layer, its copy), backward likewise; the device holds the largest layer's
        working set and one prefetched input. `dyn`: one replay per pass, at most one for each smaller
        workspace.
    Headline: VGG-16 with 256 images (28 GB) on 12 GB, 18 % behind an unlimited GPU. With plain SGD and the kernels
        of its time (`cnn(..., optimizer="sgd", kernels="cudnn")`) it fits 12 GiB here as well; PyTorch's indices of
        max pooling and its second gradient at each ReLU need 2.1 GB more, momentum 0.6 GB. How far behind depends
        on time factors of algorithms, which are estimates.
    Departs: the passes of `dyn` are replays, not profiled iterations. Where its choice would be slower
        than `all` with least workspace, which the published passes do not exclude, it takes that.
        Layers on engines beside the device's main one, and collectives, neither offload nor fetch. Tensors beyond
        the host's capacity go on to the next tier behind it, where there is one.

    variant: `all` offloads the inputs of every layer, `conv` those of compute-intensive layers, `dyn` tries: nothing
        offloaded, `conv`, `all`, each with the fastest implementations; then `conv` and `all` with smaller workspaces
        where memory overflows; then `all` with the smallest.
    algorithm: of ops with alternatives take the fastest (`p`) or the one with least workspace (`m`);
        `dyn` chooses itself.
    heavy: kinds of op that count as convolutions; by default `conv` where the trace has any, else
        `matmul` and `attention`.
    classifier: kinds of op that, behind the last compute-intensive layer, begin the part that stays.
    Raises PolicyError for an unknown variant, algorithm or kind, or a platform without a host tier;
    OutOfMemory from `dyn` where not even `all` with least workspace fits.
    """

    moves = True
    rewrites = True
    needs = frozenset({"host"})
    fidelity = "equations"
    saves = MappingProxyType({"implementation": "vDNN chooses the algorithm of each convolution with its workspace"})
    rarely = "it moves what convolutions read, and few random nets have many; it rewrites only what it must"
    other_values = by_parameter(
        variant="all",
        algorithm=Beside("m", variant="all"),
        heavy=("norm",),
        classifier=Beside(("norm",), variant="all"),
    )

    variant: Literal["all", "conv", "dyn"] = "dyn"
    algorithm: Literal["m", "p"] = "p"
    heavy: tuple[Annotated[str, OneOf(KINDS)], ...] = ()
    classifier: tuple[Annotated[str, OneOf(KINDS)], ...] = ("matmul",)

    def plan(self, problem: Problem) -> Plan:
        """Moves out beside forward layers, moves in beside backward layers, and the waits at their ends."""
        if self.variant == "dyn":
            return self._try_all(problem)
        return self._static(problem, self.variant, _implementations(problem.trace, self.algorithm))

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """Every op in its fastest implementation."""
        fastest = _implementations(problem.trace, "p")
        return {"fastest implementations": Plan(_choose(problem.trace, fastest))}

    # ---- the static plans --------------------------------------------------------------------

    def _static(self, problem: Problem, variant: str, chosen: Mapping[int, str]) -> Plan:
        platform, host = problem.platform, _host(problem)
        trace = _choose(problem.trace, chosen)
        layers = _Layers(trace, self.heavy, self.classifier)
        actions: list[Action] = []
        sent = layers.sent(variant)
        for n, tensors in sent.items():
            first, last = layers.ops[n][0], layers.ops[n][-1]
            for t in tensors:
                actions += [Move(t, host, keep=True, before=first), Wait(t, after=last), Drop(t, after=last)]
        away = {t for tensors in sent.values() for t in tensors}
        fetched: set[int] = set()
        for n, run in layers.backward_runs():
            home = platform.home(int(trace.op_columns.device[run[0]])).name
            missing = [t for t in dict.fromkeys(t for op in run for t in trace.reads(op)) if t in away - fetched]
            for t in missing:
                actions += [Move(t, home, before=run[0]), Wait(t, before=run[0])]
            fetched.update(missing)
            beside = [t for t in layers.prefetch(n, run[0], sent, fetched) if t in away - fetched]
            fetched.update(beside)
            for t in beside:
                actions.append(Move(t, home, before=run[0]))
                if layers.plain(run[-1]):
                    actions.append(Wait(t, after=run[-1]))
        notes = {"variant": variant, "implementations": dict(chosen), "offloaded": tuple(sorted(away))}
        return Plan(trace, cascade(trace, platform, actions, host), notes=notes)

    # ---- dyn ---------------------------------------------------------------------------------

    def _try_all(self, problem: Problem) -> Plan:
        """The first of the published passes that fits; never one slower than `all` with least workspace."""
        least, fastest = (_implementations(problem.trace, algorithm) for algorithm in "mp")
        floor = self._static(problem, "all", least)
        slowest = problem.evaluate(floor)
        for variant in ("none", "conv", "all"):
            plan = self._static(problem, variant, fastest)
            log = _fits(problem, plan)
            if log is not None:
                return plan if log.end <= slowest.end else floor
        for variant in ("conv", "all"):
            found = self._shrink(problem, variant, fastest)
            if found is not None:
                return found[0] if found[1].end <= slowest.end else floor
        return floor

    def _shrink(self, problem: Problem, variant: str, chosen: Mapping[int, str]) -> tuple[Plan, EventLog] | None:
        """Where memory overflows take the next smaller workspace of that op, until all fits or none is left."""
        now = dict(chosen)
        while True:
            plan = self._static(problem, variant, now)
            try:
                return plan, problem.evaluate(plan)
            except OutOfMemory as error:
                op = _overflow(error, problem)
                smaller = None if op is None else _next_smaller(problem.trace, op, now.get(op, ""))
                if op is None or smaller is None:
                    return None
                now[op] = smaller


class _Layers:
    """The forward ops of a trace as layers, and its backward ops in runs that undo one layer each."""

    def __init__(self, trace: Trace, heavy: tuple[str, ...], classifier: tuple[str, ...]) -> None:
        self.trace = trace
        c = trace.op_columns
        self.ops: list[list[int]] = []
        self._layer_of: dict[int, int] = {}
        replaces = trace.tensor_columns.replaces
        for op in forward_ops(trace).tolist():
            # an activation function in place belongs to the layer whose result it overwrites
            over = {int(trace.producer[replaces[t]]) if replaces[t] >= 0 else -1 for t in trace.writes(op)}
            if not (over and self.ops and over <= set(self.ops[-1])):
                self.ops.append([])
            self.ops[-1].append(op)
            self._layer_of[op] = len(self.ops) - 1
        kinds = [KINDS[c.kind[ops[0]]] for ops in self.ops]
        self._heavy = [kind in (heavy or (("conv",) if "conv" in kinds else ("matmul", "attention"))) for kind in kinds]
        self._managed = self._count_managed(kinds, classifier)

    def _count_managed(self, kinds: list[str], classifier: tuple[str, ...]) -> int:
        """How many layers, from the first, may send their inputs."""
        managed = len(kinds) - 1
        while managed > 0 and kinds[managed] == "elementwise":
            managed -= 1
        behind = max((n for n, heavy in enumerate(self._heavy) if heavy), default=-1) + 1
        dense = next((n for n in range(behind, len(kinds)) if kinds[n] in classifier), len(kinds))
        return max(min(managed, dense), 0)

    def plain(self, op: int) -> bool:
        """Whether the device itself runs that op, so that it can wait at its end."""
        return not self.trace.op_columns.engine.get(op) and not self.trace.op_columns.group.get(op)

    def sent(self, variant: str) -> dict[int, tuple[int, ...]]:
        """Per layer the inputs that go to the host beside it."""
        trace, phase, device = self.trace, self.trace.op_columns.phase, self.trace.op_columns.device
        found: dict[int, tuple[int, ...]] = {}
        for n in range(self._managed if variant != "none" else 0):
            if (variant == "conv" and not self._heavy[n]) or not all(map(self.plain, self.ops[n])):
                continue
            tensors = []
            for t in dict.fromkeys(t for op in self.ops[n] for t in trace.reads(op)):
                readers = trace.readers(t)
                late = [op for op in readers if phase[op] == BACKWARD]
                last = max((op for op in readers if op not in late), default=-1)
                producer = int(trace.producer[t])
                if (
                    late
                    and producer not in self.ops[n]
                    # else it may not be there when its copy is to begin
                    and (producer < 0 or (self.plain(producer) and device[producer] == device[self.ops[n][0]]))
                    and late[0] > self.ops[n][-1] >= last
                    and self._layer_of.get(last) == n
                    and trace.tensor_columns.role[t] in FEATURE_MAPS
                    and trace.tensor_columns.bytes[t]
                    and t not in trace.outputs
                ):
                    tensors.append(t)
            if tensors:
                found[n] = tuple(tensors)
        return found

    def backward_runs(self) -> Iterator[tuple[int, list[int]]]:
        """Each run of backward ops of one device that undo one layer, in order."""
        undoes, device = forward_of(self.trace), self.trace.op_columns.device
        run: list[int] = []
        behind = len(self.ops) - 1
        for op in backward_ops(self.trace).tolist():
            n = self._layer_of[undoes[op]] if op in undoes else behind
            if run and (n != behind or device[op] != device[run[0]]):
                yield behind, run
                run = []
            run.append(op)
            behind = n
        if run:
            yield behind, run

    def prefetch(self, n: int, before: int, sent: Mapping[int, tuple[int, ...]], fetched: set[int]) -> tuple[int, ...]:
        """The inputs to fetch beside the backward of layer n: the published search, downwards from n - 1."""
        device = self.trace.op_columns.device
        for m in range(n - 1, -1, -1):
            if self.ops[m][-1] > before or device[self.ops[m][0]] != device[before]:
                continue
            if any(t not in fetched for t in sent.get(m, ())):
                return sent[m]
            if self._heavy[m]:
                return ()
        return ()


def _host(problem: Problem) -> str:
    if problem.platform.host is None:
        raise PolicyError(f"vdnn: {problem.platform.name} has no host tier to offload to")
    return problem.platform.host.name


# ---- implementations -----------------------------------------------------------------------------


def _choices(trace: Trace, op: int) -> list[tuple[int, float, str]]:
    """(workspace, time relative to the op's own, name) of each implementation; the op's own is called ""."""
    own = (int(trace.op_columns.workspace[op]), 1.0, "")
    return [own, *((a.workspace, a.time_factor, a.name) for a in trace.op_columns.alternatives[op])]


def _choose(trace: Trace, chosen: Mapping[int, str]) -> Trace:
    """The trace with these implementations; ids and order stay."""
    return choose_implementation(trace, {op: name for op, name in chosen.items() if name})


def _implementations(trace: Trace, algorithm: str) -> dict[int, str]:
    """Per op with alternatives the one with least workspace (m) or least time (p)."""
    best = (lambda c: c) if algorithm == "m" else (lambda c: (c[1], c[0], c[2]))
    return {op: min(_choices(trace, op), key=best)[2] for op in sorted(trace.op_columns.alternatives)}


def _next_smaller(trace: Trace, op: int, name: str) -> str | None:
    if op not in trace.op_columns.alternatives:
        return None
    choices = _choices(trace, op)
    now = next(workspace for workspace, _, other in choices if other == name)
    smaller = [choice for choice in choices if choice[0] < now]
    return max(smaller, key=lambda c: (c[0], -c[1], c[2]))[2] if smaller else None


def _fits(problem: Problem, plan: Plan) -> EventLog | None:
    try:
        return problem.evaluate(plan)
    except OutOfMemory:
        return None


def _overflow(error: OutOfMemory, problem: Problem) -> int | None:
    """The op that found no space: the one after the last that ran; None where it was no device's memory."""
    if error.log is None or error.tier != problem.home:
        return None
    first = {WHY[name] for name in FIRST_RUNS}
    rows = zip(error.log.interval("why").tolist(), error.log.interval("op").tolist())
    op = max((op for why, op in rows if why in first), default=-1) + 1
    return op if op < len(problem.trace.ops) else None
