"""Members of groups meet, or the trace is refused: held against what the engine does with ample memory."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sim.engine.replay import replay
from sim.errors import Deadlock, TraceError
from sim.plan import Plan
from sim.rewrites.pipeline import pipeline
from sim.trace import Trace, TraceBuilder, progress, validity
from sim.trace.progress import blocked
from tests.engine.test_timeline import machine
from workloads import transformer

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 16, "vocab_size": 32}

Step = tuple[int, str, int, int]
"""Device, group ("" for none), and the results that it reads and overwrites, counted back; 0 for none."""


def built(steps: list[Step], members: dict[str, set[int]]) -> Trace:
    """Ops in this order, each with a result of 5 B; a group joins one op of each of two devices."""
    b = TraceBuilder()
    made: list[int] = []
    overwritten: set[int] = set()
    seen: dict[str, set[int]] = {}
    for i, (device, group, back, over) in enumerate(steps):
        name = group if device in members.get(group, ()) and device not in seen.setdefault(group, set()) else ""
        if name:
            seen[name].add(device)
        reads = [made[-back]] if 0 < back <= len(made) and made[-back] not in overwritten else []
        old = made[-over] if 0 < over <= len(made) and made[-over] not in overwritten else None
        made.append(b.tensor(f"t{i}", 5, **({} if old is None else {"replaces": old})))
        if old is not None:
            overwritten.add(old)
        kind = "collective" if name else "elementwise"
        b.op(f"op{i}", kind, reads=reads, writes=[made[-1]], device=device, group=name, duration=7)
    return b.build(outputs=[t for t in made if t not in overwritten], carry=())


STEPS = st.tuples(
    st.integers(0, 1), st.sampled_from(["", "x", "y"]), st.integers(0, 4), st.sampled_from([0, 0, 0, 1, 2])
)


@given(st.lists(STEPS, max_size=9))
@example([(0, "x", 0, 0), (1, "x", 1, 0)])
@example([(0, "x", 0, 0), (0, "", 1, 0), (0, "y", 0, 0), (1, "y", 0, 0), (1, "", 1, 0), (1, "x", 0, 0)])
@example([(1, "x", 0, 0), (1, "", 0, 0), (0, "x", 1, 2)])
@example([(0, "", 0, 0), (0, "x", 1, 0), (0, "", 0, 2), (1, "", 1, 0), (1, "x", 0, 0)])
def test_what_is_refused_is_what_would_stand_still(steps):
    members = {name: {d for d, group, *_ in steps if group == name} for name in ("x", "y")}
    members = {name: devices for name, devices in members.items() if len(devices) == 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validity, "_check_groups", lambda trace: None)
        try:
            trace = built(steps, members)
        except TraceError:  # another fault: one device overwrites what another reads
            return
        circle = blocked(trace)
        try:
            replay(Plan(trace), machine(devices=2))
        except Deadlock:
            assert circle
        else:
            assert not circle
    if circle:
        with pytest.raises(TraceError, match="ops wait for each other") as error:
            built(steps, members)
        for op, tensor, other, _ in circle:
            name = trace.op_columns.name
            assert f"op {name[op]!r} on device {trace.op_columns.device[op]}" in str(error.value)
            assert repr(trace.tensor_columns.name[tensor]) in str(error.value)
            assert repr(name[other]) in str(error.value)


def test_a_member_that_reads_another_member_s_result_is_named():
    with pytest.raises(TraceError) as error:
        built([(0, "x", 0, 0), (1, "x", 1, 0)], {"x": {0, 1}})
    assert str(error.value) == (
        "ops wait for each other: op 'op1' on device 1 reads tensor 't0', which op 'op0' produces in group 'x', "
        "and that waits for op 'op1' on device 1"
    )


def test_two_groups_that_wait_for_each_other_are_named_both():
    steps = [(0, "x", 0, 0), (0, "", 1, 0), (0, "y", 0, 0), (1, "y", 0, 0), (1, "", 1, 0), (1, "x", 0, 0)]
    with pytest.raises(TraceError, match=r"group 'x'.*'op5' on device 1; op 'op4'.*group 'y'.*'op2' on device 0"):
        built(steps, {"x": {0, 1}, "y": {0, 1}})


def test_a_pipeline_written_in_order_needs_no_search(monkeypatch):
    untied = {**TINY, "tie_word_embeddings": False}
    trace = pipeline(transformer(untied, batch=8, sequence=16), [0, 1, 2, 3], micro_batches=4)
    assert trace.op_columns.group
    assert progress._runs_in_order(trace)
    monkeypatch.setattr(progress, "_runs_in_order", lambda _: False)
    assert blocked(trace) == []  # nor would one find a cycle


def test_a_pair_whose_receiver_comes_first_is_searched():
    trace = built([(0, "x", 0, 0), (0, "", 1, 0), (1, "x", 0, 0)], {"x": {0, 1}})
    assert not progress._runs_in_order(trace)  # op1 waits for op2, which comes later in the program
    assert blocked(trace) == []
