"""In which type FLOPs are priced: the stand-in of the type of most FLOPs that no measured time replaces."""

import pytest

from sim.analysis.priced_as import Pricing, priced_as
from sim.trace.builder import TraceBuilder

from .conftest import log_of, machine


@pytest.mark.parametrize(
    ("ops", "said"),
    [
        ([("fp32", 10, None)], ("fp32", "fp32")),
        ([("tf32", 10, None), ("fp32", 9, None)], ("tf32", "fp32")),
        ([("tf32", 10, None), ("fp32", 11, None)], ("fp32", "fp32")),
        ([("tf32", 10, 5), ("fp32", 9, None)], ("fp32", "fp32")),  # measured: no peak prices it
        ([], ("", "")),
    ],
)
def test_most_flops_decide(ops, said):
    b = TraceBuilder()
    for i, (dtype, flops, duration) in enumerate(ops):
        b.op(f"f{i}", kind="matmul", writes=[b.tensor(f"y{i}", 1)], flops=flops, dtype=dtype, duration=duration)
    assert priced_as(log_of(b.build(outputs=(), carry=()), machine(), [])) == Pricing(*said)
