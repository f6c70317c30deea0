"""What this policy claims; the law for all policies is in `tiersim check`."""

from __future__ import annotations

from sim import Trace, TraceBuilder, load_profile, simulate
from workloads import transformer

POLICY = "scaffold_offload"
PLATFORM = load_profile("a100_40_pcie")


def test_it_saves_memory_and_prefetches() -> None:
    trace = transformer("gpt2", batch=4, sequence=512, precision="amp_bf16")
    kept = simulate(trace, PLATFORM, "keep_all").summary()
    mine = simulate(trace, PLATFORM, POLICY).summary()
    late = simulate(trace, PLATFORM, POLICY, ahead=0).summary()
    assert mine["peak_bytes"] < kept["peak_bytes"]
    assert mine["stall_ns"]["transfer"] < late["stall_ns"]["transfer"]


def test_the_largest_moves_as_far_as_the_share_goes() -> None:
    b = TraceBuilder()
    x = b.tensor("x", 10, "input")
    saved = [b.tensor(f"y{i}", size) for i, size in enumerate((10, 40, 30, 20))]
    for i, y in enumerate(saved):
        b.op(f"f{i}", reads=[x], writes=[y], duration=10**6)
    between = b.tensor("between", 10, "temporary")
    b.op("loss", "loss", reads=[x], writes=[between], duration=10**6)
    gradient = b.tensor("g", 10, "gradient")
    b.op("back", reads=[*saved, between], writes=[gradient], phase="backward", duration=10**6)
    trace = b.build(outputs=[gradient], carry=())
    moved = {share: tensors_moved(trace, share) for share in (0.0, 0.3, 0.6, 0.7)}
    assert moved == {0.0: [], 0.3: ["y2"], 0.6: ["y1", "y3"], 0.7: ["y1", "y2"]}


def tensors_moved(trace: Trace, share: float) -> list[str]:
    """Names of the tensors that left the device."""
    events = simulate(trace, PLATFORM, POLICY, share=share).events
    return sorted(set(events.query("why == 'move'")["tensor"]))
