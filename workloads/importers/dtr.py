"""Operator logs of the DTR prototype (the simulator simrd of Kirisame et al., ICLR 2021): one JSON object a line.

Instructions, as simrd's parser reads them: CONSTANT (NAME) with a MEMORY line (NAME, MEMORY bytes) after it; CALL
(NAME, ARGS, RESULT names, TIME) with a MEMORY and an ALIAS line (NAME, ALIAS: which argument a result is a view of,
-1 none) for each result; MUTATE (NAME, ARGS, MUTATE: which arguments, TIME); COPY (DST, SRC: a second name);
COPY_FROM (DST, SRC: the name now means the other tensor); RELEASE (NAME); ANNOTATE (ANNOTATION: START, BACKWARD).
Numbers may be texts. Other instructions are refused there; here they are left out and counted. The unit of TIME is
nowhere stated; it is taken as ns.

What it does not carry: shapes, FLOPs, workspace, what a constant is. What becomes of it: lines up to the first START
are left out, as simrd does (none, where there is no START); a result that is a view is a tensor without bytes
(`Op.views`), which is evicted with its storage and recomputed when it is read; a constant is a weight, there from its
line to the end, made by an op of 0 ns where a call comes before it (where simrd banishes, it goes at its release);
names still held at the end are outputs, in the order in which the names came up; the last release of a storage is a
release point of the op before it, in the log's order; MUTATE makes new tensors of the old ones and lets the names mean
them, as in simrd (the framework writes in place), so that what it makes can be made again. Assumed: a call is backward
from BACKWARD, or from the first call whose name has "backward" in it.
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
"""Instruction, the object, and where it stands."""


def read_dtr(path: str | os.PathLike[str], *, hold: bool = True, max_bytes: int = MAX_BYTES) -> Trace:
    """A trace from a DTR log, whose lines are read one after another.

    hold: a storage stays until the log releases it (a release point, no read). False: it goes after its last reader.
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
    """What a name means: a tensor, and the one in whose storage it lies (itself, if it is no view)."""

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
        self.held: Counter[int] = Counter()  # per tensor how many names mean it
        self.lying: Counter[int] = Counter()  # per storage how many names mean a tensor that lies in it
        self.backward = False
        self.hold = hold
        self.rows: list[dict[str, Any]] = []
        self.constants: dict[int, bool] = {}  # whether it is there before the first call
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
            raise TraceError(f"{where}: {name!r} is there already")

    def _known(self, name: Any, where: str) -> _Value:
        name = texts(name, where)
        if name not in self.meaning:
            raise TraceError(f"{where}: no tensor {name!r} is there{near(name, list(self.meaning)[-500:])}")
        return self.meaning[name]

    def _make(self, name: str, label: str, size: int, role: str, storage: int = -1) -> int:
        """A new tensor, in a storage of its own or in another's, and what a name means from now on."""
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
        """A name does not mean this value any more."""
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
        for place in places:  # the names mean the new values from here on
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
    """The next line, which must be of that kind and about that name."""
    found = next(rows, None)
    if found is None or found[0] != kind or found[1].get("NAME") != name:
        raise TraceError(f"{where}: expected the {kind} of {name!r} after it{' at ' + found[2] if found else ''}")
    return found


def _memory(row: Row) -> int:
    return _number(row[1].get("MEMORY"), f"{row[2]}: MEMORY")


def _list(row: dict[str, Any], key: str, where: str) -> list[Any]:
    return list(need(row.get(key), list, f"{where}: {key}"))


def _number(value: Any, where: str, least: int = 0) -> int:
    """A whole number, or a text of one."""
    if isinstance(value, str) and len(value) < 25 and value.lstrip("-").isdigit():
        value = int(value)
    return whole(value, where, least)
