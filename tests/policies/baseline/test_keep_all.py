"""Keeping everything is the default: each tensor until its last read, nothing twice, nothing moved."""

from __future__ import annotations

from sim import TraceBuilder, load_profile, simulate


def test_each_tensor_stays_from_its_producer_to_its_last_reader() -> None:
    b = TraceBuilder()
    x, y, z, g = (b.tensor(name, size) for name, size in (("x", 10), ("y", 20), ("z", 40), ("g", 80)))
    b.op("f0", writes=[x], duration=1)  # 10
    b.op("f1", reads=[x], writes=[y], duration=2)  # 30
    b.op("f2", reads=[y], writes=[z], duration=4)  # x is read again: 70
    b.op("b2", reads=[z, y], writes=[g], phase="backward", duration=8)  # 150
    b.op("b1", reads=[x, g], writes=[], phase="backward", duration=16)  # y and z were freed: 90
    result = simulate(b.build(outputs=(), carry=()), load_profile("a100_40_pcie"), "keep_all")
    memory = result.memory.groupby("time_ns")["used_bytes"].last()
    assert memory.to_dict() == {0: 10, 1: 30, 3: 70, 7: 150, 15: 90, 31: 0}
    assert result.events["why"].tolist() == ["run"] * 5
