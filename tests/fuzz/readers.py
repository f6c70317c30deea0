"""Every reader of foreign input, with right files to make wrong ones from.

A reader gets a folder with a case in it. It may answer, or raise one of `REFUSALS`, which the command line turns into
lines without a traceback; anything else is a fault.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import typer

from sim.errors import TiersimError
from tests.fuzz.mutations import as_json, as_toml, bent, damaged, mutated
from tests.fuzz.traces import BY_LINE, DOCUMENTS, own_chakra
from tests.fuzz.wire import documents, encoded
from workloads.steps import training_step

REFUSALS = (TiersimError, OSError, typer.Exit, typer.BadParameter, typer.TyperException)
ROOT = Path(__file__).parents[2]
TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64}
LLAMA = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
    "sliding_window": 16,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
Encode = Callable[[Any], bytes]


@dataclass(frozen=True)
class File:
    """A right file: its content as a document and how that is written, or as bytes alone."""

    document: Any
    encode: Encode | None = None

    @cached_property
    def right(self) -> bytes:
        """The file as it should be."""
        return self.encode(self.document) if self.encode else self.document

    def wrong(self, rng: Random) -> bytes:
        """The file as it should not be."""
        if self.encode is None or rng.random() < 0.25:
            return damaged(rng, self.right) if rng.random() < 0.95 else rng.randbytes(rng.randrange(300))
        return self.encode(mutated(rng, self.document))


@dataclass(frozen=True)
class Reader:
    """What reads: `starts` are alternatives, each a folder of right files; `read` gets the folder."""

    starts: Callable[[], list[Mapping[str, File]]]
    read: Callable[[Path], object]

    def write(self, rng: Random, folder: Path) -> None:
        """A case: one start with one or two of its files wrong."""
        start = rng.choice(self.starts())
        wrong = {rng.choice(list(start)) for _ in range(rng.choice((1, 1, 1, 2)))}
        for name, file in start.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.wrong(rng) if name in wrong else file.right)


# ---- how things are written ------------------------------------------------------------------------


def by_line(rows: Any) -> bytes:
    """JSON, a line per row."""
    return b"\n".join(map(as_json, rows)) if isinstance(rows, list) else as_json(rows)


def packed(encode: Encode) -> Encode:
    """The same, gzipped."""
    return lambda document: gzip.compress(encode(document), 1, mtime=0)


def segment(records: Any) -> bytes:
    """Lines with right checksums, whatever they hold."""

    lines = [as_json(record) for record in (records if isinstance(records, list) else [records])]
    return b"".join(b"%08x %s\n" % (zlib.crc32(line), line) for line in lines)


def as_text(document: Any) -> bytes:
    """Text as it is."""
    return str(document).encode("utf-8", "surrogatepass")


def one_file(name: str, document: Any, encode: Encode | None = None) -> Mapping[str, File]:
    """A start of a single file."""
    return {name: File(document, encode)}


# ---- the readers ------------------------------------------------------------------------------------


def read_trace(folder: Path) -> object:
    """A trace of any format, with bounds on what is read."""
    from workloads import load_trace

    (path,) = folder.iterdir()
    return load_trace(path, max_bytes=1 << 24)


def traces(*names: str, pack: bool = False) -> Callable[[], list[Mapping[str, File]]]:
    """Starts from the small traces of these names."""

    @cache
    def starts() -> list[Mapping[str, File]]:
        found = []
        for name in names:
            encode = by_line if name in BY_LINE else as_json
            ending = ".jsonl.gz" if pack else ".jsonl"
            found.append(one_file(f"t{ending}", DOCUMENTS[name], packed(encode) if pack else encode))
        return found

    return starts


@cache
def real_trace() -> list[Mapping[str, File]]:
    """A training step as `save` writes it, with every key that its format has."""
    from sim.trace.io import save

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        save(tiny_step(), path)
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [one_file("t.jsonl", rows, by_line), one_file("t.jsonl.gz", rows, packed(by_line))]


@cache
def tiny_step() -> Any:
    """A training step of a tiny model."""
    from workloads import transformer

    return transformer(TINY, batch=1, sequence=8)


@cache
def profiles() -> list[Mapping[str, File]]:
    """Shipped profiles with pools, drives and several devices among them."""
    names = ("p100", "a100_80_gds", "mt3000_cluster", "gh200")
    texts = [(ROOT / "hardware_profiles" / f"{name}.toml").read_text(encoding="utf-8") for name in names]
    return [one_file("machine.toml", tomllib.loads(text), as_toml) for text in texts]


def read_profile(folder: Path) -> object:
    """A profile, and a run on it."""
    from sim import load_profile, simulate

    return simulate(tiny_step(), load_profile(folder / "machine.toml"), "keep_all")


def read_model(folder: Path) -> object:
    """A model's configuration, and its trace."""
    from workloads import transformer

    return transformer(folder / "config.json", batch=1, sequence=8)


