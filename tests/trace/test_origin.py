"""Origins: they travel whole, and what they refer to is hashed when somebody asks."""

from __future__ import annotations

import pickle

import pytest

from sim.plan import Drop, Move, Recompute, Wait
from sim.trace.origin import (
    Along,
    Encoded,
    Fused,
    Glue,
    Lossy,
    Microbatch,
    Origin,
    Packed,
    Part,
    Rowwise,
    Same,
    Slots,
)
from workloads.synthetic import random_dag

VALUES = [
    Same(3),
    Same(3, 1, 2),
    Part(Same(3), 1, 2, 4),
    Microbatch(Same(3), 0, 1, 2),
    Along(Part(Same(3), 0, 1, 2), "heads", 1, 2, 4),
    Rowwise(Same(1)),
    Packed((Same(1), None, Same(2, 1))),
    Encoded(Same(1), "csr", True),
    Lossy(Same(1), "fp8"),
    Fused((Same(1), Same(2))),
    Slots(Same(1), (0, 2), 3),
    Glue(),
    Drop(1, after=2),
    Move(1, "host", True, 3, 4, after=5, codec=6, delay=7),
    Recompute("op", before=2),
    Wait(1, before="op"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_the_same_in_another_process(value):
    copy = pickle.loads(pickle.dumps(value))
    assert copy == value
    assert type(copy) is type(value)
    assert hash(copy) == hash(value)


def test_the_hash_of_a_trace_that_stands_for_itself_is_computed_when_it_is_asked_for():
    trace, other = random_dag(12, 1), random_dag(12, 2)
    origin = Origin.identity(trace)
    assert "content_hash" not in vars(trace)
    own = Origin(trace.hashed_anew(), origin.tensors, origin.ops)
    assert pickle.loads(pickle.dumps(Origin.identity(trace))) == own
    assert origin == own
    assert origin.base == trace.content_hash
    assert origin != Origin.identity(other)
    assert not hasattr(origin, "else")
