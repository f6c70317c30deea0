"""The log as a file that a trace viewer opens: https://ui.perfetto.dev, or chrome://tracing for the JSON form.

Each device is a process, and one more holds what all share; each engine and link is a thread; each tier is a
counter of bytes. An arrow leads from a copy to the run that first reads the copied tensor.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from sim.errors import TiersimError
from sim.log import WHYS, EventLog
from sim.report.files import write_aside
from sim.report.tracks import Scene, events

CHUNK = 20_000  # packets serialized at once: bounds the memory that a long trace takes
SEQUENCE = 1  # one writer made the whole file
ENDINGS = (".pftrace", ".json")


def write_timeline(log: EventLog, path: str | os.PathLike[str]) -> Path:
    """Write the log as a trace; `.pftrace` or `.json` by the name's ending, compressed where `.gz` follows.

    `.pftrace` is Perfetto's protocol-buffer format, `.json` the Chrome trace event format (times there are
    decimal microseconds with three decimals, so that both hold whole nanoseconds). Equal logs give equal files. The
    file is replaced as a whole. Raises TiersimError on another ending, OSError.
    """
    name = Path(path).name
    packed = name.endswith(".gz")
    ending = Path(name.removesuffix(".gz")).suffix
    if ending not in ENDINGS:
        raise TiersimError(
            f"timeline {str(path)!r}: the name must end in {' or '.join(ENDINGS)}, or one of these + .gz"
        )
    parts = _pftrace if ending == ".pftrace" else _chrome_json
    scene = Scene(log)

    def write(file: IO[bytes]) -> None:
        for part in parts(scene):
            file.write(part)

    return write_aside(path, _gzipped(write) if packed else write)


def _gzipped(write: Callable[[IO[bytes]], None]) -> Callable[[IO[bytes]], None]:
    def write_gzip(file: IO[bytes]) -> None:
        # no file name and no date in the header: equal logs give equal bytes
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed:
            write(packed)  # type: ignore[arg-type]

    return write_gzip


def _flow_ends(scene: Scene) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Numbers of the flows that leave and that reach each slice, by row; numbers start at 1."""
    leave: dict[int, list[int]] = {}
    reach: dict[int, list[int]] = {}
    for number, (source, target) in enumerate(scene.flows, 1):
        leave.setdefault(source, []).append(number)
        reach.setdefault(target, []).append(number)
    return leave, reach


# ---- Perfetto ----------------------------------------------------------------------------------


class _Packets:
    """Collects packets of one sequence and hands them out serialized, with strings interned at first use."""

    def __init__(self) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self.schema = schema
        self._make = TraceProtoBuilder
        self._builder = TraceProtoBuilder()
        self._count, self._first = 0, True
        self._iids: dict[str, dict[str, int]] = {
            field: {}
            for field in ("event_names", "event_categories", "debug_annotation_names", "debug_annotation_string_values")
        }

    def add(self) -> Any:
        """A new packet at the end of the sequence."""
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.sequence_flags = self.schema.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        if self._first:  # tells the reader that no strings are known yet
            packet.sequence_flags |= self.schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self._count, self._first = self._count + 1, False
        return packet

    def intern(self, packet: Any, field: str, text: str) -> int:
        """The number that stands for `text` from this packet on."""
        known = self._iids[field]
        if text not in known:
            known[text] = len(known) + 1
            entry = getattr(packet.interned_data, field).add()
            entry.iid = known[text]
            if field == "debug_annotation_string_values":
                entry.str = text.encode()
            else:
                entry.name = text
        return known[text]

    def full(self) -> bool:
        """Whether it is time to take what has been collected."""
        return self._count >= CHUNK

    def take(self) -> bytes:
        """What has been collected since the last call; parts of a trace may be joined end to end."""
        out: bytes = self._builder.serialize()
        self._builder, self._count = self._make(), 0
        return out


def _pftrace(scene: Scene) -> Iterator[bytes]:
    packets = _Packets()
    schema = packets.schema
    tracks, counters = scene.tracks, scene.counters
    uuids = _describe_tracks(packets, scene)
    leave, reach = _flow_ends(scene)
    begin, end = schema.TrackEvent.TYPE_SLICE_BEGIN, schema.TrackEvent.TYPE_SLICE_END
    rows, track_of = scene.log.intervals.tolist(), scene.track_of.tolist()
    for time, row, what in events(scene):
        packet = packets.add()
        packet.timestamp = time
        event = packet.track_event
        event.track_uuid = uuids[track_of[row]]
        if what:
            event.type = end
        else:
            event.type = begin
            name, args = scene.describe(rows[row])
            event.name_iid = packets.intern(packet, "event_names", name)
            event.category_iids.append(packets.intern(packet, "event_categories", WHYS[rows[row][4]]))
            for key, value in args.items():
                note = event.debug_annotations.add()
                note.name_iid = packets.intern(packet, "debug_annotation_names", key)
                if isinstance(value, str):
                    note.string_value_iid = packets.intern(packet, "debug_annotation_string_values", value)
                else:
                    note.int_value = value
            if row in leave:
                event.flow_ids.extend(leave[row])
            if row in reach:
                event.terminating_flow_ids.extend(reach[row])
        if packets.full():
            yield packets.take()
    kind = schema.TrackEvent.TYPE_COUNTER
    for uuid, counter in zip(uuids[len(tracks) :], counters, strict=True):
        for time, level in zip(counter.times.tolist(), counter.bytes.tolist(), strict=True):
            packet = packets.add()
            packet.timestamp = time
            event = packet.track_event
            event.type, event.track_uuid, event.counter_value = kind, uuid, level
            if packets.full():
                yield packets.take()
    yield packets.take()


