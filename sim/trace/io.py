"""Traces as files: one JSON object per line, `.jsonl` or `.jsonl.gz`.

The first line is the header; then there is one line per tensor and one per op, in order of their ids. The tensors
that an op names must precede it. A file can be written by hand: whatever has a default may be left out, and tensors
are given by name or by id, which is their position among the tensor lines.

    {"format": "tiersim trace", "version": 1, "meta": {"model": "toy"}}
    {"tensor": "x", "bytes": 8, "role": "input"}
    {"tensor": "y", "bytes": 8}
    {"op": "double", "kind": "elementwise", "reads": ["x"], "writes": ["y"], "flops": 2}

The `releases` of an op are the tensors that the program holds beyond their last reader and releases when the op ends,
its `unbinds` those that only autograd holds from then on.

Header: `format`, `version`; optionally `meta`, `outputs`, `carry` (pairs), `tensors` and `ops` (their counts, so that
a truncated file is noticed), and `origin` (`base`, `iterations`). The other keys are the fields of `Tensor` and `Op`,
and `stands_for` where the header has an origin. Nothing in a file is executed, and sizes are checked before memory is
allocated.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from sim.arguments import explained
from sim.collecting import uncollected
from sim.errors import TraceError, near
from sim.regular_files import check_replaceable
from sim.trace.graph import Trace
from sim.trace.io_columns import Content, Table, take_columns
from sim.trace.io_scan import scan
from sim.trace.op import KINDS, PHASES, SPLITS, Implementation, Ring
from sim.trace.origin import Expr, Origin, from_json, leaves, to_json
from sim.trace.tensor import AXES, ROLES

FORMAT, VERSION = "tiersim trace", 1
MAX_BYTES = 4 << 30
"""The most bytes of text that `load` reads from a file, after decompression."""
MAX_LINE = 64 << 20
"""The longest line in bytes; a header with a million outputs is about 10 MB."""

BATCH = 1 << 18
"""Bytes of lines that are read together, up to the end of the last one."""

_Rule = tuple[type, int, int]
_ANY_OF = {int: "a whole number", str: "a text", list: "a list", dict: "an object", bool: "true or false"}
_TEXT: _Rule = (str, 0, 0)
_LIST: _Rule = (list, 0, 0)
_OBJECT: _Rule = (dict, 0, 0)
_EITHER: _Rule = (object, 0, 0)  # checked where it is used
_SIZE: _Rule = (int, 0, 2**62)
_LAYER: _Rule = (int, -1, 2**31 - 1)
_HEADER = {
    **dict.fromkeys(("tensors", "ops"), _SIZE),
    **dict.fromkeys(("outputs", "carry"), _LIST),
    **dict.fromkeys(("meta", "origin"), _OBJECT),
    "format": _TEXT,
    "version": _SIZE,
}
_ORIGIN = {
    "base": _TEXT,
    **dict.fromkeys(("iterations", "ranks", "tensor", "experts", "context", "group"), (int, 1, 2**31 - 1)),
    **dict.fromkeys(("dealt", "steps"), (bool, 0, 1)),
}
_TENSOR = {
    **dict.fromkeys(("tensor", "role", "dtype", "saved_for"), _TEXT),
    **dict.fromkeys(("zeros", "replaces", "stands_for"), _EITHER),
    "bytes": _SIZE,
    "layer": _LAYER,
    **dict.fromkeys(("shape", "axes"), _LIST),
}
_OP = {
    **dict.fromkeys(("op", "kind", "phase", "engine", "group", "dtype", "function"), _TEXT),
    **dict.fromkeys(("flops", "counted", "bytes", "workspace", "duration"), _SIZE),
    **dict.fromkeys(("reads", "writes", "alternatives", "splits", "releases", "unbinds", "views", "ring"), _LIST),
    "layer": _LAYER,
    "device": (int, 0, 2**16),
    "priority": (int, -(2**31), 2**31 - 1),
    "random": (bool, 0, 1),
    "stands_for": _EITHER,
}


# ---- writing -----------------------------------------------------------------------------------


@explained
def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a file; the file appears complete or not at all.

    The same trace gives the same bytes. Missing folders are created.

    trace: what to write.
    path: compressed if it ends in `.gz`.

    Raises OSError, which names `path`, where it cannot be written.
    """
    target = Path(path)
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_and_rename(trace, target)
    except OSError as error:  # it names the temporary file, which the caller does not know
        raise OSError(error.errno, error.strerror, str(target)) from error


