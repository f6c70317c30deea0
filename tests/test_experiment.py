"""Runs and comparisons as a Python user meets them: short words in, one line for a mistake, figures out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import pytest

from sim import compare, experiment, largest_batch, load_policy, load_profile, policy_names, simulate, smallest_budget
from sim.engine.replay import replay
from sim.errors import IllegalPlan, PolicyError, PolicyFailed, ProfileError, TraceError, WorkloadError
from sim.iterations import run_iteration
from sim.log import STALLS, WHY
from sim.plan import Drop, Online, Plan, Recompute, Run, Unpressed, Wait
from sim.policies import FAMILIES, family, policy_class
from sim.policies.base import Policy
from workloads import synthetic, transformer

PLATFORM = load_profile("a100_40_pcie")
TRACE = synthetic.uniform_chain(4)


@dataclass(frozen=True, kw_only=True)
class Divides(Policy):
    """Divides by zero."""

    def plan(self, problem):
        return 1 // 0


class Lists(Policy):
    """Returns the actions, not a plan."""

    def plan(self, problem):
        return [Drop(0, after=0)]


class Nothing(Policy):
    """Forgets to return its plan."""

    def plan(self, problem):
        Plan(problem.trace)


class Misspelt(Policy):
    """Has no method `plan`."""

    def paln(self, problem):
        return Plan(problem.trace)


@dataclass(frozen=True, kw_only=True)
class Noteless(Policy):
    """Has notes that are no mapping."""

    notes: object = None

    def plan(self, problem):
        return Plan(problem.trace, notes=self.notes)


class Looks(Online):
    """Looks up what is not there."""

    def before(self, op, memory) -> Iterable[Drop]:
        return {}[op]


class FaultyOnline(Policy):
    """Plans well and fails while it runs."""

    online = True

    def plan(self, problem):
        return Plan(problem.trace, online=Looks)


@dataclass(frozen=True, kw_only=True)
class Mine(Policy):
    """Keeps everything, with parameters."""

    size: int = 1
    words: tuple[str, ...] = ()

    def plan(self, problem):
        return Plan(problem.trace)


FAULTS = {
    Divides: r"policy 'Divides': test_experiment.py line \d+: ZeroDivisionError: integer division or modulo by zero",
    Lists: r"policy 'Lists': plan\(\) returned a list, expected a Plan",
    Nothing: r"policy 'Nothing': plan\(\) returned None, expected a Plan",
    Misspelt: r"policy 'Misspelt': .*Misspelt does not define plan\(problem\)",
    FaultyOnline: r"policy 'FaultyOnline': test_experiment.py line \d+: KeyError: 0",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_policy_says_where_and_keeps_its_cause(kind):
    with pytest.raises(PolicyFailed, match=FAULTS[kind]) as raised:
        simulate(TRACE, PLATFORM, kind())
    assert "\n" not in str(raised.value)
    expected = {Divides: ZeroDivisionError, Misspelt: NotImplementedError, FaultyOnline: KeyError}.get(kind)
    assert type(raised.value.__cause__) is (expected or type(None))


def test_the_line_of_a_fault_is_the_policys_own():
    with pytest.raises(PolicyFailed) as raised:
        simulate(TRACE, PLATFORM, Divides())
    assert f"line {Divides.plan.__code__.co_firstlineno + 1}:" in str(raised.value)


def test_a_fault_of_a_policy_is_one_row_of_a_comparison():
    found = compare(TRACE, PLATFORM, ["keep_all", *(kind() for kind in FAULTS), "full_recompute"])
    assert [row["fits"] for row in found.rows] == [True, *[None] * len(FAULTS), True]
    assert "ZeroDivisionError" in found.rows[1]["error"]
    assert found.failed
    assert set(found.results) == {"keep_all", "full_recompute"}


def test_a_mistake_of_the_trace_or_the_memory_stays_what_it_is():
    with pytest.raises(PolicyError):
        simulate(TRACE, PLATFORM, "chen", method="sqrtt")


# ---- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "parameters", "text"),
    [
        ("every_k", {"k": 2.5}, r"policy 'every_k': k is 2\.5; expected int"),
        ("every_k", {"k": "two"}, r"policy 'every_k': k is 'two'; expected int"),
        ("every_k", {"k": True}, r"k is True; expected int"),
        ("dtr", {"by_size": "no"}, r"policy 'dtr': by_size is 'no'; expected bool"),
        ("dtr", {"by_size": 0}, r"by_size is 0; expected bool"),
        ("chen", {"segments": 2.5}, r"segments is 2\.5; expected int of at least 1 or None"),
        ("vdnn", {"heavy": "conv"}, r"heavy is 'conv'; expected tuple of 'matmul', "),
        ("vdnn", {"heavy": [1]}, r"heavy is \(1,\); expected tuple of"),
        (Mine(), {"size": "1"}, r"policy 'Mine': size is '1'; expected int"),
        (Mine(), {"sise": 1}, r"policy 'Mine' has no parameter 'sise' \(did you mean 'size'\?\)"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(policy, parameters, text):
    with pytest.raises(PolicyError, match=text):
        load_policy(policy, **parameters)


def test_values_of_their_type_are_taken():
    assert load_policy("rockmate", time_limit=20).time_limit == 20
    assert load_policy("chen", segments=None, method="sqrt").segments is None
    assert load_policy("vdnn", heavy=["conv"]) == load_policy("vdnn", heavy=("conv",))
    assert load_policy("zero_offload", bucket="5 MB").bucket == "5 MB"
    assert load_policy(Mine(size=3), words=["a"]) == Mine(size=3, words=("a",))


@pytest.mark.parametrize("name", policy_names())
def test_every_default_of_a_shipped_policy_is_of_its_type(name):
    policy = load_policy(name)
    assert load_policy(name, **{field.name: getattr(policy, field.name) for field in fields(policy)}) == policy


@pytest.mark.parametrize("name", [name for name in policy_names() if family(name) in FAMILIES])
def test_every_shipped_policy_says_its_own_fidelity(name):
    assert "fidelity" in vars(policy_class(name))


def test_a_policy_that_does_not_say_its_fidelity_is_no_papers_algorithm():
    assert Mine().fidelity == "reconstruction"


# ---- what may be given -------------------------------------------------------------------------


def test_one_policy_need_not_stand_in_a_list():
    for policy in ("keep_all", ("keep_all", {}), load_policy("keep_all"), policy_class("keep_all")):
        found = compare(TRACE, PLATFORM, policy)
        assert [(row["policy"], row["fits"]) for row in found.rows] == [("keep_all", True)]
    assert [row["policy"] for row in compare(TRACE, PLATFORM, ("keep_all", "every_k")).rows] == ["keep_all", "every_k"]


def test_no_policies_are_none():
    assert compare(TRACE, PLATFORM, []).rows == ()


def test_a_class_stands_for_its_policy():
    assert simulate(TRACE, PLATFORM, Mine, size=2).policy == Mine(size=2)
    with pytest.raises(PolicyError, match="'int' is not a Policy"):
        simulate(TRACE, PLATFORM, int)


def test_a_policy_is_labelled_with_what_is_not_its_default():
    asked = [Mine(), Mine(size=2, words=("a",)), load_policy("chen", method="sqrt")]
    labels = [row["policy"] for row in compare(TRACE, PLATFORM, asked).rows]
    assert labels == ["Mine", 'Mine(size=2, words=["a"])', "chen(method=sqrt)"]


FILE = '''
from sim import Plan, Policy

class {}(Policy):
    """Keeps everything."""

    def plan(self, problem):
        return Plan(problem.trace)
'''


def test_a_file_with_one_policy_needs_no_class(tmp_path):
    path = tmp_path / "one.py"
    path.write_text(FILE.format("Only"))
    assert type(load_policy(str(path))).__name__ == "Only"
    assert load_policy(str(path)) == load_policy(f"{path}:Only")
    assert family(str(path)) == "file"


def test_a_file_with_more_or_none_says_what_to_write(tmp_path):
    two, none = tmp_path / "two.py", tmp_path / "none.py"
    two.write_text(FILE.format("First") + FILE.format("Second"))
    none.write_text("from sim import Policy\n")
    with pytest.raises(PolicyError, match=r"defines 2 policies; name the class: .*two\.py:First"):
        load_policy(str(two))
    with pytest.raises(PolicyError, match="defines no subclass of Policy"):
        load_policy(str(none))


@dataclass(frozen=True, kw_only=True)
class ChangesItsMind(Policy):
    """Replays a plan, and then changes the lists that it has made it from."""

    recomputes = True

    def plan(self, problem):
        last = len(problem.trace.ops) - 1
        actions, place = [], {}
        plan = Plan(problem.trace, actions, place)
        problem.evaluate(plan)
        actions += [Recompute(0, before=last)]
        place[0] = "host"
        return plan


def test_the_run_is_that_of_the_plan_whatever_has_become_of_its_lists():
    result = simulate(TRACE, "a100_40_pcie", ChangesItsMind())
    assert replay(replace(result.plan), result.platform) == result.log


def test_a_platform_may_be_given_by_its_profiles_name():
    by_name = simulate(TRACE, "a100_40_pcie")
    assert by_name.log.content_hash == simulate(TRACE, PLATFORM).log.content_hash
    assert compare(TRACE, "a100_40_pcie", "keep_all").platform.content_hash == PLATFORM.content_hash
    assert smallest_budget(TRACE, "a100_40_pcie") == smallest_budget(TRACE, PLATFORM)
    assert largest_batch(lambda batch: TRACE, "a100_40_pcie", limit=4) > 0
    with pytest.raises(ProfileError, match="did you mean 'a100_40_pcie'"):
        simulate(TRACE, "a100_40_pci")
    with pytest.raises(ProfileError, match="name of a profile, not a NoneType"):
        simulate(TRACE, None)


def test_the_name_of_a_model_is_no_trace():
    for run in (simulate, compare, smallest_budget):
        with pytest.raises(TraceError, match="expected a trace, not 'gpt2'"):
            run("gpt2", PLATFORM)
    with pytest.raises(TraceError, match="not a Platform"):
        simulate(PLATFORM, TRACE)
    with pytest.raises(WorkloadError, match=r"lambda b: transformer\('gpt2', batch=b"):
        largest_batch("gpt2", PLATFORM)


# ---- what is shown -----------------------------------------------------------------------------


def test_what_a_prompt_shows_is_short():
    result = simulate(TRACE, PLATFORM, "full_recompute")
    found = compare(TRACE, PLATFORM, ["keep_all", Divides()])
    assert repr(result).startswith("<Result of full_recompute on a100_40_pcie: ")
    assert repr(found) == f"<Comparison of 2 policies on a100_40_pcie, {TRACE!r}: 1 fit>"
    plan = Plan(TRACE, (Drop(0, after=0), Drop(1, after=1)), online=Looks)
    assert repr(plan) == f"<Plan for {TRACE!r}: 2 Drop, online>"
    assert repr(Plan(TRACE)) == f"<Plan for {TRACE!r}: no actions>"
    assert max(map(len, map(repr, (result, found, result.plan)))) < 200


def test_a_notebook_shows_the_key_columns_of_a_comparison():
    html = compare(TRACE, PLATFORM, ["keep_all", Divides()])._repr_html_()
    for text in ("keep_all", "Divides", "peak_bytes", "makespan_ns", "ZeroDivisionError"):
        assert text in html
    assert "stall_ns" not in html


def test_a_result_draws_itself(tmp_path):
    from matplotlib.figure import Figure

    result = simulate(TRACE, PLATFORM)
    for figure in (result.plot_memory(), result.plot_memory("host"), result.plot_lanes(), result.plot_lanes((0, 10))):
        assert isinstance(figure, Figure)
    path = result.timeline(tmp_path / "run.json")
    assert path.read_text().startswith("{")
    found = compare(TRACE, PLATFORM, ["keep_all", "full_recompute"], budget="1 GB")
    words = {text.get_text() for axes in found.plot().axes for text in axes.texts}
    assert any("keep_all" in text for text in words)


@dataclass(frozen=True, kw_only=True)
class Evaluates(Policy):
    """Replays three plans, one with an action without an effect, and returns one of them, with notes or without."""

    chosen: int = 0
    notes: str = ""

    def plan(self, problem):
        drops = [(), (Drop(problem.trace.writes(0)[0], after=1),), (Wait(problem.trace.writes(0)[0], after=0),)]
        plans = [Plan(problem.trace, actions) for actions in drops]
        for plan in plans:
            try:
                problem.evaluate(plan)
            except IllegalPlan:
                continue
        return replace(plans[self.chosen], notes={"says": self.notes}) if self.notes else plans[self.chosen]


@pytest.mark.parametrize(("chosen", "replays"), [(0, 3), (2, 3)])
@pytest.mark.parametrize("notes", ["", "something"])
def test_a_plan_that_its_policy_has_replayed_is_not_replayed_again(notes, chosen, replays, monkeypatch):
    runs = []

    def counted(*arguments, **options):
        runs.append(arguments[1])
        return run_iteration(*arguments, **options)

    monkeypatch.setattr("sim.experiment.run_iteration", counted)
    result = simulate(TRACE, PLATFORM, Evaluates(chosen=chosen, notes=notes))
    assert len(runs) == replays
    assert result.plan.notes == ({"says": notes} if notes else {})
    assert result.log == run_iteration(TRACE, result.plan, PLATFORM).log
    runs.clear()
    again = simulate(TRACE, PLATFORM, Evaluates(chosen=chosen, notes=notes), iterations=2)
    assert len(runs) == 2 * replays  # at the end of the first nothing would have to move back
    assert again.log == result.log
    assert [run.plan.notes for run in again.warm_up] == [result.plan.notes]


@pytest.mark.parametrize(
    "changes",
    [
        {"actions": (Wait("x", after=0),)},
        {"place": {"x": "host"}},
        {"keep_dead": True},
        {"unpressed": Unpressed()},
        {"online": Online},
        {"trace": synthetic.uniform_chain(4)},
    ],
)
def test_a_plan_with_more_than_other_notes_is_another(changes):
    plan = Plan(TRACE, notes={"a": 1})
    assert plan.differs_in_notes(replace(plan, notes={}))
    assert not plan.differs_in_notes(replace(plan, **changes))


@pytest.mark.parametrize("layout", [None, {"pp": 2, "micro_batches": 2}, {"dp": 2, "zero": 1}], ids=str)
@pytest.mark.parametrize("policy", ["keep_all", "full_recompute"])
def test_what_unlimited_memory_allows_is_not_replayed_where_memory_was_never_short(layout, policy, monkeypatch):
    """The figures are those against a reference run of its own, which only a policy that decides something needs."""
    trace = transformer("gpt2", batch=2, sequence=64, attention="flash", precision="bf16")
    result = simulate(trace, "a100_80_sxm", policy, parallel=layout)
    replays = []
    run = experiment.reference_run
    monkeypatch.setattr(experiment, "reference_run", lambda *given: replays.append(1) or run(*given))
    figures = result.summary()
    assert bool(replays) == (policy != "keep_all")
    monkeypatch.setattr(experiment, "_as_unlimited", lambda history: None)
    replays.clear()
    assert simulate(trace, "a100_80_sxm", policy, parallel=layout).summary() == figures
    assert replays


def test_a_run_that_waited_for_space_is_no_reference():
    log = simulate(TRACE, PLATFORM).log
    waited = log.intervals.copy()
    waited[-1, 4], waited[-1, 7] = WHY["stall"], STALLS.index("space")
    run = Run(log.trace, Plan(log.trace), log)
    assert experiment._as_unlimited([run]) is log
    assert experiment._as_unlimited([replace(run, log=replace(log, intervals=waited))]) is None
    assert experiment._as_unlimited([replace(run, log=replace(log, complete=False))]) is None
    assert experiment._as_unlimited([run, run]) is None


@pytest.mark.parametrize("policy", ["swap_all", "zero_offload", "full_recompute", "vdnn"])
def test_a_run_in_which_memory_cannot_have_been_short_is_that_in_unlimited_memory(policy):
    trace, machine = transformer("gpt2", batch=2, sequence=64, precision="bf16"), load_profile("a100_80_sxm")
    result = simulate(trace, machine, policy)
    run = experiment.as_in_ample_memory(Run(trace, result.plan, result.log))
    ample = experiment.unlimited(machine)
    assert run is not None
    assert run.log == result.log == replay(result.plan, ample)
    assert run.log.platform.tiers == ample.tiers
    peak = result.summary()["peak_bytes"]
    tight = replay(result.plan, machine.with_budget(peak))
    assert experiment.as_in_ample_memory(Run(trace, result.plan, tight)) is None
    assert experiment.as_in_ample_memory(Run(trace, result.plan, replace(result.log, complete=False))) is None
    for other in (replace(result.plan, keep_dead=True), replace(result.plan, online=object)):
        assert experiment.as_in_ample_memory(Run(trace, other, result.log)) is None


def test_the_plan_that_ran_is_not_replayed_to_be_compared_with(monkeypatch):
    trace = transformer("gpt2", batch=2, sequence=64, precision="bf16")
    result = simulate(trace, "a100_80_sxm", "zero_offload")
    replayed = []
    run = experiment.run_iteration
    monkeypatch.setattr(experiment, "run_iteration", lambda *given, **more: replayed.append(1) or run(*given, **more))
    figures = result.summary()
    assert len(replayed) == 1  # of keeping everything
    monkeypatch.setattr(experiment, "as_in_ample_memory", lambda run: None)
    assert simulate(trace, "a100_80_sxm", "zero_offload").summary() == figures
    assert len(replayed) == 4


@pytest.mark.parametrize("notes", [None, [1, 2], "text"])
def test_notes_that_are_no_mapping_prove_and_own_nothing(notes):
    result = simulate(TRACE, PLATFORM, Noteless(notes=notes))
    assert (result.bounds, result.idle_parts, result.summary()["fits"]) == ((), (), True)
