"""moDNN: sub-batches, algorithms of convolutions and offloading together, for the least time within any budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Annotated

import numpy as np
from annotated_types import Ge

from sim.errors import Infeasible, OutOfMemory, PolicyError, TraceError
from sim.hardware.cost import op_times
from sim.log import EventLog
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.modnn.bounds import least_of_parts
from sim.policies.offload.modnn.offloads import offloads
from sim.policies.offload.vdnn.implementations import choose, implementations, next_smaller, overflow
from sim.rewrites.batching import split_batch_ops
from sim.rewrites.kept import kept as kept_rewritten
from sim.rewrites.rewriter import with_columns
from sim.trace.graph import Trace


@dataclass(frozen=True, kw_only=True)
class ModNn(Policy):
    """Try sub-batches; for each offload what the budget lacks, and take smaller workspaces where that is not enough.

    For each number of sub-batches that divides the batch, every op begins in its fastest implementation. Where the
    resident bytes exceed the budget, the tensor that is away longest across that op is offloaded: out as soon as it has
    been read, back as late as its next reader allows, or later where memory is full; space for copies back is given in
    the order of need, or in the reverse. Where nothing is left to offload, the op takes its implementation with the
    next smaller workspace, in all sub-batches. What still does not fit waits until memory is free. Of the plans that
    fit, the one that takes least time by replay is chosen.
    Source: Chen, Chen, Hu, "moDNN: Memory Optimal DNN Training on GPUs", DATE 2018, doi:10.23919/DATE.2018.8341972. Its
        ingredients are those of the abstract; how they are put together is this package's.
    Bounds: nothing offloaded and one sub-batch where everything fits with the fastest implementations. Four replays per
        number of sub-batches, and more for workspaces that shrink.
    Headline: down to a fiftieth of the memory; 8 % slower than without a limit on a GPU of 12 GB. Here, on `p100` with
        plain SGD and cuDNN's kernels, VGG-16 with 256 images takes 1.1 % more on 12 GB, and a tenth of the memory at
        least.
    Departs: workspaces, and the ratios of times between implementations, are the same for all sub-batches. An op of a
        sub-batch takes what the machine's model of op times says of its size: a launch of its own, all of its weights'
        bytes, and with `op_time = bound` its own waves; of a measured op the time shrinks as in that model, which is
        less than in proportion. Ops that cannot be split by
        batch, such as batch norm, whose statistics would change, leave the batch whole. Inputs and weights stay.
        Tensors beyond the host's capacity go on to the tier behind it. More memory does not always mean less time: what
        is away longest need not be what costs least, and copies queue; for that reason `swap_all`, which offloads
        everything, may be faster.

    most_parts: the most sub-batches that are tried where fewer fit; more are tried until some fit.
    Notes of the plan: `parts`, the number of sub-batches; `implementations`, per op of the trace given the name of the
    one taken ("" for its own); `offloaded`, how many times a tensor leaves.
    Raises PolicyError for a number below 1 or a platform without a host tier; OutOfMemory where no sub-batch fits.
    """

    moves = True
    rewrites = True
    splits_batch = True
    needs = frozenset({"host"})
    fidelity = "reconstruction"
    saves = MappingProxyType({"implementation": "moDNN chooses the algorithm of each convolution with its workspace"})
    rarely = "it moves only what the budget lacks, and rewrites only where an op has a choice or memory is short"
    other_values = by_parameter(most_parts=1)

    most_parts: Annotated[int, Ge(1)] = 16

    def plan(self, problem: Problem) -> Plan:
        """The fastest of the plans for each number of sub-batches."""
        if problem.platform.host is None:
            raise PolicyError(f"modnn: {problem.platform.name} has no host tier to offload to")
        trace, fastest = problem.trace, implementations(problem.trace, "p")
        best: tuple[int, Plan] | None = None
        refused: Infeasible | None = None
        for parts in _divisors(trace):
            if best is not None and parts > self.most_parts:
                break
            if best is not None and least_of_parts(trace, problem.platform, parts, fastest) >= best[0]:
                break
            try:
                trial = _Trial(problem, parts, problem.platform.host.name)
            except TraceError:
                break  # an op that cannot be split by batch
            if best is not None and trial.least_ns >= best[0]:
                break
            for shrink, through_time in product((True, False), repeat=2):
                if not shrink and through_time not in trial.shrunk:
                    continue  # the same as with it
                try:
                    plan, log = trial.fitted(shrink, through_time)
                except Infeasible as error:
                    refused = error
                    if through_time:
                        continue
                    break  # the other ways need more
                if best is None or log.end < best[0]:
                    best = log.end, plan
                if log.end == trial.least_ns:
                    break
            if best is not None and not best[1].actions and parts == 1:
                break  # memory does not limit it
        if best is None:
            assert refused is not None
            raise refused
        return best[1]

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """Every op in its fastest implementation."""
        return {"fastest implementations": Plan(choose(problem.trace, implementations(problem.trace, "p")))}


def _divisors(trace: Trace) -> Iterator[int]:
    """Into how many equal parts the batch can be split."""
    batch = trace.meta.get("batch")
    known = batch if isinstance(batch, int) and trace.devices == 1 else 1
    yield from (n for n in range(1, max(known, 1) + 1) if known % n == 0)


def _split(trace: Trace, parts: int) -> tuple[Trace, list[int]]:
    """The sub-batches, and for each of their ops the op that it is a part of or works for; kept for further budgets."""

    def make() -> tuple[tuple[Trace, list[int]], Trace]:
        split, which = split_batch_ops(trace, parts)
        return (split, [old for old, _ in which]), split

    return kept_rewritten(trace, ("sub_batches", parts), make)


def _with_measured(split: Trace, old: Sequence[int], problem: Problem) -> Trace:
    """Sub-batches whose measured ops take, of the whole op's time, the part that the model of op times gives them.

    old: per op of the split trace the op that it is a part of.
    """
    whole, measured = problem.trace.op_columns.duration, split.op_columns.duration
    if (measured < 0).all():
        return split
    unmeasured = (with_columns(trace, duration=np.full(len(trace.ops), -1)) for trace in (problem.trace, split))
    full, part = (op_times(trace, problem.platform).total for trace in unmeasured)
    scaled = measured.copy()
    for op in np.flatnonzero(measured >= 0).tolist():
        if whole[old[op]] >= 0 and full[old[op]] > 0:
            ns = -(-int(whole[old[op]]) * int(part[op]) // int(full[old[op]]))
            scaled[op] = min(max(int(measured[op]), ns), int(whole[old[op]]))
    return with_columns(split, duration=scaled)


class _Trial:
    """A number of sub-batches, each op in the fastest implementation. Raises TraceError where an op cannot be split.

    least_ns: what the device computes at least, whatever memory does.
    shrunk: the values of `through_time` with which some op took a smaller workspace rather than wait.
    """

    def __init__(self, problem: Problem, parts: int, host: str) -> None:
        self.problem, self.parts, self.host = problem, parts, host
        self.split, self.old = _split(problem.trace, parts)
        self.split = _with_measured(self.split, self.old, problem) if parts > 1 else self.split
        self.members: dict[int, list[int]] = {}
        for op in sorted(self.split.op_columns.alternatives):
            self.members.setdefault(self.old[op], []).append(op)
        self.shrunk = set[bool]()
        self._fresh()
        times = op_times(self._trace(), problem.platform).total
        self.least_ns = int(sum(ns for op, ns in enumerate(times.tolist()) if op not in self.split.op_columns.engine))

    def _fresh(self) -> None:
        self.chosen = implementations(self.problem.trace, "p")

    def fitted(self, shrink: bool, through_time: bool) -> tuple[Plan, EventLog]:
        """A plan that fits, and its replay. Raises OutOfMemory where there is none.

        shrink: whether an op rather takes a smaller workspace than wait until a tensor has left.
        through_time: whether a copy in that is needed sooner has the space first.
        """
        problem = self.problem
        self._fresh()
        while True:
            trace = self._trace()
            cost = problem.cost.over(trace, problem.platform)
            own = replace(problem, trace=trace, cost=cost)
            found = offloads(own, self.host, through_time=through_time)
            smaller = self._smaller(*found.short)
            if shrink:
                rather = self._smaller(*found.waits)
                if not rather.keys() <= smaller.keys():
                    self.shrunk.add(through_time)
                smaller |= rather
            if smaller:
                self.chosen.update(smaller)
                continue
            notes = {"parts": self.parts, "implementations": dict(self.chosen), "offloaded": found.times}
            plan = Plan(trace, found.actions, notes=notes)
            try:
                return plan, problem.evaluate(plan)
            except OutOfMemory as error:
                op = overflow(error, problem.home, trace)
                smaller = {} if op is None else self._smaller(op)
                if not smaller:
                    raise
                self.chosen.update(smaller)

    def _trace(self) -> Trace:
        """The sub-batches in the chosen implementations."""
        return choose(self.split, {op: name for old, name in self.chosen.items() for op in self.members.get(old, ())})

    def _smaller(self, *ops: int) -> dict[int, str]:
        """For all sub-batches, the next smaller workspace of each of these ops that has one."""
        return {
            old: name
            for old in {self.old[op] for op in ops}
            if (name := next_smaller(self.problem.trace, old, self.chosen.get(old, ""))) is not None
        }