def read_study(folder: Path) -> object:
    """A study, and its cells."""
    from sim.sweeps.study import load_study

    return load_study(folder / "study.toml").cells()


STUDIES: tuple[dict[str, Any], ...] = (
    {"model": ["gpt2"], "batch": [1, 2], "sequence": [64], "profile": ["mt3000_survey"], "policy": ["keep_all", "dtr"]},
    {
        "name": "s",
        "model": "gpt2",
        "batch": 1,
        "sequence": 64,
        "precision": ["fp32"],
        "profile": "p100",
        "policy": ["keep_all", {"name": "chen", "method": "sqrt", "segments": [2, 3]}],
        "budget": ["80%", "4 GB"],
        "seed": [0, 1],
        "figures": {"links.h2d.rate": ["10 GB/s", "20 GB/s"]},
        "skip": [{"policy": "chen", "seed": 1}],
        "iterations": 1,
        "recompute_limit": 10,
        "time_limit": "60 s",
        "timeline": [{"policy": "keep_all"}],
        "most_cells": 1000,
    },
)


def started(name: str) -> Callable[[], list[Mapping[str, File]]]:
    """Starts from a folder of results, which is made once."""

    @cache
    def starts() -> list[Mapping[str, File]]:
        with tempfile.TemporaryDirectory() as base:
            folder = Path(base) / name
            MADE_BY[name](folder)
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
                     if path.is_file() and not path.name.startswith(("timeline", "lock"))}  # fmt: skip
        return [{name: result_file(name, data) for name, data in files.items()}]

    return starts


def result_file(name: str, data: bytes) -> File:
    """A file of results as the document that it holds."""
    if name.endswith(".json"):
        document = json.loads(data)
        return File(document, with_sum if "sum" in document else as_json)
    if name.endswith(".json.gz"):
        return File(json.loads(gzip.decompress(data)), packed(as_json))
    if name.endswith(".jsonl"):
        return File([json.loads(line.partition(b" ")[2]) for line in data.splitlines()], segment)
    return File(data)


def with_sum(document: Any) -> bytes:
    """`study.json` of a sweep with the right checksum of whatever it holds, as someone who edits it could write it."""

    if not isinstance(document, dict):
        return as_json(document)
    try:
        rest = json.loads(as_json({key: value for key, value in document.items() if key != "sum"}))
        text = json.dumps(rest, sort_keys=True)
    except (ValueError, RecursionError):
        return as_json(document)
    return as_json({**rest, "sum": f"{zlib.crc32(text.encode()):08x}"})


@cache
def commands() -> Callable[..., object]:
    """The command line."""
    from sim.cli import app

    return typer.main.get_command(app)


def run_command(*words: str) -> None:
    """A command of tiersim, in this process."""
    import sys

    old, sys.argv = sys.argv, ["tiersim", *words]
    try:
        commands()(list(words), standalone_mode=False)
    finally:
        sys.argv = old


def make_run(folder: Path) -> None:
    """A saved run without its figures, which nothing reads."""
    from sim import load_profile, simulate
    from sim.commands.options import about_run
    from sim.outputs import write_run
    from workloads import transformer

    options = {"profile": "p100", "model": "gpt2", "batch": 1, "seq": 8, "policy": "dtr", "trace": None}
    platform, trace = load_profile("p100"), transformer("gpt2", batch=1, sequence=8)
    write_run(simulate(trace, platform, "dtr"), folder, about=about_run(options, platform, trace, ["dtr"]), figures="")


def make_comparison(folder: Path) -> None:
    """A saved comparison."""
    job = ("--profile", "p100", "--model", "gpt2", "--batch", "1", "--seq", "8", "--jobs", "1")
    run_command("compare", *job, "--policies", "keep_all,swap_all,chen", "--budget", "2.5 GB", "-o", str(folder))


def make_sweep(folder: Path) -> None:
    """A finished sweep of four cells."""
    from sim.sweeps.sweep import sweep

    sweep({**STUDIES[0], "sequence": [8]}, out=folder, jobs=1)


MADE_BY: Mapping[str, Callable[[Path], None]] = {"run": make_run, "comparison": make_comparison, "sweep": make_sweep}


def read_page(folder: Path) -> None:
    """The page of a folder. The workload that most cases name is the same one, and is built once for all of them."""
    with patch("workloads.steps.training_step", built):
        run_command("report", str(folder), "-o", str(folder / "page.html"), "--runs", "1")


