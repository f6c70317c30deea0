"""The timeline holds the log: decoded with the schema's own messages, nothing is missing, doubled or shifted."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TiersimError
from sim.log import CAUSE, STALLS, WHYS, EventLog
from sim.report.timeline import write_timeline
from tests.clocks import cpu_s, least


class Decoded:
    """A .pftrace read back: tracks by uuid, slices with names and arguments, counter points, flows."""

    def __init__(self, raw: bytes) -> None:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

        strings = defaultdict(dict)
        self.tracks, self.parents, self.threads, self.units = {}, {}, {}, {}
        self.slices, self.points = [], defaultdict(list)
        self.flow_from, self.flow_to = defaultdict(list), defaultdict(list)
        open_slices = defaultdict(list)
        self.flags = []
        for packet in Trace.FromString(raw).packet:
            self.flags.append(packet.sequence_flags)
            for field, entries in packet.interned_data.ListFields():
                for entry in entries:
                    text = entry.str.decode() if field.name == "debug_annotation_string_values" else entry.name
                    assert entry.iid not in strings[field.name]
                    strings[field.name][entry.iid] = text
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in self.tracks
                self.tracks[track.uuid] = track.process.process_name or track.thread.thread_name or track.name
                self.parents[track.uuid] = track.parent_uuid
                if track.HasField("thread"):
                    self.threads[track.uuid] = (track.thread.pid, track.thread.tid)
                if track.HasField("counter"):
                    self.units[track.uuid] = track.counter.unit
            elif packet.HasField("track_event"):
                event = packet.track_event
                assert event.track_uuid in self.tracks
                if event.type == TrackEvent.TYPE_COUNTER:
                    self.points[self.tracks[event.track_uuid]].append((packet.timestamp, event.counter_value))
                elif event.type == TrackEvent.TYPE_SLICE_BEGIN:
                    args = {}
                    for note in event.debug_annotations:
                        key = strings["debug_annotation_names"][note.name_iid]
                        assert key not in args
                        args[key] = (
                            strings["debug_annotation_string_values"][note.string_value_iid]
                            if note.HasField("string_value_iid")
                            else note.int_value
                        )
                    open_slices[event.track_uuid].append(len(self.slices))
                    (category,) = (strings["event_categories"][i] for i in event.category_iids)
                    name = strings["event_names"][event.name_iid]
                    self.slices.append([packet.timestamp, None, event.track_uuid, name, category, args])
                    for flow in event.flow_ids:
                        self.flow_from[flow].append(len(self.slices) - 1)
                    for flow in event.terminating_flow_ids:
                        self.flow_to[flow].append(len(self.slices) - 1)
                else:
                    assert event.type == TrackEvent.TYPE_SLICE_END
                    self.slices[open_slices[event.track_uuid].pop()][1] = packet.timestamp
                assert len(open_slices[event.track_uuid]) <= 1, "slices of one track overlap"
        assert not any(open_slices.values())


def decode(path):
    raw = path.read_bytes()
    return Decoded(gzip.decompress(raw) if path.name.endswith(".gz") else raw)


def wanted_rows(log):
    """Each interval as the viewer has to tell it, written out row by row from the log's columns."""
    ops, tensors = log.trace.ops, log.trace.tensors
    for start, end, device, lane, why, op, tensor, cause, size in log.intervals.tolist():
        yield (
            start,
            end,
            device,
            log.platform.lanes[lane],
            WHYS[why],
            ops[op].name if op >= 0 else None,
            tensors[tensor].name if tensor >= 0 else None,
            STALLS[cause] if WHYS[why] == "stall" else None,
            size,
        )


def told_rows(slices):
    for start, end, lane, why, args in slices:
        yield (
            start,
            end,
            args.get("device", -1),
            lane.partition(" (")[0],
            why,
            args.get("op"),
            args.get("tensor"),
            args.get("cause"),
            args.get("bytes", 0),
        )


@settings(max_examples=12, deadline=None)
@given(layers=st.integers(1, 12), seed=st.integers(0, 99), devices=st.integers(1, 3), engines=st.integers(1, 3))
def test_every_interval_is_there_exactly_once(make_log, tmp_path_factory, layers, seed, devices, engines):
    log = make_log(layers, seed=seed, devices=devices, copy_engines=engines)
    path = write_timeline(log, tmp_path_factory.mktemp("t") / "run.pftrace")
    found = decode(path)
    told = told_rows((s, e, found.tracks[track], why, args) for s, e, track, _, why, args in found.slices)
    assert Counter(told) == Counter(wanted_rows(log))


