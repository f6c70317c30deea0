"""Plans that depend on the structure of a trace, or ignore the budget: shared, and held to what they declare."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from sim import load_profile, simulate
from sim.analysis.peak_memory import home_peak
from sim.conformance import check_policy
from sim.conformance.repeatability import other_sizes
from sim.engine.replay import replay
from sim.errors import TraceError
from sim.experiment import problem_for, reference_run
from sim.plan import Drop, Move, Plan, Problem, Recompute
from sim.policies import load, names
from sim.policies.base import Policy
from sim.policies.sharing import shared
from sim.rewrites.rewriter import with_columns
from sim.trace import Trace, TraceBuilder
from sim.trace.chain import chain
from sim.trace.columns import FROM_READS_AND_WRITES, FROM_STRUCTURE
from sim.trace.phases import saved_tensors
from workloads import transformer

MACHINE = load_profile("a100_80_sxm")
SMALL = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 256}
SHARED = ("full_recompute", "every_k", "selective_recompute")
POLICIES = (
    *SHARED,
    *("full_recompute(early_stop=False)", "full_recompute(reentrant=True)", "full_recompute(skip_last=True)"),
    *("every_k(k=2)", "every_k(skip_last=True)", "selective_recompute(recompute=attention_core)"),
)
VDNN = ("vdnn(variant=all)", "vdnn(variant=conv)", "vdnn_pp(variant=all)", "vdnn")


def small(batch: int, sequence: int) -> Trace:
    return transformer(SMALL, batch=batch, sequence=sequence, precision="amp_bf16", attention="eager")


def sizes() -> list[Trace]:
    """One model at several sizes; of the first two the second is built by formulas, which the others follow."""
    return [small(batch, sequence) for batch, sequence in ((2, 32), (4, 32), (6, 64), (3, 128))]


def _listed(derived):
    """Arrays as lists, in pairs of arrays as well."""
    if isinstance(derived, np.ndarray):
        return derived.tolist()
    return [_listed(each) for each in derived] if isinstance(derived, tuple) else derived


def alone(trace: Trace) -> Trace:
    """The same trace, which shares nothing."""
    return pickle.loads(pickle.dumps(trace))


# ---- structure -----------------------------------------------------------------------------------


def test_a_model_has_one_structure_at_all_sizes():
    _, *others = sizes()
    assert len({id(trace.structure) for trace in others}) == 1
    assert len({trace.content_hash for trace in others}) == len(others)


def test_what_traces_of_one_structure_take_over_is_what_each_would_derive():
    for trace in sizes():
        own = alone(trace)
        vars(own).pop("content_hash", None)
        assert trace.content_hash == trace.hashed_anew() == own.content_hash
        for name in (*FROM_READS_AND_WRITES, *FROM_STRUCTURE):
            mine, theirs = getattr(trace, name), getattr(own, name)
            assert repr(_listed(mine)) == repr(_listed(theirs))


def test_what_differs_in_more_than_sizes_has_another_structure():
    trace = sizes()[-1]
    c = trace.op_columns
    kept = with_columns(trace, flops=c.flops + 1)
    assert kept.structure is not trace.structure  # its origin says that it is a rewrite of the other
    for columns in ({"duration": c.duration + 1}, {"phase": c.phase.copy()}, {"random": ~c.random}):
        other = Trace(trace.tensor_columns, replace(c, **columns), outputs=trace.outputs, carry=trace.carry, like=trace)
        assert other.structure is not trace.structure
    fewer = Trace(trace.tensor_columns, c, outputs=trace.outputs[:-1], carry=(), like=trace)
    assert fewer.structure is not trace.structure
    same = Trace(
        trace.tensor_columns, replace(c, flops=c.flops + 1), outputs=trace.outputs, carry=trace.carry, like=trace
    )
    assert same.structure is trace.structure
    assert alone(trace).structure is not trace.structure


def in_place() -> Trace:
    """Two ops with workspace, a weight that is overwritten and carried, and a view."""
    b = TraceBuilder()
    weight, x = b.tensor("w", 64, "weight"), b.tensor("x", 32, "input")
    y, z, view, new = (
        b.tensor("y", 16),
        b.tensor("z", 16),
        b.tensor("v", 0),
        b.tensor("w'", 64, "weight", replaces=weight),
    )
    b.op("forward", "matmul", reads=[weight, x], writes=[y], flops=10, workspace=8)
    b.op("cut", "other", reads=[y], writes=[view], views=(0,))
    b.op("backward", "matmul", phase="backward", reads=[y, view], writes=[z], flops=10, workspace=24)
    b.op("update", "optimizer", phase="update", reads=[z], writes=[new], flops=4)
    return b.build()


def sized(trace: Trace, like: Trace | None, ops: dict = {}, **tensors: int) -> Trace:  # noqa: B006
    """The trace with other sizes: bytes of tensors by name, columns of ops whole."""
    t, c = trace.tensor_columns, trace.op_columns
    size = np.array([tensors.get(name.replace("'", "_"), size) for name, size in zip(t.name, t.bytes.tolist())])
    columns = {key: np.array(values, np.int64) for key, values in ops.items()}
    ends = {"outputs": trace.outputs, "carry": trace.carry}
    return Trace(replace(t, bytes=size), replace(c, **columns), **ends, like=like)


@pytest.mark.parametrize(
    "sizes",
    [
        {"w": 128},
        {"w": 128, "w_": 256},
        {"y": -1},
        {"v": 8},
        {"x": 2**61, "z": 2**61},
        {"ops": {"flops": [-1, 0, 0, 0]}},
        {"ops": {"flops": [2**62, 0, 0, 0]}},
        {"ops": {"workspace": [0, 0, -8, 0]}},
        {"ops": {"workspace": [2**61, 0, 2**61, 0]}},
    ],
    ids=str,
)
def test_impossible_sizes_are_refused_where_all_else_is_known_as_they_are_elsewhere(sizes):
    trace, said = in_place(), []
    for like in (None, trace):
        with pytest.raises(TraceError) as error:
            sized(trace, like, **sizes)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_other_sizes_of_one_structure_run_as_traces_of_their_own():
    trace = in_place()
    for workspace in ([8, 0, 24, 0], [0, 0, 24, 0], [0, 16, 0, 8], [8, 0, 24, 0]):
        for tensors in ({}, {"w": 512, "w_": 512, "y": 0}):
            ops = {"workspace": workspace, "flops": [2 * n for n in workspace]}
            other = sized(trace, trace, ops, **tensors)
            assert other.structure is trace.structure
            assert replay(Plan(other), MACHINE) == replay(Plan(alone(other)), MACHINE, fast=False)


def test_each_size_is_cut_into_the_stages_that_it_alone_would_have():
    found = [(chain(trace, range(len(trace.ops))), chain(alone(trace), range(len(trace.ops)))) for trace in sizes()]
    for shared_with_others, own in found:
        assert shared_with_others == own
    assert len({each.x for each, _ in found}) > 2


# ---- shared plans --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shared_plan_is_the_one_that_each_size_would_get(policy):
    chosen, made = load(policy), []
    for trace in sizes():
        plan, own = chosen.plan(problem_for(trace, MACHINE)), chosen.plan(problem_for(alone(trace), MACHINE))
        assert plan.decides_as(own)
        assert (plan.keep_dead, plan.notes) == (own.keep_dead, own.notes)
        assert plan.trace.origin == own.trace.origin
        assert replay(plan, MACHINE) == replay(own, MACHINE) == replay(own, MACHINE, fast=False)
        assert replay(Plan(trace), MACHINE) == replay(Plan(alone(trace)), MACHINE, fast=False)
        assert chosen.plan(problem_for(trace, MACHINE)) is plan  # replays know it again
        made.append(plan)
    assert made[2].actions is made[1].actions
    assert made[3].actions is made[1].actions
    assert made[3].trace.structure is made[2].trace.structure


MOVES = ("swap_all", "swap_all(unit=op)", "swap_attention(min_bytes=0)")


@pytest.mark.parametrize("policy", ["chen", "chen(method=sqrt)", *VDNN, *MOVES])
def test_actions_that_sizes_do_not_decide_are_made_once_for_all_sizes(policy):
    chosen, made = load(policy), []
    for trace in sizes():
        plan, own = (chosen.plan(problem_for(each, MACHINE)) for each in (trace, alone(trace)))
        assert plan.decides_as(own)
        assert plan.notes == own.notes
        assert simulate(trace, MACHINE, chosen).log == replay(own, MACHINE) == replay(own, MACHINE, fast=False)
        made.append(plan)
    assert made[2].actions is made[1].actions or policy == "chen"  # which looks at bytes
    assert made[3].actions is made[1].actions or policy == "chen"


def without_bytes(trace: Trace, tensor: int) -> Trace:
    """A trace of the same structure in which a tensor has no bytes."""
    t = trace.tensor_columns
    bytes = np.where(np.arange(len(t.bytes)) == tensor, 0, t.bytes)
    ends = {"outputs": trace.outputs, "carry": trace.carry, "meta": trace.meta}
    return Trace(replace(t, bytes=bytes), trace.op_columns, **ends, like=trace)


@pytest.mark.parametrize("policy", ["swap_all", "vdnn(variant=all)", "swap_attention(min_bytes=0)"])
def test_what_has_no_bytes_at_one_size_is_offloaded_at_others(policy):
    _, first, second, _ = sizes()
    offloaded = {act.tensor for act in load(policy).plan(problem_for(first, MACHINE)).actions if isinstance(act, Move)}
    empty = without_bytes(second, min(offloaded))
    assert empty.structure is first.structure
    plans = [load(policy).plan(problem_for(each, MACHINE)) for each in (empty, alone(empty), second)]
    left = [{act.tensor for act in plan.actions if isinstance(act, Move)} for plan in plans]
    assert left[0] == left[1] == offloaded - {min(offloaded)}
    assert left[2] == offloaded


COUNTING = ("autoswap", "autoswap(variables=all)", "g10", "layer_offload(min_elements=0)", "modnn", "sentinel", "tflms")
RECOMPUTING = ("twremat", "revolve", "dtr", "delta", "capuchin", "superneurons")


@pytest.mark.parametrize("policy", [*COUNTING, *RECOMPUTING])
def test_what_planners_find_once_for_a_structure_is_what_each_size_would_find(policy):
    traces = sizes()[1:]
    saved = saved_tensors(traces[-1])
    for trace in (*traces, without_bytes(traces[-1], int(saved[len(saved) // 2]))):
        budget = int(0.8 * home_peak(reference_run(trace, MACHINE)))
        runs = [simulate(each, MACHINE, policy, budget=budget) for each in (trace, alone(trace))]
        assert runs[0].plan.decides_as(runs[1].plan)
        assert runs[0].log == runs[1].log


def test_plans_of_other_parameters_and_those_that_look_at_times_are_not_mixed_up():
    _, first, second, _ = sizes()
    every = [load(f"every_k(k={k}, remove_unnecessary={keep})") for k in (1, 2) for keep in (False, True)]
    assert [policy.plans_from for policy in every] == ["structure", "problem"] * 2
    for trace in (first, second):
        for policy in every:
            own = policy.plan(problem_for(alone(trace), MACHINE))
            assert policy.plan(problem_for(trace, MACHINE)).decides_as(own)
            assert simulate(trace, MACHINE, policy).log == replay(own, MACHINE)


ON_A_MACHINE = ("chen", "swap_all", "swap_all(ahead=2)", "save_on_cpu", "offload_activations", "weight_streaming")


@pytest.mark.parametrize("policy", ON_A_MACHINE)
def test_a_plan_that_ignores_the_budget_is_made_once_for_a_trace_on_a_machine(policy):
    chosen, trace, other = load(policy), small(2, 32), load_profile("mt3000_survey")
    plan = chosen.plan(problem_for(trace, MACHINE))
    assert chosen.plan(problem_for(trace, MACHINE.with_budget(1 << 40), seed=3)) is plan
    tiers = [replace(each, capacity=1 << 16) if each.name.startswith("host") else each for each in MACHINE.tiers]
    full = replace(MACHINE, tiers=tuple(tiers))
    plans = [chosen.plan(problem_for(trace, machine)) for machine in (MACHINE, other, full)]
    for each, machine in zip(plans[1:], (other, full), strict=True):
        assert each.decides_as(chosen.plan(problem_for(alone(trace), machine)))
    # one moves nothing, no tier is behind pageable memory, and one sends nothing there
    assert len({each.actions for each in plans}) == {"chen": 1, "save_on_cpu": 2, "weight_streaming": 2}.get(policy, 3)


def test_these_policies_declare_it():
    assert {name for name in names() if load(name).plans_from == "structure"} == {*SHARED}


# ---- the law -------------------------------------------------------------------------------------


def rerun(trace: Trace, op: int) -> Plan:
    """What an op produces is dropped after it, and recomputed before its next reader."""
    results = [t for t in trace.writes(op) if trace.producer[t] >= 0]
    later = sorted({reader for t in results for reader in trace.readers(t)})
    able = later and not trace.op_columns.random[op] and all(trace.replaced_by[t] < 0 for t in trace.reads(op))
    if not able or trace.devices > 1 or trace.op_columns.engine or any(trace.replaced_by[t] >= 0 for t in results):
        return Plan(trace)
    return Plan(trace, [*(Drop(t, after=op) for t in results), Recompute(op, before=later[0])])


@dataclass(frozen=True, kw_only=True)
class Reruns(Policy):
    """One op, which depends on nothing but their number."""

    recomputes = True
    plans_from: ClassVar = "structure"
    rarely = "many ops cannot be recomputed"

    def plan(self, problem: Problem) -> Plan:
        return shared(self, problem, lambda: rerun(problem.trace, self.chosen(problem)))

    def chosen(self, problem: Problem) -> int:
        return len(problem.trace.ops) // 3


class BySize(Reruns):
    def chosen(self, problem: Problem) -> int:
        return int(np.argmax([sum(problem.trace.tensors[t].bytes for t in op.writes) for op in problem.trace.ops]))


class ByFlops(Reruns):
    def chosen(self, problem: Problem) -> int:
        return int(np.argmax(problem.trace.op_columns.flops))


class ByTime(Reruns):
    def chosen(self, problem: Problem) -> int:
        return int(np.argmax([problem.cost.op_ns(op) for op in range(len(problem.trace.ops))]))


class ByBudget(Reruns):
    def chosen(self, problem: Problem) -> int:
        return problem.budget % len(problem.trace.ops)


class BySeed(Reruns):
    def chosen(self, problem: Problem) -> int:
        return problem.seed % len(problem.trace.ops)


class ByTiers(Reruns):
    def chosen(self, problem: Problem) -> int:
        return len(problem.platform.tiers) - 1


class Ahead(Reruns):
    plans_from = "machine"


class ByBudgetAhead(ByBudget):
    plans_from = "machine"


class BySeedAhead(BySeed):
    plans_from = "machine"


@pytest.mark.parametrize("policy", [ByBudgetAhead, BySeedAhead, BySize, ByFlops, ByTime, ByBudget, BySeed, ByTiers])
def test_a_policy_that_declares_it_falsely_breaks_law_7(policy, tmp_path):
    report = check_policy(policy(), examples=60, folder=tmp_path, across_processes=False)
    (broken,) = [entry for entry in report.broken if entry.law == "repeats"]
    assert "plans_from" in broken.text


@pytest.mark.parametrize("policy", [Reruns, Ahead])
def test_a_policy_that_declares_it_truly_keeps_every_law(policy, tmp_path):
    report = check_policy(policy(), examples=40, folder=tmp_path, across_processes=False)
    assert not report.broken, report.as_text()


def test_other_sizes_are_in_another_order_and_as_legal():
    b = TraceBuilder()
    x, y, z = b.tensor("x", 10, "input", shape=(10,)), b.tensor("y", 30), b.tensor("z", 30)
    b.op("a", reads=[x], writes=[y], flops=5)
    b.op("b", reads=[y], writes=[z], flops=7, workspace=3)
    trace = b.build(outputs=[z], carry=())
    other = other_sizes(trace)
    x, y, z = other.tensor_columns.bytes.tolist()
    assert x > y == z > 0
    assert other.op_columns.flops[0] > other.op_columns.flops[1] > 0
    assert (other.op_columns.workspace > 0).tolist() == [False, True]
    assert [op.name for op in other.ops] == ["a", "b"]
