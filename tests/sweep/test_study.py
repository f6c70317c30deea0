"""Studies: lists, crossed; every mistake at once; an identity that changes with all that the answer depends on."""

import ast
import importlib.resources
import itertools
import re
from pathlib import Path

import pytest

from sim.sweeps import StudyError, identity, load_study, run_sweep
from sim.sweeps.identity import source_hash
from sim.units import parse_rate


def labels(study, *names):
    return [tuple(cell.labels[name] for name in names) for cell in load_study(study).cells()]


NESTED = """
from sim import a

if TYPE_CHECKING:
    from sim import for_types
else:
    from sim import other_than_types

class Class:
    from sim import b

    async def method(self, value=lambda: 1):
        async with value:
            import sim.c, os
        try:
            from sim import d
        except* OSError:
            from sim import e
        else:
            from sim import f
        finally:
            from sim import g
        match value:
            case [_] if value:
                from sim import h
        for _ in value:
            if value:
                pass
            elif not value:
                from sim import i
        else:
            while value:
                from sim import j
            else:
                from sim import k
        return [lambda: value for _ in value]
"""


def test_an_import_counts_wherever_it_stands(tmp_path):
    path = tmp_path / "nested.py"
    path.write_text(NESTED)
    names = {"sim", "sim.c", *(f"sim.{name}" for name in "abdefghijk")}
    assert set(identity._imports(path)) == names  # what an `if TYPE_CHECKING` has beside the types is left out, too