@settings(max_examples=12, deadline=None)
@given(layers=st.integers(1, 12), seed=st.integers(0, 99), devices=st.integers(1, 3), engines=st.integers(1, 3))
def test_the_json_form_tells_the_same_to_the_nanosecond(make_log, tmp_path_factory, layers, seed, devices, engines):
    log = make_log(layers, seed=seed, devices=devices, copy_engines=engines)
    path = write_timeline(log, tmp_path_factory.mktemp("t") / "run.json")
    events = json.loads(path.read_text(), parse_float=Decimal)["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(threads) == sum(e["name"] == "thread_name" for e in events)
    slices = [e for e in events if e["ph"] == "X"]
    told = told_rows(
        (ns(e["ts"]), ns(e["ts"] + e["dur"]), threads[e["pid"], e["tid"]], e["cat"], e["args"]) for e in slices
    )
    assert Counter(told) == Counter(wanted_rows(log))
    by_thread = defaultdict(list)
    for e in slices:
        by_thread[e["pid"], e["tid"]].append((ns(e["ts"]), ns(e["ts"] + e["dur"])))
    for spans in by_thread.values():
        spans.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


def ns(micro: Decimal) -> int:
    exact = micro * 1000
    assert exact == int(exact)
    return int(exact)


def levels(log, tier):
    """Highest and last use of a tier at each time it changes, by plain addition."""
    used, high, last = 0, {}, {}
    for time, where, delta, *_ in log.changes.tolist():
        if where == tier:
            used += delta
            high[time] = max(high.get(time, used), used)
            last[time] = used
    return high, last


def check_counters(log, points):
    for number, tier in enumerate(log.platform.tiers):
        high, last = levels(log, number)
        told = points.get(f"{tier.name} in use", [])
        assert [time for time, _ in told] == sorted(time for time, _ in told)
        assert dict(told) == last
        assert max((level for _, level in told), default=0) == max(high.values(), default=0)
        for time, level in told:
            assert level in (high[time], last[time])


def test_counters_equal_the_running_sum_at_every_change(make_log, tmp_path):
    log = make_log(9, seed=3, devices=2)
    check_counters(log, decode(write_timeline(log, tmp_path / "a.pftrace")).points)
    events = json.loads(write_timeline(log, tmp_path / "a.json").read_text(), parse_float=Decimal)["traceEvents"]
    points = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            points[e["name"]].append((ns(e["ts"]), e["args"]["bytes"]))
    check_counters(log, points)


def test_counters_are_bytes_of_the_tier_s_process(drawn_log, tmp_path):
    found = decode(write_timeline(drawn_log, tmp_path / "a.pftrace"))
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor

    where = {found.tracks[uuid]: found.tracks[found.parents[uuid]] for uuid in found.units}
    assert where == {"hbm0 in use": "device 0", "host in use": "shared"}
    assert set(found.units.values()) == {CounterDescriptor.UNIT_SIZE_BYTES}
    mib = 2**20
    assert found.points["host in use"] == [(10, 16 * mib), (60, 0)]
    assert found.points["hbm0 in use"] == [
        (0, 22 * mib),
        (10, 28 * mib),
        (30, 12 * mib),
        (40, 28 * mib),
        (60, 29 * mib),
        (67, 13 * mib),
    ]


def test_the_drawn_run_reads_as_it_was_drawn(drawn_log, tmp_path):
    found = decode(write_timeline(drawn_log, tmp_path / "a.pftrace"))
    told = [(start, end, found.tracks[track], name) for start, end, track, name, _, _ in found.slices]
    assert told == [
        (0, 10, "gpu0", "f"),
        (10, 17, "gpu0", "g"),
        (10, 30, "d2h0", "a"),
        (17, 37, "gpu0", "recompute f"),
        (37, 60, "gpu0", "stall: transfer"),
        (40, 60, "h2d0", "a"),
        (60, 67, "gpu0", "b"),
    ]
    assert found.slices[2][5] == {
        "why": "move",
        "tensor": "a",
        "role": "activation",
        "layer": 3,
        "from": "hbm0",
        "to": "host",
        "bytes": 16 * 2**20,
        "device": 0,
    }
    assert found.slices[4][5] | {"cause": "transfer", "op": "b", "tensor": "a"} == found.slices[4][5]
    # only the copy back is followed by a read where it went: the copy to the host has no arrow
    assert {f: [found.slices[i][3] for i in ends] for f, ends in found.flow_from.items()} == {1: ["a"]}
    assert found.flow_from[1] == [5]
    assert found.flow_to[1] == [6]


@pytest.mark.parametrize(("devices", "engines"), [(1, 1), (2, 1), (1, 3)])
def test_each_copy_back_points_at_the_first_run_that_reads_it(make_log, tmp_path, devices, engines):
    log = make_log(16, seed=5, devices=devices, copy_engines=engines)
    found = decode(write_timeline(log, tmp_path / "a.pftrace"))
    assert found.flow_from.keys() == found.flow_to.keys()
    assert all(len(ends) == 1 for ends in (*found.flow_from.values(), *found.flow_to.values()))
    wanted = set()
    for start, end, _, lane, why, _, tensor, *_ in log.intervals.tolist():
        if WHYS[why] == "move" and log.platform.lanes[lane].startswith("h2d"):
            later = [
                row
                for row in log.intervals.tolist()
                if WHYS[row[4]] in ("run", "recompute") and row[0] >= end and tensor in log.trace.reads(row[5])
            ]
            first = min(later)
            wanted.add((start, end, log.trace.tensors[tensor].name, first[0], log.trace.ops[first[5]].name))
    told = set()
    for flow, (source,) in found.flow_from.items():
        (target,) = found.flow_to[flow]
        copy, reader = found.slices[source], found.slices[target]
        assert copy[1] <= reader[0]
        assert source < target, "the viewer must meet the copy first"
        told.add((copy[0], copy[1], copy[3], reader[0], reader[5]["op"]))
    assert told == wanted
    assert len(wanted) >= 3


def test_the_json_form_has_the_same_arrows(make_log, tmp_path):
    log = make_log(16, seed=5, copy_engines=2)
    found = decode(write_timeline(log, tmp_path / "a.pftrace"))
    events = json.loads(write_timeline(log, tmp_path / "a.json").read_text(), parse_float=Decimal)["traceEvents"]
    begins = {(e["pid"], e["tid"], ns(e["ts"])): e["name"] for e in events if e["ph"] == "X"}
    ends = {
        kind: {e["id"]: begins[e["pid"], e["tid"], ns(e["ts"])] for e in events if e["ph"] == kind} for kind in "sf"
    }
    assert ends["s"] == {flow: found.slices[i][3] for flow, (i,) in found.flow_from.items()}
    assert ends["f"] == {flow: found.slices[i][3] for flow, (i,) in found.flow_to.items()}


def test_a_copy_that_goes_again_unread_points_nowhere(drawn_log, tmp_path):
    log = drawn_log
    # `a` is released at 59, before b starts at 60: what b reads then came another way
    gone = np.array([[59, 0, -16 * 2**20, 1, -1, CAUSE["dropped"]]])
    moved = log.intervals.copy()
    moved[moved[:, 0] == 40, 1] = 55
    changes = log.changes[log.changes[:, 0] < 60]
    cut = EventLog(log.trace, log.platform, moved, np.concatenate((changes, gone)), log.reserved, log.end)
    assert not decode(write_timeline(cut, tmp_path / "a.pftrace")).flow_from


def test_tracks_stand_under_their_device_and_have_their_own_thread(make_log, tmp_path):
    log = make_log(12, seed=1, devices=2, copy_engines=2)
    found = decode(write_timeline(log, tmp_path / "a.pftrace"))
    lanes = {found.tracks[uuid]: found.tracks[found.parents[uuid]] for uuid in found.threads}
    assert {name for name in lanes if " (" not in name} == set(log.platform.lanes)
    assert lanes["gpu1"] == lanes["d2h1"] == lanes["h2d1"] == "device 1"
    assert lanes["cpu"] == "shared"
    assert any(name.endswith(" (2)") for name in lanes), "copies that overlap have a second row"
    assert len(set(found.threads.values())) == len(found.threads)
    main = {found.tracks[uuid] for uuid, (pid, tid) in found.threads.items() if pid == tid}
    assert main == {"gpu0", "gpu1"}
    assert found.flags[0] & 1
    assert not any(flag & 1 for flag in found.flags[1:])


def test_slices_of_no_length_and_a_log_without_rows_are_legal(drawn_log, tmp_path):
    rows = drawn_log.intervals.copy()
    rows[:, 1] = rows[:, 0] = [0, 0, 0, 5, 5, 5, 5]
    flat = EventLog(drawn_log.trace, drawn_log.platform, rows, drawn_log.changes[:0], drawn_log.reserved, 5)
    found = decode(write_timeline(flat, tmp_path / "a.pftrace"))
    assert len(found.slices) == 7
    none = EventLog(drawn_log.trace, drawn_log.platform, rows[:0], drawn_log.changes[:0], drawn_log.reserved, 0)
    assert decode(write_timeline(none, tmp_path / "b.pftrace")).slices == []
    assert json.loads(write_timeline(none, tmp_path / "b.json").read_text())["traceEvents"]


def test_a_peak_that_lasts_no_time_is_still_drawn(drawn_log, tmp_path):
    """At 67 ns 50 MiB of scratch space are taken and given back at once: the highest point comes before the last."""
    mib = 2**20
    scratch = np.array([[67, 0, 50 * mib, -1, 2, CAUSE["workspace"]], [67, 0, -50 * mib, -1, 2, CAUSE["workspace"]]])
    log = EventLog(
        *(drawn_log.trace, drawn_log.platform, drawn_log.intervals),
        *(np.concatenate((drawn_log.changes, scratch)), drawn_log.reserved, drawn_log.end),
    )
    points = decode(write_timeline(log, tmp_path / "a.pftrace")).points["hbm0 in use"]
    assert points[-2:] == [(67, 63 * mib), (67, 13 * mib)]


def test_a_reserve_has_a_curve_of_its_own(drawn_log, tmp_path):
    kept = np.array([[0, 0, 20], [10, 0, 12], [67, 0, -32]], np.int64)
    log = EventLog(drawn_log.trace, drawn_log.platform, drawn_log.intervals, drawn_log.changes, kept, drawn_log.end)
    assert decode(write_timeline(log, tmp_path / "a.pftrace")).points["hbm0 reserved"] == [(0, 20), (10, 32), (67, 0)]


@pytest.mark.parametrize("name", ["a.pftrace", "a.json", "a.pftrace.gz", "a.json.gz"])
def test_equal_logs_give_equal_files(make_log, tmp_path, name):
    first = write_timeline(make_log(8, seed=2), tmp_path / "1" / name).read_bytes()
    second = write_timeline(make_log(8, seed=2), tmp_path / "2" / f"other-{name}").read_bytes()
    assert first == second
    assert write_timeline(make_log(8, seed=3), tmp_path / "3" / name).read_bytes() != first
    if name.endswith(".gz"):
        assert first[3:8] == bytes(5), "the header holds a name or a date"
        assert gzip.decompress(first) == write_timeline(make_log(8, seed=2), tmp_path / name[:-3]).read_bytes()


def test_a_wrong_ending_is_refused_with_the_right_ones(drawn_log, tmp_path):
    with pytest.raises(TiersimError, match=r"run\.txt.*\.pftrace or \.json"):
        write_timeline(drawn_log, tmp_path / "run.txt")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(drawn_log, tmp_path, monkeypatch):
    path = write_timeline(drawn_log, tmp_path / "a.json")
    before = path.read_bytes()

    def fail(scene):
        yield b"half"
        raise RuntimeError("disk")

    monkeypatch.setattr("sim.report.timeline._chrome_json", fail)
    with pytest.raises(RuntimeError, match="disk"):
        write_timeline(drawn_log, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.alone
def test_a_long_log_is_written_in_seconds(make_log, tmp_path):
    log = make_log(12_000, seed=1)
    assert len(log.intervals) > 35_000
    path = tmp_path / "long.pftrace"
    assert least(4, lambda: cpu_s(write_timeline, log, path)) < 4  # 1.3 s on a quiet machine
    assert path.stat().st_size < 200 * len(log.intervals)
