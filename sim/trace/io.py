"""Traces as files: one JSON object a line, `.jsonl` or `.jsonl.gz`.

The first line is the header, then one line a tensor and one an op, in order of their ids; the tensors
an op names must stand above it. A file can be written by hand: whatever has a default may be left out,
and tensors are named either by their name or by their id, their place among the tensor lines.

    {"format": "tiersim trace", "version": 1, "meta": {"model": "toy"}}
    {"tensor": "x", "bytes": 8, "role": "input"}
    {"tensor": "y", "bytes": 8}
    {"op": "double", "kind": "elementwise", "reads": ["x"], "writes": ["y"], "flops": 2}

Header: `format`, `version`; optionally `meta`, `outputs`, `carry` (pairs), `tensors` and `ops` (how many
there are: a file that was cut short is then noticed), and `origin` (`base`, `iterations`). The other
keys are the fields of `Tensor` and `Op`, and `stands_for` where the header has an origin. Nothing in a
file is executed, and sizes are bounded before memory is taken.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from sim.errors import TraceError, near
from sim.trace.graph import Trace, TraceBuilder
from sim.trace.op import KIND_CODE, KINDS, PHASE_CODE, PHASES, SPLITS, Implementation
from sim.trace.origin import Expr, Origin, from_json, leaves, to_json
from sim.trace.tensor import ROLE_CODE, ROLES

FORMAT, VERSION = "tiersim trace", 1
MAX_BYTES = 4 << 30
"""Most text that `load` reads from a file, after decompression."""
MAX_LINE = 64 << 20
"""Longest line; a header with a million outputs is about 10 MB."""

_INT, _STR, _LIST, _BOOL, _FRACTION = "a whole number", "a text", "a list", "true or false", "a number from 0 to 1"
_OBJECT, _TENSOR_KEY, _ORIGIN = "an object", "a tensor", "an origin"
_HEADER = {
    **dict.fromkeys(("tensors", "ops", "version"), _INT),
    **dict.fromkeys(("outputs", "carry"), _LIST),
    **dict.fromkeys(("meta", "origin"), _OBJECT),
    "format": _STR,
}
_TENSOR = {
    **dict.fromkeys(("tensor", "role", "dtype", "saved_for"), _STR),
    **dict.fromkeys(("bytes", "layer"), _INT),
    "shape": _LIST,
    "zeros": _FRACTION,
    "replaces": _TENSOR_KEY,
    "stands_for": _ORIGIN,
}
_OP = {
    **dict.fromkeys(("op", "kind", "phase", "engine", "group", "dtype"), _STR),
    **dict.fromkeys(("layer", "flops", "bytes", "workspace", "device", "priority", "duration"), _INT),
    **dict.fromkeys(("reads", "writes", "alternatives", "splits"), _LIST),
    "random": _BOOL,
    "stands_for": _ORIGIN,
}


# ---- writing -----------------------------------------------------------------------------------


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; a name that ends in `.gz` is compressed. The file appears whole, or not at all.

    The same trace gives the same bytes. Raises OSError where the place cannot be written.
    """
    target = Path(path)
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as raw:
            if target.suffix == ".gz":
                # no name and no time inside, so that equal traces give equal files
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as out:
                    out.writelines(_lines(trace))
            else:
                raw.writelines(_lines(trace))
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(aside, 0o666 & ~mask)
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _lines(trace: Trace) -> Iterator[bytes]:
    dump = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=str).encode
    origin = trace.origin
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "tensors": len(trace.tensors), "ops": len(trace.ops)}
    head |= {"meta": dict(trace.meta), "outputs": trace.outputs, "carry": trace.carry}
    if origin is not None:
        head["origin"] = {"base": origin.base, "iterations": origin.iterations}
    yield dump(head).encode() + b"\n"
    t = trace.tensor_columns
    numbers = zip(t.bytes.tolist(), t.role.tolist(), t.layer.tolist(), t.replaces.tolist(), strict=True)
    for i, (size, role, layer, replaces) in enumerate(numbers):
        line: dict[str, Any] = {"tensor": t.name[i], "bytes": size, "role": ROLES[role]}
        if layer >= 0:
            line["layer"] = layer
        for key, sparse in (("shape", t.shape), ("zeros", t.zeros), ("saved_for", t.saved_for)):
            if i in sparse:
                line[key] = sparse[i]
        if t.dtype[i]:
            line["dtype"] = t.dtype[i]
        if replaces >= 0:
            line["replaces"] = replaces
        if origin is not None:
            line["stands_for"] = to_json(origin.tensors[i])
        yield dump(line).encode() + b"\n"
    yield from _op_lines(trace, dump)


