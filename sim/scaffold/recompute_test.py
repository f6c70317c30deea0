"""What this policy claims; the law for all policies is in `tiersim check`."""

from __future__ import annotations

from sim import Trace, TraceBuilder, load_profile, simulate
from workloads import transformer

POLICY = "scaffold_recompute"
PLATFORM = load_profile("a100_40_pcie")


def test_it_saves_memory_for_time() -> None:
    trace = transformer("gpt2", batch=4, sequence=512, precision="amp_bf16")
    kept = simulate(trace, PLATFORM, "keep_all").summary()
    mine = simulate(trace, PLATFORM, POLICY).summary()
    assert mine["peak_bytes"] < kept["peak_bytes"]
    assert mine["makespan_ns"] - mine["recompute_ns"] == kept["makespan_ns"]


def test_the_largest_is_recomputed_as_far_as_the_share_goes() -> None:
    b = TraceBuilder()
    x = b.tensor("x", 10, "input")
    saved = [b.tensor(f"y{i}", size) for i, size in enumerate((10, 40, 30, 20))]
    for i, y in enumerate(saved):
        b.op(f"f{i}", reads=[x], writes=[y], duration=5)
    gradient = b.tensor("g", 10, "gradient")
    b.op("back", reads=saved, writes=[gradient], phase="backward", duration=10)
    trace = b.build(outputs=[gradient], carry=())
    recomputed = {share: recomputed_ops(trace, share) for share in (0.0, 0.3, 0.6, 0.7)}
    assert recomputed == {0.0: [], 0.3: ["f2"], 0.6: ["f1", "f3"], 0.7: ["f1", "f2"]}


def recomputed_ops(trace: Trace, share: float) -> list[str]:
    """Names of the ops that ran twice."""
    events = simulate(trace, PLATFORM, POLICY, share=share).events
    return sorted(events.query("why == 'recompute'")["op"])
