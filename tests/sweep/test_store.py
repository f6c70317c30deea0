"""A sweep's folder: plain files, checked; nothing lost, nothing stale, clear words when it cannot be used."""

import hashlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from sim.errors import Caution
from sim.report.error_bars import statement_errors
from sim.sweeps import Store, StoreError, query, run_sweep, sweep, write_csv
from sim.sweeps.index import QueryError
from sim.sweeps.store import Writer, line_of, read_segment


def segments(folder):
    return sorted((folder / "segments").glob("*.jsonl"))


def ran(swept):
    return swept.progress.ran


@pytest.fixture
def done(study, tmp_path):
    """A finished sweep: the study, its folder, its table as bytes."""
    folder = tmp_path / "out"
    swept = run_sweep(study(), out=folder)
    return study(), folder, write_csv(swept.rows, tmp_path / "whole.csv").read_bytes()


def table(folder, tmp_path):
    return write_csv(Store(folder).rows(), tmp_path / "again.csv").read_bytes()


def test_the_files_hold_what_the_sweep_returned(done, tmp_path):
    _, folder, whole = done
    assert table(folder, tmp_path) == whole
    assert sorted(p.name for p in folder.iterdir()) == ["lock", "segments", "study.json"]


def test_a_rerun_runs_nothing_and_gives_the_same_bytes(done, tmp_path):
    study, folder, whole = done
    again = run_sweep(study, out=folder, resume=True)
    assert (ran(again), again.progress.reused) == (0, 8)
    assert write_csv(again.rows, tmp_path / "x.csv").read_bytes() == whole == table(folder, tmp_path)
    assert len(segments(folder)) == 1  # an empty one is taken away


def test_results_are_not_added_to_unless_asked(done):
    study, folder, _ = done
    with pytest.raises(StoreError, match="holds results already; --resume adds what is missing"):
        sweep(study, out=folder)


def test_a_larger_study_runs_what_is_new(done, study):
    _, folder, _ = done
    more = run_sweep(study(batch=[1, 2, 3]), out=folder, resume=True)
    assert (ran(more), more.progress.reused) == (4, 8)
    assert len(Store(folder).cells) == 12
    less = run_sweep(study(batch=[3]), out=folder, resume=True)
    assert ran(less) == 0
    assert [cell["labels"]["batch"] for cell, _ in Store(folder).rows()] == [3] * 4  # no row of another study


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_line_cut_short_is_run_again(done, tmp_path, cut):
    study, folder, whole = done
    path = segments(folder)[0]
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(Store(folder).records()) == 7
    again = run_sweep(study, out=folder, resume=True)
    assert ran(again) == 1
    assert table(folder, tmp_path) == whole


def test_a_damaged_line_is_found_by_its_checksum(done, tmp_path):
    study, folder, whole = done
    path = segments(folder)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = (
        lines[3].replace(b'"makespan_ns":', b'"makespan_ns":9', 1) if b"makespan" in lines[3] else b"x" + lines[3]
    )
    path.write_bytes(b"".join(lines))
    store = Store(folder)
    assert len(store.records()) == 7
    assert store.damaged == 1
    assert ran(run_sweep(study, out=folder, resume=True)) == 1
    assert table(folder, tmp_path) == whole


def test_bytes_that_are_no_text_are_a_damaged_line(tmp_path):
    good = line_of({"id": "a", "row": {}})
    path = tmp_path / "s.jsonl"
    path.write_bytes(good + b"\xff\xfe\n" + b"\n" + good[:10])
    assert list(read_segment(path)) == [{"id": "a", "row": {}}, None, None, None]


def test_failed_and_killed_cells_are_run_again_and_answers_are_not(study, tmp_path, own):
    asked = study(policy=["keep_all", own("Faulty")], budget=["all", "50%"], batch=1)
    folder = tmp_path / "out"
    assert ran(run_sweep(asked, out=folder)) == 4
    again = run_sweep(asked, out=folder, resume=True)
    assert (ran(again), again.progress.statuses["failed"]) == (2, 2)
    assert sum(record is not None for _, record in Store(folder).rows()) == 4


