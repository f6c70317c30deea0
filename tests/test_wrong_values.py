"""Values of the right kind that mean nothing: each is refused in one line, from Python as on the command line."""

import numpy as np
import pytest

from sim import compare, load_profile, simulate, smallest_budget
from sim.errors import TiersimError, TraceError
from sim.trace import TraceBuilder
from workloads import transformer

TRACE = transformer("gpt2", batch=1, sequence=8)
PLATFORM = load_profile("a100_40_pcie")


@pytest.mark.parametrize("iterations", [None, 3])
def test_an_empty_list_of_traces_is_named(iterations):
    with pytest.raises(TraceError, match="expected a trace, or one per iteration, not an empty list"):
        simulate([], PLATFORM, iterations=iterations)


@pytest.mark.parametrize("seed", ["x", -1, 1.5, True, None])
@pytest.mark.parametrize("function", [simulate, compare, smallest_budget])
def test_a_seed_is_a_whole_number_of_at_least_0(function, seed):
    with pytest.raises(TiersimError, match=r"seed: value .*: expected a whole number of at least 0"):
        function(TRACE, PLATFORM, "keep_all", seed=seed)
    assert function(TRACE, PLATFORM, "keep_all", seed=np.int64(3)) is not None


@pytest.mark.parametrize("limit", [float("nan"), -1, "2", True])
@pytest.mark.parametrize("function", [simulate, compare, smallest_budget])
def test_a_limit_on_recomputation_is_a_number_of_at_least_0(function, limit):
    with pytest.raises(TiersimError, match=r"recompute_limit: value .*: expected a number of at least 0, or None"):
        function(TRACE, PLATFORM, "keep_all", recompute_limit=limit)
    for good in (None, 0, 2.5, float("inf")):
        assert function(TRACE, PLATFORM, "keep_all", recompute_limit=good) is not None


@pytest.mark.parametrize("tolerance", [-1, float("nan"), 1])
def test_a_tolerance_is_a_part(tolerance):
    with pytest.raises(TiersimError, match=r"tolerance: value .*: expected a number of at least 0 and below 1"):
        smallest_budget(TRACE, PLATFORM, tolerance=tolerance)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("duration", 1.5, "duration: value 1.5: expected a whole number; nearest: 2"),
        ("flops", float("nan"), "FLOPs: value nan: expected a whole number"),
        ("flops", float("inf"), "FLOPs: value inf: expected a whole number"),
        ("bytes", 7.25, "bytes: value 7.25: expected a whole number; nearest: 7"),
        ("workspace", "much", "workspace: value 'much': expected a whole number"),
    ],
)
def test_what_an_op_takes_is_whole(field, value, said):
    with pytest.raises(TraceError, match=f"op 'a': {said}"):
        TraceBuilder().op("a", **{field: value})


def test_a_tensor_has_whole_bytes():
    builder = TraceBuilder()
    with pytest.raises(TraceError, match=r"tensor 'a': bytes: value 1.5: expected a whole number; nearest: 2"):
        builder.tensor("a", 1.5)
    ids = [builder.tensor(name, size) for name, size in (("b", 2.0), ("c", np.int32(3)), ("d", np.float64(4)))]
    assert [builder.bytes_of(each) for each in ids] == [2, 3, 4]
