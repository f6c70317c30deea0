"""What a captured or imported trace does not know stands in its listing and in the footer of every result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim import load_profile, simulate
from sim.errors import PolicyError
from sim.report.footer import Footer, footer_lines
from sim.report.listings import trace_page
from sim.trace.builder import TraceBuilder
from sim.trace.provenance import lacks, workload_notes
from tests.test_cli import tiersim
from workloads import load_trace, transformer

DATA = Path(__file__).parent.parent / "workloads" / "data"


def built(meta, *, backward=True, layer=-1, flops=0, duration=5, weight=False, shape=None):
    builder = TraceBuilder(meta)
    given = builder.tensor("x", 8, "weight" if weight else "input", shape=shape)
    out = builder.tensor("y", 8, "activation")
    builder.op("f", "matmul" if flops else "elementwise", reads=[given], writes=[out], layer=layer, flops=flops,
               duration=duration)  # fmt: skip
    if backward:
        builder.op("b", "elementwise", reads=[out], phase="backward", duration=duration)
    return builder.build()


IMPORTED = {"source": "import of x.json"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"backward": False}, "backward pass"),
        ({"layer": 0}, "layers"),
        ({"flops": 7}, "FLOPs"),
        ({"weight": True}, "weights"),
        ({"shape": (2,)}, "shapes"),
    ],
)
def test_each_lack_is_told_where_it_is_one(changes, word):
    found = {lack.what for lack in lacks(built(IMPORTED, **changes))}
    plain = {lack.what for lack in lacks(built(IMPORTED))}
    assert found ^ plain == {word}


def test_what_an_op_costs_without_flops_depends_on_its_measured_time():
    timed, untimed = (
        next(lack.effect for lack in lacks(built(IMPORTED, duration=ns)) if lack.what == "FLOPs") for ns in (5, None)
    )
    assert "measured time" in timed
    assert "time of its bytes" in untimed


def test_a_trace_from_a_configuration_lacks_nothing():
    trace = transformer("gpt2", batch=1, sequence=16)
    assert lacks(trace) == ()
    assert workload_notes(trace) == ()


def test_a_chrome_profile_names_the_policies_that_lack_something():
    trace = load_trace(DATA / "smallcnn.chrome.json.gz")
    record = json.loads(trace_page(trace, as_json=True))
    by_what = {each["what"]: each["policies"] for each in record["lacks"]}
    assert {"layers", "weights"} <= set(by_what)
    assert {"full_recompute", "zero_offload"} <= {*by_what["layers"], *by_what["optimizer state"]}
    for what, policies in by_what.items():
        assert f"no {what}" in trace_page(trace)
        assert all(name in trace_page(trace) for name in policies)


def test_policies_named_for_want_of_layers_refuse_the_trace_or_do_nothing():
    trace = built(IMPORTED)
    record = json.loads(trace_page(trace, as_json=True))
    (policies,) = [each["policies"] for each in record["lacks"] if each["what"] == "layers"]
    assert "full_recompute" in policies
    for name in policies:
        try:
            summary = simulate(trace, load_profile("a100_40_pcie"), name).summary()
        except PolicyError:
            continue
        assert not any(summary["moved_bytes"].values())


def test_assumptions_stand_in_the_footer_of_every_result():
    meta = {**IMPORTED, "assumed": {"a number is 1": 3, "no padding": 1}, "uncounted": {"aten.odd": 2}}
    trace = built(meta)
    lines = footer_lines(Footer(load_profile("a100_40_pcie"), trace=trace))
    assert "assumed of the workload: a number is 1 (3); no padding" in lines
    assert "ops whose FLOPs are unknown, timed by their bytes: aten.odd (2)" in lines
    assert any(line.startswith("the workload has no layers: ") for line in lines)


def test_many_assumptions_are_counted_not_printed():
    meta = {**IMPORTED, "assumed": {f"thing {i}": 1 for i in range(20)}}
    (line,) = [line for line in workload_notes(built(meta)) if line.startswith("assumed")]
    assert "thing 7 and 12 more" in line


def test_run_and_compare_print_them(capsys, tmp_path):
    path = str(DATA / "smallcnn.chrome.json.gz")
    for words in (("run", "--policy", "keep_all"), ("compare", "--policies", "keep_all")):
        out = tiersim(*words, "--profile", "a100_40_pcie", "--trace", path, capsys=capsys)[1]
        assert "assumed of the workload: " in out
        assert "the workload has no " in out
