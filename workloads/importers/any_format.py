"""Reads a trace in any supported format, which is recognised by the content, never by the name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from sim.arguments import explained
from sim.errors import TraceError, near
from sim.trace.graph import Trace
from sim.trace.io import check_regular, load
from workloads.importers.chakra import build_chakra, rank_files, read_chakra
from workloads.importers.chrome import build_chrome
from workloads.importers.dtr import read_dtr
from workloads.importers.execution_trace import build_execution_trace
from workloads.importers.optrace import FORMAT as OPTRACE
from workloads.importers.optrace import read_optrace
from workloads.importers.reading import MAX_BYTES, check_memory, read_bytes, read_packed, read_start
from workloads.importers.streaming import Document, open_document
from workloads.importers.weights import KnownModule, known_module

FORMATS = {
    "tiersim JSON lines": "sim.trace.io",
    "op-trace-1 JSON": "workloads.importers.optrace",
    "PyTorch profiler Chrome JSON": "workloads.importers.chrome",
    "PyTorch execution trace JSON": "workloads.importers.execution_trace",
    "Chakra .et (protobuf or JSON; a file, or the prefix of all ranks)": "workloads.importers.chakra",
    "DTR operator log": "workloads.importers.dtr",
}
"""The formats that `load_trace` reads, each plain or gzipped, and the module that says what each carries."""

NAMED = {OPTRACE: read_optrace}
"""Readers of JSON objects that name their format under the key `format`, by that name."""

START = 4096

FIRST_ROWS, FIRST_BYTES = 100, 1 << 20
"""How many rows are inspected to recognise the format."""


@explained
def load_trace(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_BYTES,
    step: int | None = None,
    module: Any = None,
    optimizer: Any = None,
) -> Trace:
    """Read a trace from a file in any of `FORMATS`, recognised by its content.

    Chrome JSON, execution traces and DTR logs are streamed row by row; op-trace-1 and Chakra are held in memory whole.

    path: the file, plain or gzipped.
    max_bytes: the most bytes to read, after unpacking.
    step: which step of a profiler's Chrome JSON, by its number there; None for the last complete one.
    module: the `torch.nn.Module` that a profiler's Chrome JSON was recorded of, whose weights are missing there (how
        they are matched with ops: `workloads.importers.weights`).
    optimizer: its `torch.optim.Optimizer` after a step, for the state, or a list of them.

    Raises TraceError, one line that names the file and its fault, or lists the formats where it has none of them.
    """
    if optimizer is not None and module is None:
        raise TraceError(f"{path}: optimizer: give its module, too")
    known = None if module is None else known_module(module, optimizer)
    try:
        if not Path(path).exists() and rank_files(path):
            return read_chakra(path, max_bytes=max_bytes)
    except ValueError as error:  # a name with a zero byte
        raise TraceError(f"{str(path)!r}: cannot be opened: {error}") from None
    check_regular(path)
    start = read_start(path, START).lstrip()
    if start[:1] not in (b"{", b"["):
        _only_of_a_profile(path, step, module, "")
    if not start:
        raise _unknown(path, "it is empty")
    if start[:1] not in (b"{", b"["):
        if _may_be_chakra(start):
            return read_chakra(path, max_bytes=max_bytes)
        raise _unknown(path, "it is neither JSON nor length-delimited protobuf")
    if re.match(rb'\{"format"\s*:\s*"tiersim trace"|\{[^\n]*"format"\s*:\s*"tiersim trace"', start):
        _only_of_a_profile(path, step, module, "; this is a tiersim trace")
        packed, named = read_packed(path), str(path).endswith(".gz")
        if packed != named:
            no = "" if packed else "not "
            raise TraceError(f"{path}: the name of a tiersim trace that is {no}gzipped must {no}end in '.gz'")
        try:
            return load(path, max_bytes=max_bytes)
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error}") from None
    if re.match(rb'\{[^\n]*"INSTRUCTION"\s*:', start):
        _only_of_a_profile(path, step, module, "; this is a DTR log")
        return read_dtr(path, max_bytes=max_bytes)
    return _from_json(path, start, max_bytes, step, known)


def _only_of_a_profile(path: str | os.PathLike[str], step: int | None, module: Any, what: str) -> None:
    """Raise TraceError where a step or a module is given for a file of another format."""
    if step is not None:
        raise TraceError(f"{path}: step {step}: only a profiler's Chrome JSON has steps{what}")
    if module is not None:
        raise TraceError(f"{path}: module: only a profiler's Chrome JSON takes weights from a module{what}")


def _from_json(
    path: str | os.PathLike[str], start: bytes, max_bytes: int, step: int | None, known: KnownModule | None
) -> Trace:
    """A trace from one or more JSON documents in a file, recognised by their keys."""
    with open_document(path, max_bytes) as document:
        try:
            kind, rows = _kind(document)
        except TraceError:
            if not re.search(rb'"(dataDeps|data_deps|ctrlDeps|durationMicros|duration_micros|version)"', start):
                raise
            kind, rows = "chakra", ()
        if kind == "chrome":
            return build_chrome(rows, str(path), step, known)
        _only_of_a_profile(path, step, known, f"; this is {kind}")
        if kind == "execution trace":
            return build_execution_trace(rows, document.about, str(path))
    if kind in NAMED:
        return NAMED[kind](path, max_bytes=max_bytes)
    if kind == "chakra":
        data = read_bytes(path, max_bytes)
        check_memory(data, str(path), max_bytes)
        return build_chakra([(str(path), data)], str(path))
    raise _unknown(path, kind)


def _kind(document: Document) -> tuple[str, Iterable[Any]]:
    """The format, or a description of the content if it is unknown, and the rows if the format is streamed."""
    if document.is_list:
        first, rows = _first(document.rows(), document)
        if _is_chakra(first):
            return "chakra", _exhausted(rows)
        if any(isinstance(row, dict) and "ph" in row for row in first):
            return "chrome", rows
        return "a JSON list", ()
    while name := document.find("format", "traceEvents", "workload_graph", "nodes"):
        if name == "traceEvents":
            return "chrome", document.rows(name)
        if name == "workload_graph":
            document.find()
            return "chakra", ()
        if name == "nodes":
            first, rows = _first(document.rows(name), document)
            return ("chakra", _exhausted(rows)) if _is_chakra(first) else ("execution trace", rows)
        if (given := document.about[name]) in list(NAMED):
            return given, ()
    if isinstance(given := document.about.get("format"), str):
        return f"a JSON object whose format is {given[:100]!r}{near(given[:100], NAMED)}", ()
    return f"a JSON object with the keys {', '.join(map(repr, list(document.about)[:6]))[:200]}", ()


def _first(rows: Iterable[Any], document: Document) -> tuple[list[Any], Iterable[Any]]:
    """The first rows, of no more than about a megabyte, and all rows."""
    rows, most = iter(rows), document.bytes + FIRST_BYTES
    first: list[Any] = []
    for row in rows:
        first.append(row)
        if len(first) == FIRST_ROWS or document.bytes > most:
            break
    return first, chain(first, rows)


def _exhausted(rows: Iterable[Any]) -> tuple[()]:
    """No rows, after reading them all, so that a JSON error is located as precisely as in the streamed formats."""
    for _ in rows:
        pass
    return ()


def _is_chakra(nodes: list[Any]) -> bool:
    """Whether these are Chakra nodes; PyTorch's own nodes list tensors and callers, but no data dependencies."""
    keys = {"data_deps", "dataDeps", "duration_micros", "durationMicros"}
    return any(isinstance(row, dict) and keys & row.keys() for row in nodes)


def _may_be_chakra(start: bytes) -> bool:
    """Whether the bytes start with a length and a message whose first field, if any, is one of GlobalMetadata's."""
    length = shift = 0
    for index, byte in enumerate(start[:5]):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            body = start[index + 1 : index + 1 + length]
            return (not length and len(start) > index + 1) or body[:1] in (b"\x0a", b"\x12")
    return False


def _unknown(path: str | os.PathLike[str], content: str) -> TraceError:
    return TraceError(f"{path}: not a trace in a known format ({content}); accepted: {'; '.join(FORMATS)}")