def not_for_types(tree):
    """All nodes of a syntax tree, but for those under `if TYPE_CHECKING`."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            nodes += ast.iter_child_nodes(node)


def test_each_module_imports_what_a_walk_over_its_whole_syntax_tree_finds():
    for path in sorted(Path(identity.__file__).parents[1].rglob("*.py")):
        found = set()
        for node in not_for_types(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        assert set(identity._imports(path)) == {name for name in found if name.split(".")[0] in ("sim", "workloads")}


def test_the_smallest_study_is_plain_lists(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        'model = ["gpt2"]\nbatch = [1, 2]\nsequence = [512]\n'
        'profile = ["mt3000_survey"]\npolicy = ["keep_all", "dtr"]\n'
    )
    assert labels(path, "batch", "policy") == [(1, "keep_all"), (1, "dtr"), (2, "keep_all"), (2, "dtr")]


def test_all_axes_are_crossed(study):
    axes = {
        "batch": [1, 2],
        "sequence": [8, 16],
        "precision": ["fp32", "amp_bf16"],
        "profile": ["mt3000_survey", "a100_80_sxm"],
        "budget": ["all", "50%", "7 GB"],
        "seed": [0, 1],
    }
    policy = ["keep_all", {"name": "dtr", "heuristic": ["lru", "size"], "ties": "first"}]
    names = ["keep_all", "dtr(heuristic=lru, ties=first)", "dtr(heuristic=size, ties=first)"]
    found = labels(study(**axes, policy=policy), *axes, "policy")
    assert sorted(found) == sorted(itertools.product(*axes.values(), names))


def test_any_figure_of_a_profile_is_an_axis_by_its_path(study):
    path = "tiers.zone.bandwidth"
    rates = ["20 GB/s", "40 GB/s"]
    swept = run_sweep(study(figures={path: rates}, policy="keep_all", budget="all", batch=1))
    table = swept.to_frame()
    assert list(table[path]) == rates
    slow, fast = table["compute_ns"]
    assert slow > fast  # half the bandwidth
    assert parse_rate(rates[0]) * 2 == parse_rate(rates[1])


def test_filters_take_cells_out(study):
    skip = [{"policy": "dtr", "batch": [4, 8]}, {"tokens": ">= 128"}]
    policy = ["keep_all", {"name": "dtr", "heuristic": ["lru", "size"]}]
    found = labels(study(batch=[2, 4, 8], policy=policy, budget="all", skip=skip), "batch", "policy")
    assert found == [
        (2, "keep_all"),
        (2, "dtr(heuristic=lru)"),
        (2, "dtr(heuristic=size)"),
        (4, "keep_all"),
    ]
    only = {"policy.heuristic": "lru"}
    assert labels(study(batch=1, policy=policy, budget="all", only=only), "policy") == [("dtr(heuristic=lru)",)]


def test_filters_that_leave_nothing_are_an_error(study):
    with pytest.raises(StudyError, match="no cell is left"):
        load_study(study(skip={"batch": [1, 2]})).cells()


@pytest.mark.parametrize("key", ["skip", "only", "timeline"])
@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ({"batch": "> x"}, "value '> x': expected a number after the sign, as in '> 4'"),
        ({"batch": [1, ">=x"]}, "value '>=x': expected a number after the sign, as in '>= 4'"),
        ({"policy": "!= keep_all"}, "value '!= keep_all': expected a number after the sign, as in '!= 4'"),
        ({"batch": "=> 4"}, "value '=> 4': expected a number after the sign"),
        ({"batch": "two"}, "value 'two': expected a number, or a comparison such as '>= 4'"),
        ({"sequence": [64, "long"]}, "value 'long': expected a number, or a comparison such as '>= 4'"),
        ({"tokens": "many"}, "value 'many': expected a number, or a comparison such as '>= 4'"),
        ({"seed": "one"}, "value 'one': expected a number, or a comparison such as '>= 4'"),
        ({"policy": "> 4"}, "value '> 4': numbers are compared, and this is none; expected one of its values"),
        ({"precision": "> 4"}, "value '> 4': numbers are compared, and this is none; expected one of its values"),
    ],
    ids=str,
)
def test_a_filter_that_can_match_nothing_is_refused(study, key, condition, said):
    with pytest.raises(StudyError, match=re.escape(said)):
        load_study(study(**{key: [condition]}))


def test_a_budget_may_be_a_part_of_the_unconstrained_peak(study):
    table = run_sweep(study(budget=["all", "62.5%"], policy="keep_all", batch=2)).to_frame()
    peak = table["peak_bytes"][0]
    assert list(table["unconstrained_peak_bytes"]) == [peak, peak]
    assert table["budget_bytes"][1] == peak * 625 // 1000
    assert list(table["status"]) == ["ok", "infeasible"]


def test_one_thing_spelt_twice_is_one_cell(study):
    assert labels(study(budget=["7 GB", "7000 MB", "50%", "50.0 %"], batch=1, policy="keep_all"), "budget") == [
        ("7 GB",),
        ("50%",),
    ]


BAD = """
modle = ["gpt2"]
batch = [0, "x"]
sequence = []
precision = "fp23"
attention = "flsh"
profile = ["mt3000_survy", "a100_80_sxm"]
policy = ["keep_al", {name = "dtr", heuristik = "lru"}, {name = "dtr", heuristic = ["lrv", "lru"]}, 3]
budget = [7, "7", "7 GBB", "0%"]
timeline = 3
seed = -1
skip = {batc = 1}
[figures]
"tiers.hbm.bandwith" = "3 GB/s"
"""

MESSAGES = [
    "batch[0]: value 0: expected a whole number of at least 1",
    "batch[1]: value 'x': expected a whole number of at least 1",
    "sequence: value []: expected at least one entry",
    "precision: value 'fp23': expected one of fp32, tf32, bf16, fp16, amp_bf16, amp_fp16, mixed_bf16, mixed_fp16, "
    "megatron_bf16, mixed_fp8, megatron_fp8, fp8, int8 (did you mean 'fp32'?)",
    "attention: value 'flsh': expected one of eager, sdpa, flash, flash_repeat (did you mean 'flash'?)",
    "profile[0]: value 'mt3000_survy': expected a hardware profile: no hardware profile is called 'mt3000_survy' "
    "(did you mean 'mt3000_survey'?)",
    "policy[0]: value 'keep_al': no policy is called 'keep_al' (did you mean 'keep_all'?)",
    "policy[1]: value 'dtr(heuristik=lru)': policy 'dtr' has no parameter 'heuristik' (did you mean 'heuristic'?)",
    "policy[2]: value 'dtr(heuristic=lrv)': policy 'dtr': heuristic is 'lrv'; expected 'dtr', 'dtr_eq', 'local', "
    "'none', 'lru', 'size', 'msps' or 'random' (did you mean 'lru'?)",
    "policy[3]: value 3: expected the name of a policy, or a table with its name and parameters",
    "budget[0]: value 7: expected a size such as '7 GB', a part of the unconstrained peak such as '50%', or 'all'",
    "budget[1]: value '7': expected a size such as '7 GB', a part of the unconstrained peak such as '50%', or 'all'",
    "budget[2]: value '7 GBB': expected a size such as '7 GB', a part of the unconstrained peak such as '50%', "
    "or 'all' (did you mean 'GB'?)",
    "budget[3]: value '0%': expected more than 0%",
    "timeline: value 3: expected true, false, or tables that say which cells",
    "seed: value -1: expected a whole number of at least 0",
    "modle: there is no such key (did you mean 'model'?)",
    "figures: value '3 GB/s': a100_80_sxm.toml: tiers.hbm.bandwith: there is no key 'bandwith' "
    "(did you mean 'bandwidth'?)",
    "skip[0].batc: there is no such axis (did you mean 'batch'?)",
]


def test_all_mistakes_of_a_study_come_at_once_one_line_each(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(BAD)
    with pytest.raises(StudyError) as caught:
        load_study(path)
    assert sorted(caught.value.problems) == sorted(f"{path}: {line}" for line in MESSAGES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = [", "not TOML"),
        ('profile = "h100"\npolicy = "dtr"', "model: give either model or trace"),
        ('model = "gpt2"\npolicy = "dtr"', "profile: this key is missing"),
        ('model = "gpt2"\nmodel = "x"', "not TOML"),
        ('trace = "gone.jsonl"\nprofile = "h100"\npolicy = "dtr"', "trace: value 'gone.jsonl': no such file"),
        ('trace = "a"\nbatch = 2\nprofile = "h100"\npolicy = "dtr"', "batch: goes with model, not with trace"),
        ('model = "gtp2"\nprofile = "h100"\npolicy = "dtr"', "did you mean 'gpt2'?"),
        ('model = "gpt2"\nprofile = "h100"\npolicy = 3', "policy: value 3: expected the name"),
        ('model = "gpt2"\nprofile = "h100"\npolicy = []', "policy: value []: expected at least one entry"),
        ('model = "gpt2"\nprofile = "h100"\npolicy = "dtr"\nskip = 3', "skip: value 3: expected a table"),
        ('model = "gpt2"\nprofile = "h100"\npolicy = "dtr"\nskip = {batch = {}}', "skip.batch: value {}: expected"),
        ('model = "gpt2"\nprofile = "h100"\npolicy = "dtr"\nfigures = 3', "figures: value 3: expected a table"),
        ('model = "gpt2"\nprofile = "h100"\npolicy = {heuristic = "lru"}', "expected the name of a policy"),
    ],
)
def test_each_mistake_names_its_key(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(StudyError) as caught:
        load_study(path)
    assert any(message in line for line in caught.value.problems), caught.value.problems
    assert all(line.startswith(f"{path}: ") and "\n" not in line for line in caught.value.problems)


def test_a_study_that_is_not_there_says_so(tmp_path):
    with pytest.raises(StudyError, match="No such file"):
        load_study(tmp_path / "none.toml")


# ---- identity ------------------------------------------------------------------------------------


def ids(study):
    return [cell.id for cell in load_study(study).cells()]


def test_the_same_study_has_the_same_identities(study):
    assert ids(study()) == ids(study())
    assert len(set(ids(study()))) == 8


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"iterations": 3},
        {"sequence": [8]},
        {"attention": "eager"},
        {"dropout": 0.5},
        {"figures": {"tiers.zone.bandwidth": "20 GB/s"}},
        {"profile": "a100_80_sxm"},
        {"budget": ["91%", "92%"]},
        {"policy": [{"name": "dtr", "heuristic": "lru"}, {"name": "dtr", "heuristic": "size"}]},
        {"timeline": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_answer_changes_the_identity(study, change):
    assert not set(ids(study())) & set(ids(study(**change)))


def test_a_default_that_is_spelt_out_is_the_same_cell(study):
    spelt = {"name": "dtr", "heuristic": "dtr_eq"}
    assert ids(study(policy="dtr")) == ids(study(policy=spelt))


def test_a_limit_on_recomputation_is_an_axis_and_counts_only_where_it_can_change_a_result(study):
    def of(policy, **keys):
        return ids(study(policy=policy, budget="90%", batch=1, **keys))

    assert of("dtr", recompute_limit=100) == of("dtr")  # the default
    assert len({*of("dtr", recompute_limit=[0.01, 5, 0, 100])}) == 4
    assert of("swap_all", recompute_limit=[0.01, 5, 0, 100]) == of("swap_all")  # it recomputes nothing
    swept = run_sweep(study(policy="full_recompute", budget="all", batch=1, recompute_limit=[0.0001, 50, 0])).to_frame()
    assert list(swept["recompute_limit"]) == [0.0001, 50, 0]
    assert list(swept["status"]) == ["infeasible", "ok", "ok"]
    assert swept["refusal"][0] == "thrashing"
    assert swept["makespan_ns"][1] == swept["makespan_ns"][2]
    kept = labels(study(policy="dtr", recompute_limit=[1, 2], only={"recompute_limit": "> 1"}), "recompute_limit")
    assert set(kept) == {(2,)}


@pytest.mark.parametrize("value", [-1, "ten", True, float("nan"), float("inf")])
def test_a_limit_that_is_no_multiple_is_refused(study, value):
    with pytest.raises(StudyError, match=r"recompute_limit: value .*expected a multiple"):
        load_study(study(recompute_limit=value))


def test_an_edited_profile_model_or_policy_is_another_cell(study, tiny, tmp_path, own):
    profile = tmp_path / "mine.toml"
    text = importlib.resources.files("hardware_profiles").joinpath("mt3000_survey.toml").read_text()
    profile.write_text(text)
    base = study(profile=str(profile), policy=[own("Faulty")], budget="all", batch=1)
    seen = ids(base)
    profile.write_text(text + "\n# a comment changes nothing\n")
    assert ids(base) == seen
    figures = [line for line in text.splitlines() if line.startswith("capacity")]
    profile.write_text(text.replace(figures[0], figures[0].replace('"8 GB"', '"9 GB"')))
    assert profile.read_text() != text
    assert not set(ids(base)) & set(seen)
    profile.write_text(text)
    assert ids(base) == seen
    Path(tiny).write_text(Path(tiny).read_text().replace('"n_layer": 2', '"n_layer": 3'))
    assert not set(ids(base)) & set(seen)


def test_a_source_is_hashed_with_all_that_it_imports(tmp_path, monkeypatch):
    from sim.sweeps import identity

    for name, text in {
        "__init__": "",
        "a": "from typing import TYPE_CHECKING\nfrom sim.b import x\nif TYPE_CHECKING:\n    import sim.types\n",
        "b": "def f():\n    from sim import c\n",
        "c": "",
        "d": "",
        "types": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(identity, "_root", lambda package: tmp_path)
    caches = (identity.source_hash, identity._file_of, identity._imports)

    def hashed():
        for each in caches:
            each.cache_clear()
        return source_hash(("sim.a",))

    try:
        first = hashed()
        for name, counts in (("a", True), ("b", True), ("c", True), ("d", False), ("types", False)):
            path = tmp_path / f"{name}.py"
            text = path.read_text()
            path.write_text(text + "# edited\n")
            assert (hashed() != first) == counts, name
            path.write_text(text)
            assert hashed() == first
    finally:
        for each in caches:
            each.cache_clear()


def test_what_shows_figures_is_no_part_of_the_engine():
    from sim.sweeps.identity import ENGINE, files_of

    names = set(files_of(ENGINE))
    assert {"sim.engine.event_path.device", "sim.hardware.cost", "sim.analysis.summary", "sim.sweeps.cell"} <= names
    assert not [name for name in names if name.startswith(("sim.report", "sim.pages", "sim.sweeps.store", "sim.cli"))]


def test_the_studies_of_the_how_to_are_studies(tmp_path):
    import re

    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    counts = []
    for block in blocks:
        (tmp_path / "study.toml").write_text(block)
        counts.append(len(load_study(tmp_path / "study.toml").cells()))
    # 2 models, 3 rates, 4 policies, 3 budgets; 8 jobs, less (8, 1024) of both and 3 more of bert-base
    # and 1 + 4 + 1 + 1 layouts of 2 policies
    assert counts == [4, (7 + 4) * 3 * 4 * 3, 7 * 2]