def test_an_edited_profile_gives_a_fresh_answer(study, tmp_path):
    shipped = Path(__file__).parents[2] / "hardware_profiles" / "mt3000_survey.toml"
    profile = tmp_path / "mine.toml"
    profile.write_text(shipped.read_text())
    asked = study(profile=str(profile), policy="keep_all", budget="all")
    first = run_sweep(asked, out=tmp_path / "out").to_frame()
    profile.write_text(shipped.read_text().replace('"8 GB"', '"9 GB"'))
    swept = run_sweep(asked, out=tmp_path / "out", resume=True)
    assert ran(swept) == 2
    assert list(first["capacity_bytes"]) == [8 * 10**9] * 2
    assert list(swept.to_frame()["capacity_bytes"]) == [9 * 10**9] * 2


def test_a_profile_edited_while_a_sweep_runs_gives_no_wrong_answer(study, tmp_path):
    shipped = Path(__file__).parents[2] / "hardware_profiles" / "mt3000_survey.toml"
    profile = tmp_path / "mine.toml"
    profile.write_text(shipped.read_text())
    from sim.sweeps import load_study
    from sim.sweeps.cell import Bench

    (cell,) = load_study(study(profile=str(profile), policy="keep_all", budget="all", batch=1)).cells()
    profile.write_text(shipped.read_text().replace('"8 GB"', '"9 GB"'))
    row = Bench().run(cell.task)["row"]
    assert row["status"] == "failed"
    assert "was changed while the sweep ran" in row["error"]


def test_going_on_where_nothing_is_missing_writes_nothing(done):
    study, folder, _ = done

    def state():
        return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}

    before = {**state(), folder: folder.stat().st_mtime_ns}
    assert ran(run_sweep(study, out=folder, resume=True)) == 0
    assert {**state(), folder: folder.stat().st_mtime_ns} == before


@pytest.mark.parametrize("content", [b"", b'{"tiersim_store": 1, "stu', b"\x00" * 40])
def test_a_half_written_study_file_is_recovered_from_the_segments(done, tmp_path, content):
    study, folder, whole = done
    right = (folder / "study.json").read_bytes()
    (folder / "study.json").write_bytes(content)
    with pytest.warns(Caution, match=r"study.json: .*; its cells are the 8 that were finished; --resume"):
        store = Store(folder)
    assert write_csv(store.whole_rows(), tmp_path / "x.csv").read_bytes() == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ran(run_sweep(study, out=folder, resume=True)) == 0
    assert (folder / "study.json").read_bytes() == right


def test_a_store_of_an_older_version_is_read(done):
    study, folder, _ = done
    new = ("mean_bytes", "reserved_bytes", "unlimited_run", "overlap_by_link", "energy_j")  # figures that it lacks
    path = segments(folder)[0]
    records = [record for record in read_segment(path) if record]
    kept = [{**each, "row": {k: v for k, v in each["row"].items() if k not in new}} for each in records]
    path.write_bytes(b"".join(map(line_of, kept)))
    assert "mean_bytes" not in query(Store(folder), "SELECT * FROM cells").columns
    assert ran(run_sweep(study, out=folder, resume=True)) == 0


def test_two_sweeps_cannot_write_one_folder(done):
    study, folder, _ = done
    with Writer(folder, resume=True) as writer:
        writer.begin(study, [{"id": "0" * 64, "labels": {}}])
        with pytest.raises(StoreError, match=f"another sweep is writing here .process {os.getpid()}"):
            sweep(study, out=folder, resume=True)
    sweep(study, out=folder, resume=True)


