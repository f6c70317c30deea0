"""What this policy claims; the law for all policies is in `tiersim check`."""

from __future__ import annotations

from sim import TraceBuilder, load_profile, simulate
from workloads import transformer

POLICY = "scaffold_online_recompute"
PLATFORM = load_profile("a100_40_pcie")


def test_it_runs_in_less_and_recomputes_nothing_where_all_fits() -> None:
    trace = transformer("gpt2", batch=4, sequence=512, precision="amp_bf16")
    kept = simulate(trace, PLATFORM, "keep_all").summary()
    mine = simulate(trace, PLATFORM, POLICY).summary()
    assert (mine["peak_bytes"], mine["makespan_ns"]) == (kept["peak_bytes"], kept["makespan_ns"])
    budget = kept["peak_bytes"] * 3 // 4
    tight = simulate(trace, PLATFORM, POLICY, budget=budget).summary()
    assert tight["peak_bytes"] <= budget
    assert tight["makespan_ns"] - tight["recompute_ns"] == kept["makespan_ns"]


def test_what_was_used_longest_ago_is_recomputed() -> None:
    b = TraceBuilder()
    y0, y1, y2 = (b.tensor(name, 100) for name in ("y0", "y1", "y2"))
    again, end = b.tensor("again", 1), b.tensor("end", 1)
    b.op("f0", writes=[y0], duration=1000)
    b.op("f1", writes=[y1], duration=1000)
    b.op("reads y0", reads=[y0], writes=[again], duration=1000)
    b.op("f2", writes=[y2], duration=1000)  # of 250 bytes y0, y1 and `again` take 201
    b.op("back", reads=[y0, y2], writes=[end], phase="backward", duration=1000)
    b.op("last", reads=[y1, again, end], writes=[], phase="backward", duration=1000)
    events = simulate(b.build(outputs=(), carry=()), PLATFORM, POLICY, budget=250).events
    assert events.query("why == 'recompute'")["op"].tolist() == ["f1"]
