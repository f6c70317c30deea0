"""Reading a trace of whatever format: the content tells which one it is, never the name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sim.errors import TraceError
from sim.trace.graph import Trace
from sim.trace.io import load
from workloads.importers.chakra import build_chakra, rank_files, read_chakra
from workloads.importers.chrome import build_chrome
from workloads.importers.dtr import build_dtr
from workloads.importers.execution_trace import build_execution_trace
from workloads.importers.optrace import FORMAT, read_optrace
from workloads.importers.reading import MAX_BYTES, parse_json, read_bytes, read_packed, read_start

FORMATS = (
    "tiersim JSON lines",
    "op-trace-1 JSON",
    "PyTorch profiler Chrome JSON",
    "PyTorch execution trace JSON",
    "Chakra .et (protobuf or JSON; a file, or the prefix of all ranks)",
    "DTR operator log",
)
"""What `load_trace` reads; each plain or gzipped."""

START = 4096


def load_trace(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Trace:
    """A trace from a file of any format in `FORMATS`, told by its content; gzip is unpacked.

    max_bytes: most bytes to read, after unpacking. Raises TraceError, one line that names the file and what is wrong
    with it, or lists the formats where it is none of them.
    """
    try:
        if not Path(path).exists() and rank_files(path):
            return read_chakra(path, max_bytes=max_bytes)
    except ValueError as error:  # a name with a zero byte
        raise TraceError(f"{str(path)!r}: cannot be opened: {error}") from None
    start = read_start(path, START).lstrip()
    if not start:
        raise _unknown(path, "it is empty")
    if start[:1] not in (b"{", b"["):
        if _may_be_chakra(start):
            return read_chakra(path, max_bytes=max_bytes)
        raise _unknown(path, "it is neither JSON nor length-delimited protobuf")
    if re.match(rb'\{"format"\s*:\s*"tiersim trace"|\{[^\n]*"format"\s*:\s*"tiersim trace"', start):
        packed, named = read_packed(path), str(path).endswith(".gz")
        if packed != named:
            no = "" if packed else "not "
            raise TraceError(f"{path}: the name of a tiersim trace that is {no}gzipped must {no}end in '.gz'")
        try:
            return load(path, max_bytes=max_bytes)
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error}") from None
    if re.match(rb'\{[^\n]*"INSTRUCTION"\s*:', start):
        return build_dtr(read_bytes(path, max_bytes), str(path))
    return _from_json(path, read_bytes(path, max_bytes), max_bytes)


def _from_json(path: str | os.PathLike[str], data: bytes, max_bytes: int) -> Trace:
    """A trace from a JSON document, or several after each other, told by its keys."""
    try:
        document = parse_json(data, str(path), max_bytes)
    except TraceError:
        if re.search(rb'"(dataDeps|data_deps|ctrlDeps|durationMicros|duration_micros|version)"', data[:START]):
            return build_chakra([(str(path), data)], str(path))
        raise
    if isinstance(document, dict):
        if document.get("format") == FORMAT:
            return read_optrace(path, max_bytes=max_bytes)
        if "traceEvents" in document:
            return build_chrome(document, str(path))
        if "workload_graph" in document or _is_chakra(document.get("nodes")):
            return build_chakra([(str(path), data)], str(path))
        if "nodes" in document:
            return build_execution_trace(document, str(path))
        raise _unknown(path, f"a JSON object with the keys {', '.join(map(repr, list(document)[:6]))[:200]}")
    if _is_chakra(document):
        return build_chakra([(str(path), data)], str(path))
    if isinstance(document, list) and any(isinstance(row, dict) and "ph" in row for row in document[:100]):
        return build_chrome(document, str(path))
    raise _unknown(path, f"a JSON {type(document).__name__}")


def _is_chakra(nodes: object) -> bool:
    """Whether these are Chakra nodes: PyTorch's own list tensors and callers, not dependencies on data."""
    keys = {"data_deps", "dataDeps", "duration_micros", "durationMicros"}
    return isinstance(nodes, list) and any(isinstance(row, dict) and keys & row.keys() for row in nodes[:100])


def _may_be_chakra(start: bytes) -> bool:
    """Whether the bytes start with a length and then a message whose first field is one of GlobalMetadata's or none."""
    length = shift = 0
    for at, byte in enumerate(start[:5]):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            body = start[at + 1 : at + 1 + length]
            return (not length and len(start) > at + 1) or body[:1] in (b"\x0a", b"\x12")
    return False


def _unknown(path: str | os.PathLike[str], what: str) -> TraceError:
    return TraceError(f"{path}: no trace of a known format ({what}); accepted: {'; '.join(FORMATS)}")
