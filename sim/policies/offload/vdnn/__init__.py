"""vDNN: layer inputs are offloaded while their layer runs, and the layer ends when its copies have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from sim.declared import OneOf
from sim.errors import OutOfMemory, PolicyError
from sim.log import EventLog
from sim.plan import Action, Drop, Move, Plan, Problem, Wait
from sim.policies.base import Beside, Fidelity, Policy, by_parameter, own_name
from sim.policies.offload.vdnn.implementations import choose, implementations, next_smaller, overflow
from sim.policies.offload.vdnn.layers import Layers
from sim.policies.sharing import alike
from sim.solvers.cascade import cascade
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.op import KINDS


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
        on the card and on time factors of algorithms, which are estimates: 50 % on `p100`, 29 at the rates of its Titan
        X (6.6 TFLOP/s, 336 and 12.8 GB/s, second-hand), 23 where convolutions reach 60 % of these.
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
    fidelity: ClassVar[Fidelity] = "equations"
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
        return self._static(problem, self.variant, implementations(problem.trace, self.algorithm))

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """Every op in its fastest implementation."""
        fastest = implementations(problem.trace, "p")
        return {"fastest implementations": Plan(choose(problem.trace, fastest))}

    # ---- the static plans --------------------------------------------------------------------

    def _static(self, problem: Problem, variant: str, chosen: Mapping[int, str]) -> Plan:
        platform, host = problem.platform, self._host(problem)
        trace = choose(problem.trace, chosen)
        homes = tuple(platform.home(each).name for each in range(trace.devices))
        key = self, variant, host, homes, (trace.tensor_columns.bytes > 0).tobytes()
        actions = alike(trace, key, lambda: self._actions(trace, variant, host, homes))
        away = sorted({trace.tensor_id(act.tensor) for act in actions if isinstance(act, Move) and act.to == host})
        notes = {"variant": variant, "implementations": dict(chosen), "offloaded": tuple(away)}
        return Plan(trace, cascade(trace, platform, actions, host), notes=notes)

    def _actions(self, trace: Trace, variant: str, host: str, homes: Sequence[str]) -> tuple[Action, ...]:
        """What offloads and fetches the inputs of layers."""
        key = self.heavy, self.classifier
        layers = kept(trace, "vdnn_layers", key, lambda: Layers(trace, *key))
        actions: list[Action] = []
        sent = layers.sent(variant)
        for n, tensors in sent.items():
            first, last = layers.ops[n][0], layers.ops[n][-1]
            for t in tensors:
                actions += self.sending(t, host, first, last)
        away = {t for tensors in sent.values() for t in tensors}
        fetched: set[int] = set()
        for n, run in layers.backward_runs():
            home = homes[int(trace.op_columns.device[run[0]])]
            missing = [t for t in dict.fromkeys(t for op in run for t in trace.reads(op)) if t in away - fetched]
            for t in missing:
                actions += self.fetching(t, home, run[0], Wait(t, before=run[0]))
            fetched.update(missing)
            beside = [t for t in layers.prefetch(n, run[0], sent, fetched) if t in away - fetched]
            fetched.update(beside)
            for t in beside:
                end = Wait(t, after=run[-1]) if layers.plain(run[-1]) else None
                actions += self.fetching(t, home, run[0], end)
        return tuple(actions)

    def _host(self, problem: Problem) -> str:
        if problem.platform.host is None:
            raise PolicyError(f"{own_name(type(self))}: {problem.platform.name} has no host tier to offload to")
        return problem.platform.host.name

    def sending(self, tensor: int, host: str, first: int, last: int) -> Iterable[Action]:
        """What offloads an input of whatever size beside a layer, which begins and ends with these ops."""
        return (Move(tensor, host, keep=True, before=first), Wait(tensor, after=last), Drop(tensor, after=last))

    def fetching(self, tensor: int, home: str, first: int, wait: Wait | None) -> Iterable[Action]:
        """What brings it back from the backward op `first` on; `wait`: where both streams are waited for."""
        move = Move(tensor, home, before=first)
        return (move,) if wait is None else (move, wait)

    # ---- dyn ---------------------------------------------------------------------------------

    def _try_all(self, problem: Problem) -> Plan:
        """The first of the published passes that fits; never one slower than `all` with least workspace."""
        least, fastest = (implementations(problem.trace, algorithm) for algorithm in "mp")
        smaller = () if fastest == least else ("conv", "all")
        for variant in ("none", *(smaller or ("conv",))):  # `all` with least workspace comes last
            plan = self._static(problem, variant, fastest)
            log = _fits(problem, plan)
            if log is not None:
                return self._faster(problem, plan, log, least)
        for variant in smaller:
            found = self._shrink(problem, variant, fastest)
            if found is not None:
                return self._faster(problem, *found, least)
        floor = self._static(problem, "all", least)
        problem.evaluate(floor)
        return floor

    def _faster(self, problem: Problem, plan: Plan, log: EventLog, least: Mapping[int, str]) -> Plan:
        """A plan that was replayed, unless `all` with least workspace fits and is faster; that is replayed only where
        it could be."""
        floor = self._static(problem, "all", least)
        if log.end <= problem.least_ns(floor):
            return plan
        other = _fits(problem, floor)
        return plan if other is None or log.end <= other.end else floor

    def _shrink(self, problem: Problem, variant: str, chosen: Mapping[int, str]) -> tuple[Plan, EventLog] | None:
        """Where memory overflows take the next smaller workspace of that op, until all fits or none is left."""
        now = dict(chosen)
        while True:
            plan = self._static(problem, variant, now)
            try:
                return plan, problem.evaluate(plan)
            except OutOfMemory as error:
                op = overflow(error, problem.home, problem.trace)
                smaller = None if op is None else next_smaller(problem.trace, op, now.get(op, ""))
                if op is None or smaller is None:
                    return None
                now[op] = smaller


def _fits(problem: Problem, plan: Plan) -> EventLog | None:
    try:
        return problem.evaluate(plan)
    except OutOfMemory:
        return None
