"""Commands under faults of the disk, and what must hold afterwards.

A fault befalls one event of one command. Then: the command has ended, with an answer or with one line; every cell that
it has finished is there, once, with the right row; and the command that goes on (`--resume` of a sweep, else the same
one) leaves exactly what it leaves on a disk without faults.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest import mock

from sim.sweeps.store import Store, StoreError, Writer, is_answer, read_segment
from tests.injection.disk import BACK_S, FAULTS, Disk, snapshot, watched

TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64}
STUDY = """
model = ["{model}"]
batch = [{batches}]
sequence = [16]
precision = "fp32"
profile = ["mt3000_survey"]
policy = ["keep_all", "dtr"]
budget = ["all", "90%"]
timeline = {{ policy = "dtr", batch = 1, budget = "all" }}
"""
JOB = ("--profile", "mt3000_survey", "--batch", "1", "--seq", "16", "--precision", "fp32")


NOTES = ("run one sweep at a time", "from what was saved", "not repeated")
"""Lines that commands say while they go on."""


class Lost(AssertionError):
    """A fault did harm."""


@dataclass(frozen=True)
class Answer:
    """How a command ended: its exit status, and what it printed."""

    status: int
    out: str
    err: str


def run(words: Sequence[str]) -> Answer:
    """Run a command of tiersim in this process."""
    from sim.cli import main

    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", ["tiersim", *words]),
        warnings.catch_warnings(),
    ):
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
    return Answer(status, out.getvalue(), err.getvalue())


@dataclass
class Bench:
    """Right results to start from, made once, and a place for one case at a time.

    base: an empty folder. Each case runs in `base/now`, which alone is watched, with the same paths.
    """

    base: Path
    _right: dict[str, Mapping[str, bytes]] = field(default_factory=dict)

    @property
    def now(self) -> Path:
        """The folder of the case."""
        return self.base / "now"

    @cached_property
    def studies(self) -> tuple[str, str]:
        """Files of a study of four cells, and of one of eight that has these."""
        model = self.base / "tiny.json"
        model.write_text(json.dumps(TINY))
        paths = self.base / "study.toml", self.base / "more.toml"
        for path, batches in zip(paths, ("1", "1, 2"), strict=True):
            path.write_text(STUDY.format(model=model, batches=batches))
        return str(paths[0]), str(paths[1])

    @cached_property
    def done(self) -> Path:
        """The folder of a finished sweep of four cells."""
        folder = self.base / "done"
        assert run(["sweep", self.studies[0], "-o", str(folder), "--jobs", "1"]).status == 0
        return folder

    def words(self, name: str) -> list[str]:
        """The command of that name."""
        out, model = str(self.now / "out"), str(self.base / "tiny.json")
        return {
            "sweep": ["sweep", self.studies[0], "-o", out, "--jobs", "1"],
            "resume": ["sweep", self.studies[1], "-o", out, "--jobs", "1", "--resume"],
            "export": ["results", "export", out, "--csv", str(self.now / "table.csv")],
            "report": ["report", out, "-o", str(self.now / "page.html")],
            "run": ["run", "--model", model, *JOB, "--policy", "dtr", "-o", str(self.now / "one")],
            "compare": ["compare", "--model", model, *JOB, "--policies", "keep_all,dtr", "-o", str(self.now / "two"),
                        "--jobs", "1", "--no-bound"],
        }[name]  # fmt: skip

    def prepare(self, name: str) -> None:
        """The folder as it is before the command: for those that read results, with these and with older output."""
        shutil.rmtree(self.now, ignore_errors=True)
        self.now.mkdir()
        if name in ("resume", "export", "report"):
            shutil.copytree(self.done, self.now / "out")
            (self.now / "table.csv").write_text("older")
            (self.now / "page.html").write_text("older")

    def right(self, name: str) -> Mapping[str, bytes]:
        """What the command leaves on a disk without faults: the files whose content does not vary, and the rows."""
        if name not in self._right:
            left = []
            for _ in range(2):
                self.prepare(name)
                self.go_on(name)
                left.append(self.left())
            first, second = left
            assert first.keys() == second.keys()
            self._right[name] = {path: data for path, data in first.items() if second[path] == data}
        return self._right[name]

    def left(self) -> dict[str, bytes]:
        """The files of the case that are not the store's own, and the rows of its store."""
        found = {}
        for path in sorted(self.now.rglob("*")):
            inside = path.relative_to(self.now).as_posix()
            is_own = inside.startswith(("out/segments", "out/lock")) or path.name.startswith(".")
            if path.is_file() and not is_own:
                found[inside] = path.read_bytes()
        with suppress(StoreError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = [[cell["id"], record and {"row": record["row"]}] for cell, record in Store(self.now / "out").rows()]
            found["rows"] = json.dumps(rows, sort_keys=True).encode()
        return found

    def go_on(self, name: str) -> None:
        """Run the command on a disk without faults, to its end."""
        words = self.words(name)
        if name == "sweep" and (self.now / "out").exists():
            words.append("--resume")
        answer = run(words)
        if answer.status:
            raise Lost(f"going on ends with {answer.status}: {answer.err[-300:]}{answer.out[-300:]}")

    def count(self, name: str) -> list[str]:
        """The kinds of the events of the command, in order."""
        self.right(name)
        self.prepare(name)
        disk = Disk(self.now)
        with watched(disk):
            run(self.words(name))
        return disk.events

    def case(self, name: str, fault: str, at: int) -> Answer:
        """One fault at one event of a command. Raises Lost where it does harm."""
        right = self.right(name)
        self.prepare(name)
        disk = Disk(self.now, at, fault)
        disk.meanwhile = self._meanwhile(disk, name)
        finished: list[str] = []
        at_the_cut: list[int] = []
        add = Writer.add

        def noted(writer: Writer, id: str, *rest: object) -> None:
            add(writer, id, *rest)  # type: ignore[arg-type]
            finished.append(id)
            if not len(disk.events) >= at:
                at_the_cut.append(len(finished))

        with watched(disk), mock.patch.object(Writer, "add", noted):
            answer = run(self.words(name))
        copy = self.base / "copy"
        if copy.exists():  # the power was cut, or the command killed: the folder as it was then
            shutil.rmtree(self.now)
            copy.rename(self.now)
            finished = [] if fault == "power failure" else finished[: max(at_the_cut, default=0)]
        else:
            self._check_answer(answer, name, right)
        self._check_cells(finished, right, name)
        self.go_on(name)
        self._check_same(right)
        return answer

    def _meanwhile(self, disk: Disk, name: str) -> Callable[[], None]:
        """What happens at the event besides an error."""

        def lose_the_lock() -> None:
            (self.now / "out" / "lock").unlink(missing_ok=True)
            if any((self.now / "out").glob("*")):
                run([*self.words(name), *(["--resume"] if name == "sweep" else [])])

        def set_back() -> None:
            disk.behind_s = BACK_S

        def cut() -> None:
            snapshot(disk, self.base / "copy", lost=disk.fault == "power failure")

        actions = {"lock lost": lose_the_lock, "clock set back": set_back, "killed": cut, "power failure": cut}
        return actions.get(disk.fault, lambda: None)

    def _check_answer(self, answer: Answer, name: str, right: Mapping[str, bytes]) -> None:
        """A refusal is one line; a success has done what it says; older output is whole."""
        said = [line for line in answer.err.splitlines() if line.startswith("tiersim: ")]
        said = [line for line in said if not any(words in line for words in NOTES)]
        failed = [line for line in answer.out.splitlines() if line.startswith(("failed: ", "killed: "))]
        if "Traceback" in answer.err or "fault of tiersim" in answer.err:
            raise Lost(f"a traceback: {answer.err[-300:]}")
        if answer.status and len(said) != 1 and not failed:
            raise Lost(f"status {answer.status} with {len(said)} lines: {answer.err[-300:]}")
        if not answer.status:
            self._check_same(right)
        for path in ("table.csv", "page.html"):
            file = self.now / path
            if path in right and file.read_bytes() not in (b"older", right[path]):
                raise Lost(f"{path} is neither the older file nor the new one")

    def _check_cells(self, finished: Sequence[str], right: Mapping[str, bytes], name: str) -> None:
        """Every finished cell has its row, and no row is wrong or there twice."""
        folder = self.now / "out"
        if not (folder / "segments").exists():
            if finished:
                raise Lost("finished cells were lost")
            return
        rows = dict(json.loads(right["rows"]))
        paths = sorted((folder / "segments").glob("*.jsonl"))
        records = [record for path in paths for record in read_segment(path) if record is not None]
        there = {record["id"] for record in records}
        if missing := set(finished) - there:
            raise Lost(f"cells are lost: {sorted(missing)}")
        if wrong := [each["id"] for each in records if is_answer(each) and each["row"] != rows[each["id"]]["row"]]:
            raise Lost(f"rows are wrong: {wrong}")

    def _check_same(self, right: Mapping[str, bytes]) -> None:
        """The folder has what it has without faults, and no half of a file beside it."""
        left = self.left()
        for path, data in right.items():
            if left.get(path) != data:
                raise Lost(f"{path} {'differs' if path in left else 'is missing'}")
        if "rows" in right:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                store = Store(self.now / "out")
            ids = [cell["id"] for cell, _ in store.rows()]
            if len(ids) != len(set(ids)) or len(ids) != len(json.loads(right["rows"])):
                raise Lost("a cell is there twice, or not at all")


COMMANDS = ("sweep", "resume", "export", "report", "run", "compare")
"""The commands that write."""


def cases(bench: Bench, names: Sequence[str] = COMMANDS) -> Iterator[tuple[str, str, int]]:
    """Every fault at every event that it can befall, command by command."""
    for name in names:
        for at, kind in enumerate(bench.count(name), 1):
            for fault, what in FAULTS.items():
                is_lost = fault == "lock lost"
                if what.befalls(kind) and not (is_lost and name not in ("sweep", "resume")):
                    yield name, fault, at
