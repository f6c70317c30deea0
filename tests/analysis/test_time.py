"""Stalls, overlap, traffic and bubbles: figures read off the drawing in conftest, and naive loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.analysis import bubbles, overlap, stalls, stalls_by_op, traffic
from sim.analysis.lanes import covered_before, overlap_ns, runs, total_ns, union
from sim.trace.builder import TraceBuilder

from .conftest import BACK, GPU, OUT, log_of, machine


def test_the_main_lane_is_split_into_computing_again_and_waiting(step):
    time = stalls(step)
    assert (time.compute_ns, time.recompute_ns, time.codec_ns, time.stall_ns) == (410, 100, 0, 260)
    assert time.by_cause == {"transfer": 250, "space": 10}
    assert time.recompute_overhead == 100 / 410
    assert stalls(step, device=0) == time
    assert stalls(step, device=1).compute_ns == 0


def test_stalls_are_listed_by_op_longest_first(step):
    table = stalls_by_op(step)
    assert table.to_dict("records") == [
        {"op": "h", "cause": "transfer", "stall_ns": 250, "stalls": 1},
        {"op": "h", "cause": "space", "stall_ns": 10, "stalls": 1},
    ]


def test_half_of_a_round_trip_hides_behind_the_op_that_runs_meanwhile(step):
    seen = overlap(step)
    assert (seen.transfer_ns, seen.hidden_ns, seen.fraction) == (400, 150, 150 / 400)


def test_each_link_reports_bytes_and_use(step):
    out, back = traffic(step)
    assert (out.link, out.bytes, out.transfers, out.busy_ns) == ("out", 200, 1, 200)
    assert out.busy == out.utilisation == 200 / 770
    assert (back.link, back.bytes) == ("back", 200)


def test_a_device_is_idle_only_outside_in_a_complete_log(step):
    (device,) = bubbles(step)
    assert (device.busy_ns, device.stall_ns, device.before_ns, device.after_ns, device.gap_ns) == (510, 260, 0, 0, 0)
    assert device.idle == pytest.approx(260 / 770)


def empty(devices: int = 1):
    b = TraceBuilder()
    for d in range(devices):
        b.op(f"op{d}", device=d, writes=[b.tensor(f"t{d}", 1)])
    return b.build()


def test_nothing_run_is_all_zeros_and_unknowns():
    log = log_of(empty(), machine(), [])
    assert stalls(log).by_cause == {}
    assert stalls(log).recompute_overhead is None
    assert len(stalls_by_op(log)) == 0
    assert overlap(log).fraction is None
    assert [link.utilisation for link in traffic(log)] == [None, None]
    assert bubbles(log)[0].idle is None


def test_a_second_device_has_lanes_and_bubbles_of_its_own():
    platform = machine(devices=2)  # lanes: gpu, gpu1, cpu, out, back
    rows = [
        (0, 10, 0, 0, "run", 0, -1, "", 0),
        (10, 40, 1, 1, "run", 1, -1, "", 0),
        (40, 45, 1, 1, "stall", 1, -1, "drain", 0),
        (0, 40, 0, 3, "move", 0, 0, "", 40),  # of device 0, whose lane is busy for 10 ns
        (0, 30, 1, 2, "run", 1, -1, "", 0),  # an op of device 1 on the CPU: no main lane
    ]
    log = log_of(empty(2), platform, rows, end=50)
    assert (stalls(log).compute_ns, stalls(log, 0).compute_ns, stalls(log, 1).compute_ns) == (40, 10, 30)
    assert overlap(log).hidden_ns == 10
    first, second = bubbles(log)
    assert (first.before_ns, first.after_ns, first.busy_ns) == (0, 40, 10)
    assert (second.before_ns, second.after_ns, second.busy_ns, second.stall_ns) == (10, 5, 30, 5)


def test_a_transfer_of_no_device_counts_against_all_of_them():
    rows = [(0, 10, 0, GPU, "run", 0, -1, "", 0), (5, 15, -1, OUT, "move", -1, 0, "", 10)]
    assert overlap(log_of(empty(), machine(), rows)).hidden_ns == 5


@pytest.mark.parametrize("first", [0, 1])
def test_the_overlap_of_a_collective_does_not_depend_on_who_is_first(first):
    b = TraceBuilder()
    for d in (first, 1 - first):
        b.op(f"reduce{d}", "collective", bytes=8, group="all", device=d)
    rows = [
        (0, 10, 0, 0, "run", -1, -1, "", 0),  # device 0 computes half of the time, device 1 not at all
        (0, 20, first, 3, "move", 1, -1, "", 8),
        (30, 34, 1, 3, "move", -1, 0, "", 8),  # a copy of device 1
    ]
    log = log_of(b.build(), machine(devices=2), rows)
    seen = overlap(log)
    assert (seen.transfer_ns, seen.hidden_ns) == (20 + 24, 10)
    # of 16 bytes, 8 moved while one of their two devices computed for half of the time
    assert seen.by_link == {"out": 8 * 0.25 / 16, "back": None}
    assert traffic(log)[0].bytes == 16


def test_bytes_count_by_how_much_of_their_transfer_is_hidden():
    rows = [
        (0, 10, 0, GPU, "run", 0, -1, "", 0),
        (0, 10, 0, OUT, "move", 0, 0, "", 30),
        (5, 15, 0, OUT, "move", 0, 0, "", 10),
        (20, 30, 0, OUT, "move", 0, 0, "", 10),
    ]
    assert overlap(log_of(empty(), machine(), rows)).by_link == {"out": (30 + 5) / 50, "back": None}


def test_two_copies_at_once_are_one_time_and_two_counts_of_bytes():
    rows = [(0, 10, 0, OUT, "move", 0, 0, "", 10), (5, 20, 0, OUT, "move", 0, 0, "", 7)]
    log = log_of(empty(), machine(), rows)
    assert (traffic(log)[0].busy_ns, traffic(log)[0].bytes, traffic(log)[0].transfers) == (20, 17, 2)
    assert overlap(log).transfer_ns == 20


def test_every_member_of_a_group_runs_while_its_transfer_does():
    b = TraceBuilder()
    s, r = b.tensor("s", 8), b.tensor("r", 8)
    b.op("make", writes=[s])
    b.op("send", "send", reads=[s], group="p")
    b.op("recv", "recv", writes=[r], group="p", device=1)
    platform = machine(devices=2)
    rows = [(0, 5, 0, 0, "run", 0, -1, "", 0), (5, 9, 0, 3, "move", 2, -1, "", 8), (5, 9, 0, 4, "move", 2, -1, "", 8)]
    ran = runs(log_of(b.build(), platform, rows))
    assert sorted(zip(ran.op.tolist(), ran.start.tolist(), ran.end.tolist(), strict=True)) == [
        (0, 0, 5),
        (1, 5, 9),
        (2, 5, 9),
    ]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def columns(spans):
    return np.array([s for s, _ in spans], np.int64), np.array([e for _, e in spans], np.int64)


def naive(spans) -> set[int]:
    return {t for s, e in spans for t in range(s, e)}


@given(a=SPANS, b=SPANS, times=st.lists(st.integers(0, 80), max_size=6))
def test_unions_and_overlaps_are_what_counting_each_nanosecond_gives(a, b, times):
    assert total_ns(*columns(a)) == len(naive(a))
    assert overlap_ns(columns(a), columns(b)) == len(naive(a) & naive(b))
    starts, ends = union(*columns(a))
    assert (starts < ends).all()
    assert (starts[1:] > ends[:-1]).all()
    before = covered_before(np.array(times, np.int64), starts, ends)
    assert before.tolist() == [len([t for t in naive(a) if t < time]) for time in times]


@given(lane=SPANS, links=st.lists(st.tuples(SPANS, st.sampled_from([OUT, BACK])), max_size=2))
def test_analyses_of_random_lanes_agree_with_counting_nanoseconds(lane, links):
    busy: list[tuple[int, int]] = []
    for s, e in sorted(lane):  # one op at a time
        if not busy or s >= busy[-1][1]:
            busy.append((s, e))
    rows = [
        (s, e, 0, GPU, ("run", "stall")[i % 3 == 2], 0, -1, "space" * (i % 3 == 2), 0) for i, (s, e) in enumerate(busy)
    ]
    moves = [(s, e, 0, link, "move", 0, 0, "", e - s) for spans, link in links for s, e in spans]
    log = log_of(empty(), machine(), rows + moves)
    runs_at = naive((r[0], r[1]) for r in rows if r[4] == "run")
    stall_at = naive((r[0], r[1]) for r in rows if r[4] == "stall")
    move_at = naive((r[0], r[1]) for r in moves)
    assert (overlap(log).transfer_ns, overlap(log).hidden_ns) == (len(move_at), len(move_at & runs_at))
    assert (stalls(log).compute_ns, stalls(log).stall_ns) == (len(runs_at), len(stall_at))
    (bubble,) = bubbles(log)
    parts = (bubble.busy_ns, bubble.stall_ns, bubble.before_ns, bubble.after_ns, bubble.gap_ns)
    assert sum(parts) == log.end
    assert bubble.busy_ns == len(runs_at)
    for link, seen in zip((OUT, BACK), traffic(log), strict=True):
        assert seen.bytes == sum(r[8] for r in moves if r[3] == link)
        assert seen.busy_ns == len(naive((r[0], r[1]) for r in moves if r[3] == link))