def test_a_folder_with_other_files_is_left_alone(study, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"holds other files \('thesis.tex', …\)"):
        sweep(study(), out=tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_store_of_a_newer_version_is_refused(done):
    study, folder, _ = done
    path = folder / "study.json"
    path.write_text(path.read_text().replace('"tiersim_store": 1', '"tiersim_store": 2'))
    before = path.read_text()
    for use in (lambda: Store(folder), lambda: sweep(study, out=folder, resume=True)):
        with pytest.raises(StoreError, match="format 2 is of a newer version; this one reads up to 1"):
            use()
    assert path.read_text() == before


def test_a_store_of_an_older_engine_gives_fresh_answers(study, tmp_path, monkeypatch):
    import sim.sweeps.study as module

    folder = tmp_path / "out"
    monkeypatch.setattr(module, "engine_version", lambda: "an older one")
    run_sweep(study(), out=folder)
    monkeypatch.undo()
    assert ran(run_sweep(study(), out=folder, resume=True)) == 8
    assert len(Store(folder).records()) == 16  # the old answers are kept, and not shown
    assert len(list(Store(folder).rows())) == 8


@pytest.mark.parametrize("changed", ["patch", "release", "results", "solver"])
def test_a_patch_of_a_library_changes_ids_only_with_results(monkeypatch, changed):
    from sim.policies import load
    from sim.sweeps import identity

    def ids():
        for cached in (identity.engine_version, identity._versions):
            cached.cache_clear()
        return identity.engine_version(), identity.policy_identity(load("checkmate"))

    known, real = ids(), identity.version
    if changed in ("patch", "release"):
        more = "{}.{}.999" if changed == "patch" else "{}.999.{}"
        monkeypatch.setattr(identity, "version", lambda name: more.format(*real(name).split(".")))
    elif changed == "results":
        monkeypatch.setattr(identity, "engine_results", lambda: "others")
    else:
        monkeypatch.setattr(identity, "solver_results", lambda: "others")
    try:
        same = [now == then for now, then in zip(ids(), known, strict=True)]
    finally:
        monkeypatch.undo()
        ids()
    assert (
        same
        == {"patch": [True] * 2, "release": [False] * 2, "results": [False, True], "solver": [True, False]}[changed]
    )


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"tiersim_store": 1}', "no json"])
def test_a_study_file_that_makes_no_sense_is_one_line(tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(StoreError, match=r"study\.json") as caught:
        Store(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_results_are_one_line(tmp_path):
    with pytest.raises(StoreError, match="no sweep's results are here"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_os_error(study, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file"):
        sweep(study(), out=tmp_path / "file" / "out")
    if os.geteuid() != 0:
        (tmp_path / "sealed").mkdir(mode=0o555)
        with pytest.raises(PermissionError):
            sweep(study(), out=tmp_path / "sealed" / "out")


FULL = """
import json, resource, sys
from sim.sweeps import StoreError, run_sweep
study, folder = json.loads(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    run_sweep(study, out=folder)
except StoreError as error:
    print(error)
"""


def test_a_full_disk_stops_the_sweep_and_loses_nothing(done, tmp_path):
    study, folder, whole = done
    limit = segments(folder)[0].stat().st_size // 2 + 100
    about = (folder / "study.json").stat().st_size
    other = tmp_path / "full"
    run = subprocess.run(
        [sys.executable, "-c", FULL, json.dumps(study), str(other), str(max(limit, about))],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert "File too large; all cells finished before are kept; continue with --resume" in run.stdout
    kept = Store(other).records()
    assert 0 < len(kept) < 8
    assert Store(other).damaged == 0  # what did not fit was taken back
    assert ran(run_sweep(study, out=other, resume=True)) == 8 - len(kept)
    assert table(other, tmp_path) == whole


def test_timelines_are_written_for_the_cells_that_ask(study, tmp_path):
    asked = study(timeline={"policy": "dtr", "batch": 1}, budget="all")
    swept = run_sweep(asked, out=tmp_path / "out", jobs=2)
    folders = sorted((tmp_path / "out" / "cells").iterdir())
    (cell,) = [c for c, _ in swept.rows if c["labels"]["policy"] == "dtr" and c["labels"]["batch"] == 1]
    assert [folder.name for folder in folders] == [cell["id"][:16]]
    names = {"summary.json", "timeline.pftrace.gz", "view.json.gz"}
    if find_spec("pyarrow"):
        names |= {"events.parquet", "memory.parquet"}
        assert pd.read_parquet(folders[0] / "events.parquet")["end_ns"].max() == max(
            r["row"]["makespan_ns"] for c, r in swept.rows if c["id"] == cell["id"]
        )
    assert {p.name for p in folders[0].iterdir()} == names
    summary = json.loads((folders[0] / "summary.json").read_text(encoding="utf-8"))
    assert summary["measured_error"] == statement_errors(cell["labels"]["profile"], ("time", "policies"))
    run_sweep({**asked, "seed": [0, 1]}, out=tmp_path / "out", resume=True)
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2  # and nothing half written
    with pytest.raises(Exception, match="expected an output folder"):
        sweep(asked)


# ---- queries -------------------------------------------------------------------------------------

COUNT = "SELECT policy, COUNT(*) AS cells, SUM(status = 'ok') AS ok FROM cells GROUP BY policy ORDER BY policy"


def test_a_query_answers_as_the_files_do(done):
    _, folder, _ = done
    found = query(Store(folder), COUNT)
    rows = list(Store(folder).rows())
    for policy, cells, ok in found.itertuples(index=False):
        mine = [record["row"] for cell, record in rows if cell["labels"]["policy"] == policy]
        assert (cells, ok) == (len(mine), sum(row["status"] == "ok" for row in mine))


def test_an_index_that_came_with_a_folder_is_not_believed(done):
    """As earlier versions wrote it: the image of a database, and the hash of it and of the files."""
    _, folder, _ = done
    files = [folder / "study.json", *segments(folder)]
    stamp = hashlib.sha256(b"1")
    for file in files:
        stamp.update(b"%s %s" % (file.name.encode(), hashlib.sha256(file.read_bytes()).digest()))
    with closing(sqlite3.connect(":memory:")) as forged:
        forged.execute("CREATE TABLE cells AS SELECT 'invented' AS policy, 'ok' AS status")
        image = forged.serialize()
    (folder / "index.sqlite").write_bytes(image)
    (folder / "index.sum").write_text(hashlib.sha256(stamp.digest() + image).hexdigest() + "\n")
    assert "invented" not in set(query(Store(folder), COUNT)["policy"])
    assert (folder / "index.sqlite").read_bytes() == image


def test_a_query_after_the_study_has_grown_has_the_new_cells(done, study):
    _, folder, _ = done
    query(Store(folder), COUNT)
    run_sweep(study(batch=[1, 2, 3]), out=folder, resume=True)
    assert list(query(Store(folder), COUNT)["cells"]) == [6, 6]


@pytest.mark.parametrize(
    "sql",
    [
        *("ATTACH '{}' AS f", "VACUUM INTO '{}'", "PRAGMA temp_store_directory = '{}'", "PRAGMA query_only = OFF"),
        *("CREATE TEMP TABLE x AS SELECT 1", "EXPLAIN DELETE FROM cells", "BEGIN"),
        *("SELECT load_extension('{}')", "SELECT writefile('{}', 'x')"),
    ],
)
def test_a_query_creates_nothing(sql, done, tmp_path):
    _, folder, _ = done
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(QueryError, match="query: ") as caught:
        query(Store(folder), sql.format(tmp_path / "new"))
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT SUM(x) FROM n"


@pytest.mark.timeout(60)
def test_a_query_without_end_is_stopped_by_its_limit(done):
    _, folder, _ = done
    with pytest.raises(QueryError, match=r"^query: took longer than 0\.05 s \(--time-limit\)$"):
        query(Store(folder), ENDLESS, time_limit_s=0.05)


@pytest.mark.timeout(60)
def test_a_query_without_end_is_stopped_by_ctrl_c(done):
    _, folder, _ = done
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)  # what Ctrl-C raises; a worker may ignore SIGINT
    soon = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    soon.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            query(Store(folder), ENDLESS, time_limit_s=20)
    finally:
        soon.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "sql", ["DROP TABLE cells", "SELECT nothing FROM cells", "", "SELECT 1; SELECT 2", "DELETE FROM cells"]
)
def test_a_query_that_cannot_be_is_one_line_and_changes_nothing(done, sql):
    from sim.errors import TiersimError

    _, folder, _ = done
    with pytest.raises(TiersimError, match="query: ") as caught:
        query(Store(folder), sql)
    assert "\n" not in str(caught.value)
    assert query(Store(folder), "SELECT COUNT(*) FROM cells").iloc[0, 0] == 8


# ---- damage --------------------------------------------------------------------------------------

QUERIES = (
    COUNT,
    "SELECT * FROM cells ORDER BY cell",
    "SELECT SUM(makespan_ns), MAX(peak_bytes), MIN(budget_bytes) FROM cells WHERE fits",
)


def damaged(data, rng):
    """Bytes with some of them changed, taken out, put in, or cut off."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out))
        what = rng.random()
        if what < 0.6:
            out[at] ^= rng.randrange(1, 256)
        elif what < 0.8:
            cut = rng.choice((1, 3, 500))
            at = min(at, max(0, len(out) - cut - 1))  # what lacks its end alone was cut short, not damaged
            del out[at : at + cut]
        else:
            out[at:at] = rng.randbytes(rng.choice((1, 40)))
        out = out or bytearray(b"x")
    return bytes(out)


def held_against(folder, right, names):
    """Asks all queries; each answers as before, a caution aside, or with one line that names a damaged file."""
    from sim.errors import TiersimError

    refusals = []
    for sql, known in right.items():
        with warnings.catch_warnings(record=True) as cautions:
            warnings.simplefilter("always")
            try:
                found = query(Store(folder), sql)
            except TiersimError as error:
                refusals.append(str(error))
            else:
                assert found.equals(known), sql
                refusals += [str(each.message) for each in cautions]
    assert all("\n" not in line and any(name in line for name in names) for line in refusals), refusals
    return len(refusals)


@pytest.mark.parametrize("rounds", [150, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["segment", "study"])
def test_damage_of_the_results_is_refused_by_name_or_changes_no_answer(done, which, rounds):
    _, folder, _ = done
    right = {sql: query(Store(folder), sql) for sql in QUERIES}
    path = segments(folder)[0] if which == "segment" else folder / "study.json"
    whole = path.read_bytes()
    rng, refused = random.Random(rounds), 0
    for _ in range(rounds):
        path.write_bytes(damaged(whole, rng))
        refused += held_against(folder, right, [path.name])
    assert refused > rounds  # of three queries each
    path.write_bytes(whole)
    assert held_against(folder, right, []) == 0


def test_a_damaged_line_is_made_good_by_going_on(done, tmp_path):
    study, folder, whole = done
    path = segments(folder)[0]
    path.write_bytes(path.read_bytes().replace(b'"fits":true', b'"fits":trUe', 1))
    for ask in (lambda: query(Store(folder), COUNT), lambda: Store(folder).whole_rows()):
        with pytest.raises(StoreError, match=r"00001.jsonl: line \d+ is damaged"):
            ask()
    assert ran(run_sweep(study, out=folder, resume=True)) == 1
    assert list(query(Store(folder), COUNT)["ok"])
    assert write_csv(Store(folder).whole_rows(), tmp_path / "x.csv").read_bytes() == whole


def test_a_line_that_a_kill_cut_short_is_missing_and_no_damage(done):
    _, folder, _ = done
    path = segments(folder)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    found = query(Store(folder), "SELECT SUM(status = 'missing') FROM cells")
    assert found.iloc[0, 0] == 1