def _write_and_rename(trace: Trace, target: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
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
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _lines(trace: Trace) -> Iterator[bytes]:
    dump = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=str).encode
    origin = trace.origin
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "tensors": len(trace.tensors), "ops": len(trace.ops)}
    head |= {"meta": dict(trace.meta), "outputs": trace.outputs, "carry": trace.carry}
    if origin is not None:
        head["origin"] = {"base": origin.base, "iterations": origin.iterations}
        if origin.ranks > 1:
            head["origin"] |= {"ranks": origin.ranks, "dealt": origin.dealt}
        if origin.tensor > 1:
            head["origin"]["tensor"] = origin.tensor
        if origin.experts > 1:
            head["origin"]["experts"] = origin.experts
        if origin.context > 1:
            head["origin"]["context"] = origin.context
        if origin.group > 1:
            head["origin"]["group"] = origin.group
        if origin.steps:
            head["origin"]["steps"] = True
    yield dump(head).encode() + b"\n"
    t = trace.tensor_columns
    numbers = zip(t.bytes.tolist(), t.role.tolist(), t.layer.tolist(), t.replaces.tolist(), strict=True)
    for i, (size, role, layer, replaces) in enumerate(numbers):
        line: dict[str, Any] = {"tensor": t.name[i], "bytes": size, "role": ROLES[role]}
        if layer >= 0:
            line["layer"] = layer
        for key, sparse in (("shape", t.shape), ("axes", t.axes), ("zeros", t.zeros), ("saved_for", t.saved_for)):
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
        for key, sparse in (
            ("engine", c.engine),
            ("group", c.group),
            ("splits", c.splits),
            ("releases", c.releases),
            ("views", c.views),
            ("function", c.function),
            ("ring", c.ring),
            ("counted", c.counted),
            ("unbinds", c.unbinds),
        ):
            if i in sparse:
                line[key] = sparse[i]
        if i in c.alternatives:
            line["alternatives"] = [[a.name, a.time_factor, a.workspace] for a in c.alternatives[i]]
        if origin is not None:
            line["stands_for"] = to_json(origin.ops[i])
        yield dump(line).encode() + b"\n"


# ---- reading -----------------------------------------------------------------------------------


