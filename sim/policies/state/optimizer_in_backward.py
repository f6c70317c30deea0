"""The optimizer in the backward pass: a parameter is updated as soon as its gradient is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.policies.sharing import rewriting
from sim.rewrites.holding import points, with_releases
from sim.rewrites.order import as_early, must_precede, with_sends
from sim.rewrites.rewrite import reorder
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE

UPDATE = PHASE_CODE["update"]


@dataclass(frozen=True, kw_only=True)
class OptimizerInBackward(Policy):
    """Each op of the update runs once what it reads exists and nothing reads what it overwrites; gradients end there.

    Ops of the update keep their order among themselves where one depends on another; all other ops keep theirs. A
    gradient is released with the last op that reads it, as a hook that sets it to None does, instead of being held
    until the end of the step. So the gradients that are resident at once are those of one update op: one parameter's
    with an optimizer that loops over parameters (`adamw_loop`, `adafactor`), one layer's with the others, whose
    kernels the traces built here cut by layer.
    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), ACL 2024,
        arXiv:2306.09782, section 3.1; PyTorch's `register_post_accumulate_grad_hook`; torchtune's
        `optimizer_in_bwd`.
    Bounds: the same ops, in at most the same time without waits; gradients resident at once: those of the largest
        update op, and those that are still incomplete (a tied embedding's). Plans in O(ops + operands).
    Departs: LOMO's own update (SGD that is fused with the gradient's computation) is not built: the trace's optimizer
        is moved as it is. A loop's temporary counts the previous parameter's, in the order of the old loop.
        What reads all gradients, such as clipping by their norm, or a captured optimizer that takes all parameters in
        one op, keeps the update behind it after the backward pass; the plan's note `moved` counts the ops that run
        earlier. With accumulation over microbatches only the last one's gradients are updated at once.
    """

    rewrites = True
    manages = ("gradients",)
    saves = MappingProxyType({"release": "the hook that updates a weight sets its gradient to None at once"})
    fidelity = "code"
    rarely = "the update of a random example seldom has an op that could run before the last gradient is there"

    def plan(self, problem: Problem) -> Plan:
        """The trace in the new order."""
        return rewriting(problem.trace, self, (), lambda: self._reordered(problem.trace))

    def _reordered(self, trace: Trace) -> Plan:
        c = trace.op_columns
        updates = {op for op in range(len(trace.ops)) if c.phase[op] == UPDATE}
        waits = {op: with_sends(trace, must_precede(trace, op)) for op in updates}
        order = list(as_early(len(trace.ops), waits))
        new_at = {op: i for i, op in enumerate(order)}
        held = [(t, new_at[op]) for t, op in points(trace) if op not in updates]
        moved = sum(new_at[op] < op for op in updates)
        new = reorder(trace, order)
        return Plan(with_releases(new, sorted(held, key=lambda point: point[1])), notes={"moved": moved})

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """The same order; where updates have an engine of their own, it may be the faster one."""
        return {"updates in the backward pass": self.plan(problem)}