def built(model: Any, **axes: Any) -> Any:
    """`training_step`, which remembers the last of its answers."""
    key = repr((model, sorted(axes.items())))
    if key not in BUILT:
        trace = training_step(model, **axes)
        BUILT.clear()
        BUILT[key] = trace
    return BUILT[key]


BUILT: dict[str, Any] = {}
"""The last trace that `built` made, by its arguments."""


def read_results(folder: Path) -> None:
    """Each command that reads a sweep's folder; one that refuses does not keep the next from being tried."""
    commands = (
        ("list", str(folder)),
        ("show", str(folder)),
        ("show", str(folder), "a"),
        ("query", str(folder), "SELECT policy, count(*) FROM cells GROUP BY 1"),
        ("export", str(folder), "--csv", str(folder / "out.csv")),
    )
    for words in commands:
        try:
            run_command("results", *words)
        except REFUSALS as error:
            check_words(error)


@cache
def ranks() -> list[Mapping[str, File]]:
    """A run on two devices, as Chakra's files of its ranks: by message, packed, and as the JSON of its nodes."""
    from sim import simulate
    from workloads.exporters.chakra import export_chakra

    with tempfile.TemporaryDirectory() as folder:
        export_chakra(simulate(*two_stages(), "swap_all").log, Path(folder) / "t")
        rows = [documents((Path(folder) / f"t.{rank}.et").read_bytes()) for rank in range(2)]
    files = [File(row, encoded) for row in rows]
    in_json = File(DOCUMENTS["chakra"], as_json)
    return [
        {"t.0.et": files[0], "t.1.et": files[1]},
        {"t.0.et.gz": File(rows[0], packed(encoded)), "t.1.et": files[1]},
        {f"t.{rank}.et": in_json for rank in range(3)},
    ]


@cache
def two_stages() -> Any:
    """A training step of a tiny model as two stages of a pipeline, and the machine of two devices."""
    from sim import Layout, lay_out
    from workloads import transformer

    return lay_out(transformer(TINY, batch=2, sequence=8), "mt3000_cluster", Layout(pp=2, micro_batches=1))


def read_ranks(folder: Path) -> object:
    """A trace from the files of its ranks."""
    from workloads import load_trace

    return load_trace(folder / "t", max_bytes=1 << 24)


@cache
def repeatable() -> list[Mapping[str, File]]:
    """Folders whose run is repeated: of a model, of the ranks of a trace, and ranks alone, of which one is saved."""
    with tempfile.TemporaryDirectory() as base, contextlib.chdir(base):
        Path("config.json").write_bytes(as_json(TINY))
        job = {"model": "config.json", "batch": 1, "seq": 8, "trace": None, "profile": "p100"}
        save_run(".", job, "chen")
        saved = [{name: result_file(name, Path(name).read_bytes()) for name in ("summary.json", "config.json")}]
        for i, start in enumerate(ranks()):
            os.mkdir(folder := str(i))
            with contextlib.chdir(folder):
                for name, file in start.items():
                    Path(name).write_bytes(file.right)
                save_run(".", OF_RANKS, "swap_all")
                saved.append({**start, "summary.json": result_file("summary.json", Path("summary.json").read_bytes())})
    return [*saved, *ranks()]


OF_RANKS = {"trace": "t", "profile": "mt3000_cluster", "set_": ["devices=4"]}


def save_run(folder: str, job: Mapping[str, Any], policy: str) -> None:
    """Save a run of the current folder's files as `tiersim run` does, without its figures."""
    from sim import simulate
    from sim.commands.options import about_run, job_of
    from sim.commands.repeating import options_of
    from sim.outputs import write_run

    platform, trace = job_of(options_of(job))
    options = {**job, "policy": policy}
    write_run(simulate(trace, platform, policy), Path(folder), figures="",
              about=about_run({"trace": None, **options}, platform, trace, [policy]))  # fmt: skip


def read_repeated(folder: Path, *commands: Sequence[str]) -> None:
    """One of some commands that repeat the run of a folder, chosen by its content; without a run, that of its ranks.

    The ranks of a trace are read once for the run and the command.
    """
    import workloads

    which = sum(zlib.crc32(path.read_bytes()) for path in sorted(folder.iterdir())) % len(commands)
    name, *words = commands[which]
    with contextlib.chdir(folder), patch("workloads.load_trace", cache(workloads.load_trace)):
        if not Path("summary.json").exists():
            save_run(".", OF_RANKS, "swap_all")
        try:
            run_command(name, ".", *words)
        except REFUSALS as error:
            check_words(error)