def _op_lines(trace: Trace, dump: Any) -> Iterator[bytes]:
    c, origin = trace.op_columns, trace.origin
    defaults = {"layer": -1, "flops": 0, "bytes": -1, "workspace": 0, "device": 0, "priority": 0, "duration": -1}
    columns = [(key, default, getattr(c, key).tolist()) for key, default in defaults.items()]
    kind, phase, random = c.kind.tolist(), c.phase.tolist(), c.random.tolist()
    for i, name in enumerate(c.name):
        line: dict[str, Any] = {"op": name, "kind": KINDS[kind[i]], "phase": PHASES[phase[i]]}
        line["reads"], line["writes"] = trace.reads(i), trace.writes(i)
        for key, default, column in columns:
            if column[i] != default:
                line[key] = column[i]
        if random[i]:
            line["random"] = True
        if c.dtype[i]:
            line["dtype"] = c.dtype[i]
        for key, sparse in (("engine", c.engine), ("group", c.group), ("splits", c.splits)):
            if i in sparse:
                line[key] = sparse[i]
        if i in c.alternatives:
            line["alternatives"] = [[a.name, a.time_factor, a.workspace] for a in c.alternatives[i]]
        if origin is not None:
            line["stands_for"] = to_json(origin.ops[i])
        yield dump(line).encode() + b"\n"