@explained
def load(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a trace from a file, written by `save` or by hand.

    path: decompressed if it ends in `.gz`.
    max_bytes: the most bytes of text to read, after decompression.

    Raises TraceError, one line that names the file and the faulty line, for any mistake in its content and for what is
    not a regular file, and OSError where the file cannot be opened.
    """
    check_regular(path)
    reader = _Reader(str(path))
    with open(path, "rb") as raw:
        plain: IO[bytes] = gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw  # type: ignore[assignment]
        try:
            with uncollected():  # a search for cycles, of which there are none, would take half the time
                for block in _read_blocks(plain, reader, max_bytes):
                    reader.take(block)
                return reader.trace()
        except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
            raise reader.error(f"the compressed data is damaged or truncated ({problem})") from None


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise TraceError for a path that no file has, a folder, a device or a pipe, whose reader might wait for ever.

    A file that does not exist is not an error here: opening it says so.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    except ValueError as error:  # a name with a zero byte
        raise TraceError(f"{str(path)!r}: cannot be opened: {error}") from None
    if not stat.S_ISREG(mode):
        raise TraceError(f"{path}: is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}")


def _read_blocks(file: IO[bytes], reader: _Reader, max_bytes: int) -> Iterator[bytes]:
    """The header, then the other lines in blocks; no line is longer than `MAX_LINE`, and the last may lack its end."""
    longest = min(MAX_LINE, max_bytes) + 1
    total, block = 0, file.readline(longest)
    while block:
        if total + len(block) > max_bytes or len(block) > MAX_LINE:
            _check_lengths(BytesIO(block), reader, max_bytes, total)
        total += len(block)
        if block.isspace():  # gigabytes of it pack into a few megabytes
            reader.content.line += block.count(b"\n")
        else:
            yield block
        block = file.read(min(BATCH, longest))
        if block and not block.endswith(b"\n"):
            block += file.readline(longest)


def _check_lengths(lines: IO[bytes], reader: _Reader, max_bytes: int, total: int) -> None:
    """Raise TraceError for a line that is too long, or with which the file holds too much."""
    for number, line in enumerate(lines, 1):
        total += len(line)
        if len(line) > MAX_LINE or total > max_bytes:
            reader.content.line += number
            is_long = f"the line is longer than {MAX_LINE}" if len(line) > MAX_LINE else ""
            raise reader.error(f"{is_long or f'the file holds more than {max_bytes}'} bytes")


def _is_plain(block: bytes) -> bool:
    """Whether every line begins and ends as an object does."""
    return block.startswith(b"{") and block.endswith(b"}\n") and block.count(b"}\n{") == block.count(b"\n") - 1


class _Reader:
    """Checks lines one by one and collects their content."""

    def __init__(self, path: str) -> None:
        self.path, self.content = path, Content()
        self.decode = json.JSONDecoder(parse_constant=self._no_constant).decode
        strict = json.JSONDecoder(parse_constant=self._no_constant, object_pairs_hook=self._no_duplicate)
        self.decode_strictly = strict.decode
        self.header: dict[str, Any] | None = None
        self.has_origin, self.subject = False, ""
        self.tensor_exprs: list[Expr] = []
        self.op_exprs: list[Expr] = []

    def error(self, text: str) -> TraceError:
        return TraceError(f"{self.path}: line {max(self.content.line, 1)}: {text}")

    def take(self, block: bytes) -> None:
        """Read a block of lines."""
        plain = scan(block, self.decode) if _is_plain(block) and self.header and not self.has_origin else None
        if plain is not None and take_columns(self.content, plain):
            self.content.line += plain.lines
            return
        rows = self._parse_all(block)
        if rows is None or self.has_origin:
            self._take_one_by_one(rows or map(self._parse, BytesIO(block)))
            return
        first_op = next((i for i, row in enumerate(rows) if "op" in row), len(rows))
        for part in (rows[:first_op], rows[first_op:]):
            if part and take_columns(self.content, Table(part)):
                self.content.line += len(part)
            else:
                self._take_one_by_one(part)

    def _take_one_by_one(self, rows: Iterable[dict[str, Any] | None]) -> None:
        for row in rows:
            self.content.line += 1
            if row is None:
                continue
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
                which = next((f"{key} {row[key]!r}: " for key in ("tensor", "op") if key in row), self.subject)
                raise self.error(f"{which}{problem}") from None
            except RecursionError:
                raise self.error("values are nested too deeply") from None

    def _parse_all(self, block: bytes) -> list[dict[str, Any]] | None:
        """The content of plain lines, parsed together; None where any line needs to be parsed on its own."""
        if self.header is None or not _is_plain(block):
            return None
        try:
            rows = self.decode((b"[" + block[:-1].replace(b"\n", b",") + b"]").decode())
        except (ValueError, RecursionError):
            return None
        # as many keys as key delimiters: no line has a duplicate key
        if any(blank in block for blank in (b'" ', b'"\t', b'"\r')):  # a delimiter may be written otherwise
            return None
        if len(rows) != block.count(b"\n") or block.count(b'":') != sum(map(len, rows)):
            return None
        return rows  # type: ignore[no-any-return]

    def _parse(self, text: bytes) -> dict[str, Any] | None:
        """The content of one line; None for an empty one."""
        if text.isspace():
            return None
        self.content.line += 1  # an error here concerns the line that is not counted yet
        try:
            row = self.decode_strictly(text.decode())
        except RecursionError:
            raise self.error("values are nested too deeply") from None
        except ValueError as problem:
            raise self.error(f"not JSON ({problem})".replace("\n", " ")) from None
        if not isinstance(row, dict):
            raise self.error("a line must be an object, {…}")
        self.content.line -= 1
        return row

    def _no_constant(self, word: str) -> Any:
        if self.header is None:  # metadata may contain NaN
            return float(word)
        raise ValueError(f"{word} is not a number here")

    def _no_duplicate(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} appears twice")
        return row

    # ---- the three kinds of line -------------------------------------------------------------

    def _take_header(self, row: dict[str, Any]) -> None:
        if row.get("format") != FORMAT:
            raise TraceError(f'not a trace: the first line must contain "format": "{FORMAT}"')
        if row.get("version") != VERSION:
            raise TraceError(f"version {row.get('version')!r} is not known; this program reads version {VERSION}")
        _check(row, _HEADER, ("format", "version"))
        if "origin" in row:
            _check(row["origin"], _ORIGIN, ("base",))
        self.header, self.has_origin = row, "origin" in row
        self.content.builder.meta = row.get("meta", {})

    def _take_tensor(self, row: dict[str, Any]) -> None:
        _check(row, _TENSOR, ("bytes",))
        name = row.pop("tensor")
        self.subject = f"tensor {name!r}: "
        if name in self.content.tensor_ids:
            raise TraceError("it is defined twice")
        self._stands_for(row, self.tensor_exprs)
        self._share(row, ("dtype", "saved_for", "role"))
        if "shape" in row:
            row["shape"] = self._shape(tuple(row["shape"]))
        if "axes" in row:
            row["axes"] = self._axes(tuple(row["axes"]), row.get("shape", ()))
        if "zeros" in row:
            zeros = row["zeros"]
            if type(zeros) not in (int, float) or not 0 <= zeros <= 1:
                raise TraceError(f"zeros: {_shown(zeros)!r} is not a number from 0 to 1")
        replaces = row.pop("replaces", None)
        self.content.tensor_ids[name] = tensor = self.content.builder.tensor(name, **row)
        self.content.produced.append(0)
        if replaces is not None:  # that tensor may be defined further down
            self.content.deferred.append((tensor, replaces, self.content.line))

    def _take_op(self, row: dict[str, Any]) -> None:
        _check(row, _OP, ())
        name = row.pop("op")
        self.subject = f"op {name!r}: "
        if name in self.content.op_ids:
            raise TraceError("it is defined twice")
        self.content.op_ids.add(name)
        self._stands_for(row, self.op_exprs)
        self._share(row, ("dtype", "engine", "kind", "phase", "function"))
        if "splits" in row:
            row["splits"] = self._splits(row["splits"])
        if "alternatives" in row:
            row["alternatives"] = [_implementation(a) for a in row["alternatives"]]
        for key in ("reads", "writes", "releases", "unbinds"):
            if key in row:
                row[key] = [self._tensor(t) for t in row[key]]
        if "ring" in row:
            if len(row["ring"]) != len(Ring._fields):
                raise TraceError(f"ring: {_shown(row['ring'])} is not an axis, a number of ranks and one of passes")
            row["ring"] = Ring(*row["ring"])
        for place in row.get("views", ()):
            if type(place) is not int:
                raise TraceError(f"views: {_shown(place)!r} is not a position in its reads")
        for t in row.get("writes", ()):
            if self.content.produced[t]:
                raise TraceError(f"tensor {self._name(t)!r} already has a producer")
            self.content.produced[t] = 1
        self.content.builder.op(name, **row)

    def _share(self, row: dict[str, Any], keys: tuple[str, ...]) -> None:
        """Share one object for each of the few texts that occur in a million lines."""
        for key in keys:
            if key in row:
                row[key] = self.content.texts.setdefault(row[key], row[key])

    def _shape(self, sizes: tuple[Any, ...]) -> tuple[int, ...]:
        for size in sizes:
            if type(size) is not int or not 0 <= size <= 2**62:
                raise TraceError(f"shape: {_shown(size)!r} is not a whole number from 0 to {2**62}")
        return self.content.shapes.setdefault(sizes, sizes)

    def _axes(self, names: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in ("", *AXES):
                raise TraceError(f"axes: {_shown(name)!r} is unknown{near(str(name), AXES)}")
        if len(names) != len(shape):
            raise TraceError(f"axes: {len(names)} names for the {len(shape)} axes of its shape")
        return self.content.axes.setdefault(names, names)

    def _splits(self, ways: list[Any]) -> tuple[str, ...]:
        for way in ways:
            if way not in SPLITS:
                raise TraceError(f"splits: {_shown(way)!r} is unknown{near(str(way), SPLITS)}")
        return self.content.splits.setdefault(tuple(ways), tuple(ways))

    def _stands_for(self, row: dict[str, Any], target: list[Expr]) -> None:
        if ("stands_for" in row) != self.has_origin:
            unexpected = "has `stands_for`, but the header has no origin"
            raise TraceError("`stands_for` is missing" if self.has_origin else unexpected)
        if self.has_origin:
            target.append(from_json(row.pop("stands_for")))

    def _name(self, tensor: int) -> str:
        return next(name for name, i in self.content.tensor_ids.items() if i == tensor)

    def _tensor(self, key: Any) -> int:
        if type(key) is int:
            if not 0 <= key < len(self.content.tensor_ids):
                raise TraceError(f"tensor {_shown(key)} is out of range 0..{len(self.content.tensor_ids) - 1}")
            return key
        if type(key) is str:
            if key not in self.content.tensor_ids:
                recent = list(self.content.tensor_ids)[-2000:]  # a search for the nearest name is slow
                raise TraceError(f"no tensor {key!r} precedes this line{near(key, recent)}")
            return self.content.tensor_ids[key]
        raise TraceError(f"{_shown(key)!r} is not a tensor: give its name or its id")

    # ---- the end -----------------------------------------------------------------------------

    def trace(self) -> Trace:
        if self.header is None:
            raise self.error("the file is empty")
        for key, count in (("tensors", len(self.content.tensor_ids)), ("ops", len(self.content.op_ids))):
            if self.header.get(key, count) != count:
                raise self.error(
                    f"{count} {key}, but the header says {self.header[key]}: the file was truncated or edited"
                )
        for tensor, old, line in self.content.deferred:
            self.content.line = line
            try:
                self.content.builder.take_over(tensor, self._tensor(old))
            except TraceError as problem:
                raise self.error(f"tensor {self._name(tensor)!r}: replaces: {problem}") from None
        self.content.line = 1
        try:
            (outputs, carry), origin = self._ends(), self._origin()
            builder, self.content = self.content.builder, Content(line=1)  # what is known by name takes much memory
            return builder.build(outputs=outputs, carry=carry, origin=origin)
        except TraceError as problem:
            raise self.error(str(problem)) from None

    def _ends(self) -> tuple[list[int] | None, list[tuple[int, int]] | None]:
        assert self.header is not None
        outputs, carry = self.header.get("outputs"), self.header.get("carry")
        if outputs is not None:
            outputs = [self._tensor(t) for t in outputs]
        if carry is not None:
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in carry):
                raise TraceError("carry must be a list of pairs: [at the end, at the next start]")
            carry = [(self._tensor(a), self._tensor(b)) for a, b in carry]
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
        ranks, dealt, tensor = origin.get("ranks", 1), origin.get("dealt", False), origin.get("tensor", 1)
        exprs = tuple(self.tensor_exprs), tuple(self.op_exprs)
        steps, experts = origin.get("steps", False), origin.get("experts", 1)
        if ranks % experts:
            raise TraceError(f"origin: {ranks} ranks are no multiple of {experts} that divide the experts")
        context, group = origin.get("context", 1), origin.get("group", 1)
        if ranks % group:
            raise TraceError(f"origin: {ranks} ranks are no multiple of {group} that keep weights together")
        return Origin(origin["base"], *exprs, iterations, ranks, dealt, tensor, steps, experts, context, group)


# ---- single values -----------------------------------------------------------------------------


def _check(row: dict[str, Any], rules: dict[str, _Rule], needed: tuple[str, ...]) -> None:
    """Raise TraceError for an unknown key, a value of the wrong type or out of range, or a missing key."""
    for key, value in row.items():
        rule = rules.get(key)
        if rule is None:
            raise TraceError(f"key {key!r} is unknown{near(key, rules)}")
        kind, least, most = rule
        if type(value) is not kind and kind is not object:  # a bool is not an int here
            raise TraceError(f"{key}: {_shown(value)!r} is not {_ANY_OF[kind]}")
        if kind is int and not least <= value <= most:
            raise TraceError(f"{key}: {_shown(value)} is out of range {least}..{most}")
    for key in needed:
        if key not in row:
            raise TraceError(f"{key!r} is missing")


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of many digits"
    return str(value)[:60]


def _implementation(value: Any) -> Implementation:
    match value:
        case [str(name), int() | float() as factor, int(workspace)] if 0 < factor < 1e9 and 0 <= workspace < 2**62:
            return Implementation(name, float(factor), workspace)
    raise TraceError(f"alternatives: {_shown(value)!r} is not [name, time factor, workspace]")