def read_explained(folder: Path) -> None:
    """Why a folder's run takes what it takes, and where it parts from another, which is itself."""
    read_repeated(folder, ("explain", "--seconds", "0"), ("explain", ".", "--seconds", "0", "--json"))


def read_exported(folder: Path) -> None:
    """A folder's run in the words of each framework."""
    from sim.applying import TARGETS

    read_repeated(folder, *(("export", "--nearest", "--to", name) for name in TARGETS))


SPECS = (
    *(
        "keep_all",
        "chen(method=sqrt, segments=3)",
        "zero_offload + rotor(slots=200)",
        "dtr",
        "swap_all(unit=op, ahead=2)",
    ),
    *("zero_offload + full_recompute", "layers 0-1: swap_all; rest: full_recompute", "rotor(slots=20)"),
)
QUANTITIES = ("80 GiB", "25 GB/s", "10 us", "312 TFLOP/s", "1.3 ms", "80%", "900 W", "1e3 MB", "16 Gbit/s", "0.5 pJ")


def read_spec(folder: Path) -> object:
    """A policy as it is named on the command line, and its plan."""
    from sim import load_profile, simulate
    from sim.policies import load

    return simulate(tiny_step(), load_profile("p100"), load((folder / "text").read_text("utf-8", "surrogatepass")))


def read_quantity(folder: Path) -> None:
    """Sizes, rates, times and the words of -p and --set."""
    from sim import load_profile, units
    from sim.commands.options import budget_of, overrides, parameters

    text = (folder / "text").read_text("utf-8", "surrogatepass")
    parsers = [getattr(units, name) for name in dir(units) if name.startswith("parse_")]
    tries: list[Callable[[], object]] = [
        *(lambda parse=parse: parse(text) for parse in parsers),
        lambda: parameters([f"a={text}", text]),
        lambda: load_profile("p100", overrides=overrides([f"tiers.hbm.capacity={text}"])),
        lambda: load_profile("p100", overrides=overrides([text])),
        lambda: budget_of(text, tiny_step(), load_profile("p100")),
    ]
    for attempt in tries:
        try:
            attempt()
        except REFUSALS as error:
            check_words(error)


def check_words(error: BaseException) -> None:
    """Assert that a refusal says something."""
    said = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    assert said or isinstance(error, (OSError, typer.Exit)), "a refusal without a word"


READERS: Mapping[str, Reader] = {
    "profile": Reader(profiles, read_profile),
    "model": Reader(
        lambda: [one_file("config.json", TINY, as_json), one_file("config.json", LLAMA, as_json)], read_model
    ),
    "study": Reader(lambda: [one_file("study.toml", study, as_toml) for study in STUDIES], read_study),
    "trace": Reader(real_trace, read_trace),
    "packed trace": Reader(traces("own", "dtr", "chrome", pack=True), read_trace),
    "chrome": Reader(traces("chrome"), read_trace),
    "execution trace": Reader(traces("execution trace"), read_trace),
    "op trace": Reader(traces("op trace"), read_trace),
    "chakra": Reader(traces("chakra", "feeder"), read_trace),
    "chakra protobuf": Reader(cache(lambda: [one_file("t.et", own_chakra())]), read_trace),
    "DTR log": Reader(traces("dtr"), read_trace),
    "run folder": Reader(started("run"), read_page),
    "comparison folder": Reader(started("comparison"), read_page),
    "sweep folder": Reader(started("sweep"), read_page),
    "store": Reader(started("sweep"), read_results),
    "chakra ranks": Reader(ranks, read_ranks),
    "explain": Reader(repeatable, read_explained),
    "export": Reader(repeatable, read_exported),
    "policy": Reader(lambda: [{"text": Spec(text)} for text in SPECS], read_spec),
    "quantity": Reader(lambda: [{"text": Spec(text)} for text in QUANTITIES], read_quantity),
}
"""Every reader, by the name of what it reads."""


@dataclass(frozen=True)
class Spec(File):
    """Words of the command line."""

    encode: Encode | None = as_text

    def wrong(self, rng: Random) -> bytes:
        """The words, bent."""
        return as_text(bent(rng, self.document))


def run_case(name: str, number: int, folder: Path) -> str:
    """One case of a reader: "answer", or the class of the refusal. Raises whatever else the reader raises."""
    reader = READERS[name]
    reader.write(Random(f"{name} {number}"), folder)
    quiet = io.StringIO()
    try:
        with redirect_stdout(quiet), redirect_stderr(quiet):
            reader.read(folder)
    except REFUSALS as error:
        check_words(error)
        return type(error).__name__
    return "answer"
