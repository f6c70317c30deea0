"""Operator logs of the DTR prototype (the simulator simrd of Kirisame et al., ICLR 2021): a JSON object per line.

Instructions, as simrd's parser reads them: CONSTANT (NAME), followed by a MEMORY line (NAME, MEMORY in bytes); CALL
(NAME, ARGS, RESULT names, TIME), followed by a MEMORY and an ALIAS line for each result (NAME, ALIAS: the argument that
it is a view of, -1 for none); MUTATE (NAME, ARGS, MUTATE: arguments that it changes, TIME); COPY (DST, SRC: a second
name); COPY_FROM (DST, SRC: the name now refers to that tensor); RELEASE (NAME); ANNOTATE (ANNOTATION: START,
BACKWARD). Numbers may be text. simrd refuses other instructions; here they are left out and counted. The unit of TIME
is not documented; it is read as ns. The format lacks shapes, FLOPs, workspace, and the role of constants.

Import: lines up to the first START, if there is one, are left out, as by simrd. A result that is a view becomes a
tensor without bytes (`Op.views`), which is evicted with its storage and recomputed when it is read. A constant becomes
a weight that exists from its line to the end, produced by an op of 0 ns if a call precedes it (when simrd banishes, it
is freed at its release). Names that are held at the end are outputs, in the order of their first lines. The last
release of a storage is a release point of the preceding op, in the log's order. MUTATE produces new tensors and lets
the names refer to them, as in simrd (the framework writes in place), so that its results can be recomputed.

Assumption: a call is backward from BACKWARD on, or from the first call whose name contains "backward".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

from sim.errors import TraceError, near
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads.importers.aten import kind_of
from workloads.importers.optrace import RANDOM
from workloads.importers.reading import MAX_BYTES, need, open_unpacked, parse_json, read_lines, texts, whole

INSTRUCTIONS = ("CONSTANT", "MEMORY", "ALIAS", "CALL", "MUTATE", "COPY", "COPY_FROM", "RELEASE", "ANNOTATE")

Row = tuple[str, dict[str, Any], str]
"""Instruction, the whole object, and its line."""


def read_dtr(path: str | os.PathLike[str], *, hold: bool = True, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a trace from a DTR log, which is streamed.

    path: the file, plain or gzipped.
    hold: keep a storage until the log releases it (a release point, which is not a read); False: release it after its
        last reader.
    max_bytes: the most bytes to read, after unpacking.

    Raises TraceError naming the file and the line.
    """
    with open_unpacked(path) as file:
        try:
            start = -1  # the log is read twice, since its first lines count if no START follows
            for i, (kind, row, _) in enumerate(_rows(file, max_bytes)):
                if _annotation(kind, row) == "START":
                    start = i
                    break
            file.seek(0)
            rows = islice(_rows(file, max_bytes), start + 1, None)
            return _Reader(str(path), hold, start + 1).trace(rows)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
        except (TypeError, ValueError, OverflowError, KeyError, IndexError) as error:
            raise TraceError(f"{path}: malformed: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class _Value:
    """What a name refers to: a tensor, and the tensor whose storage it shares (itself, unless it is a view)."""

    tensor: int
    storage: int


class _Reader:
    def __init__(self, path: str, hold: bool, before: int) -> None:
        self.left_out: Counter[str] = Counter({"lines before START": before})
        self.meta: dict[str, Any] = {
            "model": "imported",
            "source": f"import of {os.path.basename(path)}",
            "format": "dtr",
        }
        self.builder = TraceBuilder(self.meta)
        self.meaning: dict[str, _Value] = {}
        self.last_meaning: dict[str, _Value] = {}  # of every name, released or not, in the order of their first lines
        self.held: Counter[int] = Counter()  # number of names that refer to each tensor
        self.lying: Counter[int] = Counter()  # number of names that refer to a tensor in each storage
        self.backward = False
        self.hold = hold
        self.rows: list[dict[str, Any]] = []
        self.constants: dict[int, bool] = {}  # whether it exists before the first call
        self.names: Counter[str] = Counter()

    def trace(self, rows: Iterator[Row]) -> Trace:
        """The trace of the lines after START."""
        self._walk(rows)
        self._add_ops()
        kept = [value for value in dict.fromkeys(self.last_meaning.values()) if self.held[value.tensor] > 0]
        outputs = dict.fromkeys(tensor for value in kept for tensor in (value.tensor, value.storage))
        carry = [(tensor, tensor) for tensor, first in self.constants.items() if first and tensor in outputs]
        outputs |= dict.fromkeys(tensor for tensor, first in self.constants.items() if not first)
        self.meta["left_out"] = {key: count for key, count in sorted(self.left_out.items()) if count}
        self.meta["assumed"] = {"constants taken as weights": len(self.constants), "hold": self.hold}
        return self.builder.build(outputs=list(outputs), carry=carry)

    def _walk(self, rows: Iterator[Row]) -> None:
        for kind, row, where in rows:
            if kind == "CONSTANT":
                name = texts(row.get("NAME"), f"{where}: NAME")
                self._unknown(name, where)
                size = _memory(_expect(rows, "MEMORY", name, where))
                constant = self._make(name, name, size, "weight")
                self.constants[constant] = not self.rows
                if self.rows:  # it takes its space at its line, and keeps it
                    self._op("constant", self._phase(""), 0, [], [constant])
            elif kind == "CALL":
                self._call(row, rows, where)
            elif kind == "MUTATE":
                self._mutate(row, where)
            elif kind in ("COPY", "COPY_FROM"):
                source = self._known(row.get("SRC"), f"{where}: SRC")
                target = texts(row.get("DST"), f"{where}: DST")
                if kind == "COPY_FROM":
                    self._known(target, f"{where}: DST")
                old = self.meaning.get(target)
                self._mean(target, source)
                self._let_go(old)
            elif kind == "RELEASE":
                old = self.meaning.pop(texts(row.get("NAME"), f"{where}: NAME"), None)
                self.left_out["releases of unknown names"] += old is None
                self._let_go(old)
            elif kind == "ANNOTATE":
                self.backward = self.backward or _annotation(kind, row) == "BACKWARD"
            elif kind in ("MEMORY", "ALIAS"):
                raise TraceError(f"{where}: {kind} does not follow its CONSTANT or CALL")
            else:
                self.left_out[f"{kind[:40]} lines"] += 1

    # ---- names -------------------------------------------------------------------------------------

    def _unknown(self, name: str, where: str) -> None:
        if name in self.meaning:
            raise TraceError(f"{where}: {name!r} exists already")

    def _known(self, name: Any, where: str) -> _Value:
        name = texts(name, where)
        if name not in self.meaning:
            raise TraceError(f"{where}: there is no tensor {name!r}{near(name, list(self.meaning)[-500:])}")
        return self.meaning[name]

    def _make(self, name: str, label: str, size: int, role: str, storage: int = -1) -> int:
        """Create a tensor, in its own storage or in another's, and let a name refer to it from now on."""
        self.names[label] += 1  # a name may be used again after its release
        unique = label if self.names[label] == 1 else f"{label}#{self.names[label]}"
        tensor = self.builder.tensor(unique, size, role)
        self._mean(name, _Value(tensor, tensor if storage < 0 else storage))
        return tensor

    def _mean(self, name: str, value: _Value) -> None:
        self.meaning[name] = self.last_meaning[name] = value
        self.held[value.tensor] += 1
        self.lying[value.storage] += 1

    def _let_go(self, value: _Value | None) -> None:
        """A name no longer refers to this value."""
        if value is None:
            return
        self.held[value.tensor] -= 1
        self.lying[value.storage] -= 1
        if not self.lying[value.storage] and self.hold and self.rows and value.storage not in self.constants:
            self.rows[-1]["releases"].append(value.storage)

    # ---- ops ---------------------------------------------------------------------------------------

    def _call(self, row: dict[str, Any], rows: Iterator[Row], where: str) -> None:
        name = texts(row.get("NAME"), f"{where}: NAME")
        args = [self._known(arg, f"{where}: ARGS") for arg in _list(row, "ARGS", where)]
        results = [texts(result, f"{where}: RESULT") for result in _list(row, "RESULT", where)]
        time = _number(row.get("TIME"), f"{where}: TIME")
        phase = self._phase(name)
        role = "activation" if phase == "forward" else "temporary"
        made: list[int] = []
        views: list[int] = []
        for result in results:
            size = _memory(_expect(rows, "MEMORY", result, where))
            _, alias, at = _expect(rows, "ALIAS", result, where)
            argument = _number(alias.get("ALIAS"), f"{at}: ALIAS", -1)
            if argument >= len(args):
                raise TraceError(f"{at}: ALIAS {argument}, but the call has {len(args)} arguments")
            self._unknown(result, at)
            if argument >= 0:
                made.append(self._make(result, result, 0, role, args[argument].storage))
            else:
                made.append(self._make(result, result, size, role))
            views.append(argument)
        self._op(name, phase, time, args, made, views)

    def _mutate(self, row: dict[str, Any], where: str) -> None:
        name = texts(row.get("NAME"), f"{where}: NAME")
        args = [self._known(arg, f"{where}: ARGS") for arg in _list(row, "ARGS", where)]
        places = [_number(place, f"{where}: MUTATE") for place in _list(row, "MUTATE", where)]
        if any(place >= len(args) for place in places):
            raise TraceError(f"{where}: MUTATE {max(places)}, but there are {len(args)} arguments")
        phase = self._phase(name)
        role = "activation" if phase == "forward" else "temporary"
        time = _number(row.get("TIME"), f"{where}: TIME")
        names, made = row["ARGS"], []
        olds = []
        for place in places:  # the names refer to the new values from here on
            olds.append(self.meaning.pop(names[place]))
            size = self.builder.bytes_of(args[place].storage)
            made.append(self._make(names[place], f"{names[place]}$", size, role))
        self._op(name, phase, time, args, made)
        for old in olds:
            self._let_go(old)

    def _phase(self, name: str) -> str:
        self.backward = self.backward or "backward" in name
        return "backward" if self.backward else "forward"

    def _op(
        self, name: str, phase: str, time: int, args: list[_Value], made: list[int], views: Sequence[int] = ()
    ) -> None:
        """views: per result the argument that it is a view of, -1 for none."""
        reads: list[int] = []
        places = []  # per argument where its storage stands in the reads
        for value in args:
            reads += dict.fromkeys((value.tensor, value.storage))
            places.append(len(reads) - 1)
        row: dict[str, Any] = {"name": name, "kind": kind_of(name if "::" in name else f"aten::{name}", phase)}
        row |= {"phase": phase, "duration": time, "reads": reads, "writes": made, "releases": []}
        self.rows.append(row | {"views": [places[argument] if argument >= 0 else -1 for argument in views]})

    def _add_ops(self) -> None:
        """Only now is it known what was released right after each op."""
        for i, row in enumerate(self.rows):
            name = row.pop("name")
            self.builder.op(f"{i}.{name}", row.pop("kind"), random=bool(RANDOM.search(name)), **row)


# ---- lines -------------------------------------------------------------------------------------------


def _rows(file: BinaryIO, max_bytes: int) -> Iterator[Row]:
    for number, line in enumerate(read_lines(file, max_bytes), 1):
        if line.strip():
            where = f"line {number}"
            row = need(parse_json(line, where, max_bytes), dict, where)
            yield texts(row.get("INSTRUCTION"), f"{where}: INSTRUCTION"), row, where


def _annotation(kind: str, row: dict[str, Any]) -> str:
    value = row.get("ANNOTATION")
    return value if kind == "ANNOTATE" and isinstance(value, str) else ""


def _expect(rows: Iterator[Row], kind: str, name: str, where: str) -> Row:
    """The next line, which must be of this kind and about this name."""
    row = next(rows, None)
    if row is None or row[0] != kind or row[1].get("NAME") != name:
        raise TraceError(f"{where}: expected the {kind} of {name!r} after it{' at ' + row[2] if row else ''}")
    return row


def _memory(row: Row) -> int:
    return _number(row[1].get("MEMORY"), f"{row[2]}: MEMORY")


def _list(row: dict[str, Any], key: str, where: str) -> list[Any]:
    return list(need(row.get(key), list, f"{where}: {key}"))


def _number(value: Any, where: str, least: int = 0) -> int:
    """A whole number, also as text."""
    if isinstance(value, str) and len(value) < 25 and value.lstrip("-").isdigit():
        value = int(value)
    return whole(value, where, least)