# ---- reading -----------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a trace that `save` or a person wrote. max_bytes: most text to read, after decompression.

    Raises TraceError, one line that names the file and the line in it, on whatever is wrong with what it
    says, and OSError where the file cannot be opened.
    """
    reader = _Reader(str(path))
    with open(path, "rb") as raw:
        plain: IO[bytes] = gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw  # type: ignore[assignment]
        collecting = gc.isenabled()
        gc.disable()  # nothing made here refers to itself, and looking for that takes half the time
        try:
            for text in _read_lines(plain, reader, max_bytes):
                reader.take(text)
            return reader.trace()
        except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
            raise reader.error(f"the compressed data is damaged or cut short ({problem})") from None
        finally:
            if collecting:
                gc.enable()


def _read_lines(file: IO[bytes], reader: _Reader, max_bytes: int) -> Iterator[bytes]:
    total = 0
    while text := file.readline(min(MAX_LINE, max_bytes) + 1):
        reader.line += 1
        total += len(text)
        if len(text) > MAX_LINE:
            raise reader.error(f"the line is longer than {MAX_LINE} bytes")
        if total > max_bytes:
            raise reader.error(f"the file holds more than {max_bytes} bytes")
        yield text


class _Reader:
    """Checks lines one by one and collects what they say."""

    def __init__(self, path: str) -> None:
        self.path, self.line = path, 0
        self.decode = json.JSONDecoder(parse_constant=self._no_constant).decode
        strict = json.JSONDecoder(parse_constant=self._no_constant, object_pairs_hook=self._no_double)
        self.decode_strictly = strict.decode
        self.header: dict[str, Any] | None = None
        self.builder = TraceBuilder()
        self.tensor_ids: dict[str, int] = {}
        self.op_ids: set[str] = set()
        self.tensor_exprs: list[Expr] = []
        self.op_exprs: list[Expr] = []
        self.late: list[tuple[int, Any, int]] = []
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.splits: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.made: set[int] = set()

    def error(self, text: str) -> TraceError:
        return TraceError(f"{self.path}: line {max(self.line, 1)}: {text}")

    def take(self, text: bytes) -> None:
        if text.isspace():
            return
        try:
            row = self.decode(text.decode())
            # as many keys as there are signs of one: none can stand twice; else look again, slowly
            if self.header is None or text.count(b'":') != len(row):
                row = self.decode_strictly(text.decode())
        except RecursionError:
            raise self.error("values are nested too deeply") from None
        except ValueError as problem:
            raise self.error(f"no JSON ({problem})".replace("\n", " ")) from None
        if not isinstance(row, dict):
            raise self.error("a line must be an object, {…}")
        try:
            if self.header is None:
                self._take_header(row)
            elif "tensor" in row:
                self._take_tensor(row)
            elif "op" in row:
                self._take_op(row)
            else:
                raise TraceError("neither a tensor nor an op: the line needs a 'tensor' or an 'op' with its name")
        except TraceError as problem:
            raise self.error(str(problem)) from None
        except RecursionError:
            raise self.error("values are nested too deeply") from None

    def _no_constant(self, word: str) -> Any:
        if self.header is None:  # meta data may say NaN
            return float(word)
        raise ValueError(f"{word} is no number here")

    def _no_double(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} stands twice")
        return row

    # ---- the three kinds of line -------------------------------------------------------------

    def _take_header(self, row: dict[str, Any]) -> None:
        if row.get("format") != FORMAT:
            raise TraceError(f'no trace: the first line must say "format": "{FORMAT}"')
        if row.get("version") != VERSION:
            raise TraceError(f"version {row.get('version')!r} is not known; this program reads version {VERSION}")
        _check_keys(row, _HEADER, "the header", ("format", "version"))
        if "origin" in row:
            origin = row["origin"]
            _check_keys(origin, {"base": _STR, "iterations": _INT}, "the header: origin", ("base",))
            if origin.get("iterations", 1) < 1:
                raise TraceError("the header: origin: iterations must be at least 1")
        self.header = row
        self.builder.meta = row.get("meta", {})

    def _take_tensor(self, row: dict[str, Any]) -> None:
        name = row["tensor"]
        _check_keys(row, _TENSOR, f"tensor {name!r}", ("tensor", "bytes"))
        if name in self.tensor_ids:
            raise TraceError(f"tensor {name!r} stands twice")
        what = f"tensor {name!r}"
        role, shape, replaces = row.get("role", "activation"), row.get("shape"), row.get("replaces")
        if role not in ROLE_CODE:
            raise TraceError(f"{what}: role {role!r} is unknown{near(role, ROLES)}")
        zeros = row.get("zeros")
        if zeros is not None and not 0 <= zeros <= 1:
            raise TraceError(f"{what}: zeros: {zeros} is not {_FRACTION}")
        if shape is not None:
            sizes = tuple(_number(s, what, "shape", 0) for s in shape)
            shape = self.shapes.setdefault(sizes, sizes)
        self.tensor_ids[name] = tensor = self.builder.tensor(
            name,
            _number(row["bytes"], what, "bytes", 0),
            role,
            layer=_number(row.get("layer", -1), what, "layer", -1, 2**31 - 1),
            shape=shape,
            dtype=sys.intern(row.get("dtype", "")),
            zeros=zeros,
            saved_for=sys.intern(row.get("saved_for", "")),
        )
        if replaces is not None:  # it may stand below
            self.late.append((tensor, replaces, self.line))
        self._stands_for(row, self.tensor_exprs, what)

    def _take_op(self, row: dict[str, Any]) -> None:
        name = row["op"]
        what = f"op {name!r}"
        _check_keys(row, _OP, what, ("op",))
        if name in self.op_ids:
            raise TraceError(f"{what} stands twice")
        self.op_ids.add(name)
        kind, phase = row.get("kind", "other"), row.get("phase", "forward")
        if kind not in KIND_CODE:
            raise TraceError(f"{what}: kind {kind!r} is unknown{near(kind, KINDS)}")
        if phase not in PHASE_CODE:
            raise TraceError(f"{what}: phase {phase!r} is unknown{near(phase, PHASES)}")
        splits = self._splits(row["splits"], what) if "splits" in row else ()
        reads = [self._tensor(t, what) for t in row.get("reads", ())]
        writes = [self._tensor(t, what) for t in row.get("writes", ())]
        for t in writes:
            if t in self.made:
                raise TraceError(f"{what}: tensor {self._name(t)!r} has another producer already")
            self.made.add(t)
        bytes, duration = row.get("bytes"), row.get("duration")
        self.builder.op(
            name,
            kind,
            reads=reads,
            writes=writes,
            phase=phase,
            layer=_number(row.get("layer", -1), what, "layer", -1, 2**31 - 1),
            flops=_number(row.get("flops", 0), what, "flops", 0),
            bytes=None if bytes is None else _number(bytes, what, "bytes", 0),
            workspace=_number(row.get("workspace", 0), what, "workspace", 0),
            device=_number(row.get("device", 0), what, "device", 0, 2**16),
            engine=sys.intern(row.get("engine", "")),
            priority=_number(row.get("priority", 0), what, "priority", -(2**31), 2**31 - 1),
            group=row.get("group", ""),
            random=row.get("random", False),
            duration=None if duration is None else _number(duration, what, "duration", 0),
            dtype=sys.intern(row.get("dtype", "")),
            alternatives=[_implementation(a, what) for a in row.get("alternatives", ())],
            splits=splits,
        )
        self._stands_for(row, self.op_exprs, what)

    def _splits(self, ways: list[Any], what: str) -> tuple[str, ...]:
        for way in ways:
            if way not in SPLITS:
                raise TraceError(f"{what}: splits: {way!r} is unknown{near(str(way), SPLITS)}")
        return self.splits.setdefault(tuple(ways), tuple(ways))

    def _stands_for(self, row: dict[str, Any], target: list[Expr], what: str) -> None:
        assert self.header is not None
        if ("stands_for" in row) != ("origin" in self.header):
            missing = "says what it stands for, but the header has no origin"
            raise TraceError(f"{what} {missing if 'stands_for' in row else 'does not say what it stands for'}")
        if "stands_for" in row:
            target.append(from_json(row["stands_for"]))

    def _name(self, tensor: int) -> str:
        return next(name for name, i in self.tensor_ids.items() if i == tensor)

    def _tensor(self, key: Any, what: str) -> int:
        if isinstance(key, str):
            if key not in self.tensor_ids:
                some = list(self.tensor_ids)[-2000:]  # looking for the nearest spelling is slow
                raise TraceError(f"{what}: no tensor {key!r} stands above{near(key, some)}")
            return self.tensor_ids[key]
        if isinstance(key, int) and not isinstance(key, bool):
            if not 0 <= key < len(self.tensor_ids):
                raise TraceError(f"{what}: tensor {key} is out of range 0..{len(self.tensor_ids) - 1}")
            return key
        raise TraceError(f"{what}: {str(key)[:60]!r} is no tensor: give its name or its id")

    # ---- the end -----------------------------------------------------------------------------

    def trace(self) -> Trace:
        if self.header is None:
            raise self.error("the file is empty")
        for key, count in (("tensors", len(self.tensor_ids)), ("ops", len(self.op_ids))):
            if self.header.get(key, count) != count:
                raise self.error(
                    f"{count} {key}, but the header says {self.header[key]}: the file was cut short or edited"
                )
        for tensor, old, line in self.late:
            self.line = line
            try:
                self.builder.take_over(tensor, self._tensor(old, f"tensor {self._name(tensor)!r}: replaces"))
            except TraceError as problem:
                raise self.error(str(problem)) from None
        self.line = 1
        try:
            outputs, carry = self._ends()
            return self.builder.build(outputs=outputs, carry=carry, origin=self._origin())
        except TraceError as problem:
            raise TraceError(f"{self.path}: {problem}") from None

    def _ends(self) -> tuple[list[int] | None, list[tuple[int, int]] | None]:
        assert self.header is not None
        outputs, carry = self.header.get("outputs"), self.header.get("carry")
        if outputs is not None:
            outputs = [self._tensor(t, "outputs") for t in outputs]
        if carry is not None:
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in carry):
                raise TraceError("carry must be a list of pairs: [at the end, at the next start]")
            carry = [(self._tensor(a, "carry"), self._tensor(b, "carry")) for a, b in carry]
        return outputs, carry

    def _origin(self) -> Origin | None:
        assert self.header is not None
        origin = self.header.get("origin")
        if origin is None:
            return None
        iterations = origin.get("iterations", 1)
        for expr in (*self.tensor_exprs, *self.op_exprs):
            if any(leaf.iteration >= iterations for leaf in leaves(expr)):
                raise TraceError(f"origin: an iteration is not below {iterations}")
        return Origin(origin["base"], tuple(self.tensor_exprs), tuple(self.op_exprs), iterations)


# ---- single values -----------------------------------------------------------------------------

_TYPES: dict[str, tuple[type, ...]] = {
    _INT: (int,),
    _STR: (str,),
    _LIST: (list,),
    _BOOL: (bool,),
    _FRACTION: (int, float),
    _OBJECT: (dict,),
    _TENSOR_KEY: (int, str),
    _ORIGIN: (int, list),
}


def _check_keys(row: dict[str, Any], known: dict[str, str], what: str, needed: tuple[str, ...]) -> None:
    for key, value in row.items():
        if key not in known:
            raise TraceError(f"{what}: key {key!r} is unknown{near(key, known)}")
        if type(value) not in _TYPES[known[key]]:  # a bool is no int here
            raise TraceError(f"{what}: {key}: {str(value)[:60]!r} is not {known[key]}")
    for key in needed:
        if key not in row:
            raise TraceError(f"{what}: {key!r} is missing")


def _number(value: Any, what: str, key: str, least: int, most: int = 2**62) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TraceError(f"{what}: {key}: {str(value)[:60]!r} is not {_INT}")
    if not least <= value <= most:
        shown = value if abs(value) < 10**30 else "a number of many digits"
        raise TraceError(f"{what}: {key}: {shown} is out of range {least}..{most}")
    return value


def _implementation(value: Any, what: str) -> Implementation:
    match value:
        case [str(name), int() | float() as factor, int(workspace)] if np.isfinite(factor) and factor > 0:
            return Implementation(name, float(factor), _number(workspace, what, "alternatives", 0))
    raise TraceError(f"{what}: alternatives: {str(value)[:60]!r} is not [name, time factor, workspace]")
