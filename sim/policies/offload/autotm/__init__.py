"""AutoTM: an integer program places and moves tensors between a fast and a slow tier."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from sim.errors import OutOfMemory, PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.autotm.lifetimes import Lives, lives_of
from sim.policies.offload.autotm.moves import Moves
from sim.policies.offload.autotm.program import Program
from sim.solvers.outcome import nothing_fits
from sim.units import format_bytes

SHRINK = (10**5, 50, 50, 50)
"""Where a run does not fit what the program counted, the next one has so little of its memory less: at first what the
solver's tolerance may have overdrawn, then what holes between blocks may take."""
NODES = 20_000


@dataclass(frozen=True, kw_only=True)
class AutoTm(Policy):
    """Place each tensor in the fast or the slow tier at each of its uses, and move it in between, at the least time.

    Each tensor has a path through two tiers: at each op that uses it, it is in one of them, and in between it stays in
    the fast one or leaves it. Where the device's engine reads and writes the slow tier in place, an op may use operands
    there, at that tier's bandwidth; else all its operands are in the fast tier. A copy holds the device
    (`synchronous`), or runs beside one op (`asynchronous`), which then takes no less than all copies beside it; a
    tensor is copied out once, as the slow tier keeps it. One integer program minimises the sum of op times and copies,
    with the bytes in the fast tier bounded at each op. `static` has each tensor in one tier for life.
    Source: Hildebrand, Khan, Trika, Lowe-Power, Akella, "AutoTM: Automatic Tensor Movement in Heterogeneous Memory
        Systems using Integer Linear Programming", ASPLOS 2020, doi:10.1145/3373376.3378465; the formulation also as in
        its public code.
    Bounds: the least time among plans of the mode (`bound_ns`) with `status` optimal. Without asynchronous copies the
        run takes the time that the program says. About six columns per gap between uses,
        and one per op of each window.
    Headline: 50 to 80 % of DRAM replaced by Optane at 27.7 % less speed (geometric mean; a first-touch placement loses
        71.9 %). Here on `xeon_optane`, with half and four fifths replaced, VGG-16 and AlexNet take 38 % more time with
        static placement, which is 28 % less speed, and 33 % more with copies beside ops.
    Departs: an op's time is the sum of what each operand adds in its tier, by the cost model; the paper measures it for
        each combination of tiers. A copy runs beside one of the `window` ops behind a use or ahead of the next. An op
        has one implementation. Sizes are bytes, not pages of 4 KiB. Tensors that memory is large enough for throughout
        their life are in the fast tier, and decided before. What fits only without holes between blocks is solved again
        with less memory, of the whole device and not of the op. Where the slow tier is too small, as DRAM in front of
        CXL, the program is solved once more with the tier behind it: each tensor has one of the two, fixed before,
        those that live longest the nearer one. What other engines or groups use stays.
        Slower than `swap_all` where copies take longer than an op, since the device waits for each: as published,
        whose slow tier is read at a third of DRAM's rate.

    mode: which moves there are.
    window: beside how many ops on either side of a gap a copy may run.
    max_ops: the most ops to plan for.
    time_limit: seconds of search.
    Notes of the plan: `status`, `expected_ns` of the program, `bound_ns`, `limit`, `time_limited`.
    Raises Infeasible where no plan of the mode fits; PolicyError for several devices, too many ops, a limit reached
        before any plan was found, or a platform without a host tier.
    """

    moves = True
    solver = "milp"
    slow = True
    needs = frozenset({"host"})
    manages = ("activations", "gradients", "optimizer_state", "weights")
    fidelity = "equations"
    rarely = "it moves only what exceeds the memory"
    other_values = by_parameter(mode="synchronous", window=1)
    unseen = by_parameter(
        max_ops="beyond it a trace is refused; see its own tests",
        time_limit="a search cut short finds the same plan, or none; see its own tests",
    )

    mode: Literal["static", "synchronous", "asynchronous"] = "asynchronous"
    window: Annotated[int, Ge(1)] = 3
    max_ops: Annotated[int, Ge(1)] = 1000
    time_limit: Annotated[float, Gt(0)] = 60.0

    def plan(self, problem: Problem) -> Plan:
        """Where tensors begin, are born and are moved."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"autotm: {platform.name} has no host tier to move to")
        if trace.devices > 1:
            raise PolicyError(f"policy 'autotm' plans one device; the trace has {trace.devices}")
        chain = platform.cascade(platform.host.name)
        for tiers in (chain[:1], chain) if len(chain) > 1 else (chain,):
            lives = lives_of(problem, tiers)
            if not lives.lives:
                return Plan(trace, notes=_notes("optimal", sum(lives.took), sum(lives.took)))
            if len(trace.ops) > self.max_ops:
                raise PolicyError(
                    f"policy 'autotm' plans {self.max_ops} ops at most (max_ops); there are {len(trace.ops)}"
                )
            status, plan, full = self._solved(problem, lives)
            if plan is not None:
                return plan
        if status == "unknown":
            raise PolicyError("policy 'autotm' found no plan before it met its limit; raise time_limit, or the budget")
        plain = Plan(trace, notes=_notes("feasible", sum(lives.took), 0))
        with suppress(OutOfMemory):  # the program counts what runs beside the device as if it ran there
            problem.evaluate(plain)
            return plain
        what = f"policy 'autotm': no {self.mode} plan fits {format_bytes(problem.budget)}"
        raise nothing_fits(problem, what, None, end=f"; {full!r} has no space for what leaves" if full else "")

    def _solved(self, problem: Problem, lives: Lives) -> tuple[str, Plan | None, str]:
        """The program's status, and a plan that fits; None where there is none, and the slow tier that was short."""
        room = problem.budget
        for part in SHRINK:
            status, values, bound = Program(lives, room, self.mode, self.window).solve(
                time_limit=self.time_limit, node_limit=NODES
            )
            if values is None:
                break
            moves = Moves(problem, lives, values)
            limit = "" if status == "optimal" else "time"
            notes = _notes(status, moves.expected_ns, min(round(bound), moves.expected_ns), limit)
            plan = Plan(problem.trace, moves.actions, place=moves.place, notes=notes)
            try:
                problem.evaluate(plan)
            except OutOfMemory as short:
                if full := {short.tier, *short.full} & {life.slow for life in lives.lives}:
                    return status, None, min(full)  # with less memory on the device even more would go there
                room -= max(room // part, 1)
            else:
                return status, plan, ""
        return status, None, ""


def _notes(status: str, expected: int, bound: int, limit: str = "") -> dict[str, Any]:
    return {
        "status": status,
        "expected_ns": expected,
        "bound_ns": bound,
        "limit": limit,
        "time_limited": limit == "time",
    }