def _describe_tracks(packets: _Packets, scene: Scene) -> list[int]:
    """Write what the tracks are. Returns the uuids: one for each track, then one for each counter."""
    for number, name in enumerate(scene.processes):
        track = packets.add().track_descriptor
        track.uuid = number + 1
        track.process.pid = number + 1
        track.process.process_name = name
        track.process.legacy_sort_index = number
    uuids = []
    next_uuid = len(scene.processes) + 1
    for number, shown in enumerate(scene.tracks):
        track = packets.add().track_descriptor
        track.uuid, track.parent_uuid = next_uuid + number, shown.process + 1
        track.thread.pid, track.thread.tid = shown.process + 1, _tid(scene, number)
        track.thread.thread_name = shown.name
        track.thread.legacy_sort_index = number
        uuids.append(track.uuid)
    next_uuid += len(scene.tracks)
    for number, counter in enumerate(scene.counters):
        track = packets.add().track_descriptor
        track.uuid, track.parent_uuid = next_uuid + number, counter.process + 1
        track.name = counter.name
        track.counter.unit = packets.schema.CounterDescriptor.UNIT_SIZE_BYTES
        uuids.append(track.uuid)
    return uuids


def _tid(scene: Scene, number: int) -> int:
    """Thread number of a track. A thread that bears its process's number is that process's main one."""
    track = scene.tracks[number]
    return track.process + 1 if track.is_main else len(scene.processes) + 1 + number


# ---- Chrome trace events -----------------------------------------------------------------------


def _chrome_json(scene: Scene) -> Iterator[bytes]:
    log, tracks = scene.log, scene.tracks
    about = {
        "platform": log.platform.name,
        "workload": str(log.trace.meta.get("model", "")),
        "complete": log.complete,
        "end_ns": log.end,
    }
    yield f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n'.encode()
    place = [f'"pid":{track.process + 1},"tid":{_tid(scene, i)}' for i, track in enumerate(tracks)]
    lines = list(_chrome_names(scene, place))
    leave, reach = _flow_ends(scene)
    rows, track_of = log.intervals.tolist(), scene.track_of.tolist()
    for row in scene.order.tolist():
        (start, end), why, where = rows[row][:2], WHYS[rows[row][4]], place[track_of[row]]
        name, args = scene.describe(rows[row])
        when = f'"ts":{_micro(start)}'
        lines.append(
            f'{{"ph":"X","name":{json.dumps(name)},"cat":"{why}",{when},"dur":{_micro(end - start)},{where},'
            f'"args":{json.dumps(args)}}}'
        )
        flow = f'"cat":"flow","name":"first read",{when},{where}'
        lines += [f'{{"ph":"s","id":{number},{flow},"bp":"e"}}' for number in leave.get(row, ())]
        lines += [f'{{"ph":"f","id":{number},{flow},"bp":"e"}}' for number in reach.get(row, ())]
        if len(lines) >= CHUNK:
            yield (",\n".join(lines) + ",\n").encode()
            lines = []
    for counter in scene.counters:
        head = f'{{"ph":"C","name":{json.dumps(counter.name)},"pid":{counter.process + 1},"ts":'
        points = zip(counter.times.tolist(), counter.bytes.tolist(), strict=True)
        lines += [f'{head}{_micro(time)},"args":{{"bytes":{level}}}}}' for time, level in points]
    # a last line of known kind, so that every other line may end in a comma
    lines.append(json.dumps({"ph": "M", "name": "trace_done", "pid": 1, "args": {"end_ns": log.end}}))
    yield (",\n".join(lines) + "\n]}\n").encode()


def _chrome_names(scene: Scene, place: list[str]) -> Iterator[str]:
    for number, name in enumerate(scene.processes):
        for key, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": number})):
            yield json.dumps({"ph": "M", "name": key, "pid": number + 1, "args": value})
    for number, track in enumerate(scene.tracks):
        name_args, sort_args = json.dumps({"name": track.name}), json.dumps({"sort_index": number})
        yield f'{{"ph":"M","name":"thread_name",{place[number]},"args":{name_args}}}'
        yield f'{{"ph":"M","name":"thread_sort_index",{place[number]},"args":{sort_args}}}'


def _micro(ns: int) -> str:
    """Nanoseconds as decimal microseconds, exactly."""
    return f"{ns // 1000}.{ns % 1000:03d}"
