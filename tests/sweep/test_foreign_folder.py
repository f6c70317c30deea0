"""A results folder from a stranger: nothing outside of it is read, written or emptied."""

import json
import os
import sys

import pytest

from sim.cli import main
from sim.errors import TiersimError
from sim.foreign import part_of
from sim.outputs import check_folder
from sim.sweeps import Store, run_sweep
from sim.sweeps.frame import flat_rows
from sim.sweeps.store import Writer, line_of, read_segment
from sim.views import row_view


@pytest.fixture
def folder(study, tmp_path):
    """A sweep of which one cell is missing."""
    out = tmp_path / "out"
    run_sweep(study(), out=out, jobs=1)
    segment = out / "segments" / "00001.jsonl"
    segment.write_bytes(b"".join(segment.read_bytes().splitlines(keepends=True)[:-1]))
    return out


def moved_behind_a_link(path, place):
    """Move a part of a folder elsewhere and leave a link; returns what that place holds."""
    place.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(place)
    else:
        place.mkdir()
    path.symlink_to(place)
    return content(place)


def content(place):
    files = [place, *place.rglob("*")] if place.is_dir() else [place]
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}


@pytest.mark.parametrize("how", [os.symlink, os.link])
def test_a_lock_that_is_another_file_is_refused_and_that_file_keeps_its_content(how, folder, study, tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("years of work")
    (folder / "lock").unlink()
    how(victim, folder / "lock")
    with pytest.raises(TiersimError, match=r"lock: (is a link|has a second name)") as caught:
        run_sweep(study(), out=folder, resume=True, jobs=1)
    assert "\n" not in str(caught.value)
    assert victim.read_text() == "years of work"


@pytest.mark.timeout(30)
def test_a_lock_that_is_a_pipe_is_refused_at_once(folder, study):
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")
    with pytest.raises(TiersimError, match="lock: is not a regular file"):
        run_sweep(study(), out=folder, resume=True, jobs=1)


@pytest.mark.parametrize("part", ["segments", "study.json", "cells", "segments/00001.jsonl", "lock"])
def test_a_sweep_is_not_continued_through_a_link(part, folder, study, tmp_path):
    before = moved_behind_a_link(folder / part, tmp_path / "elsewhere" / "it")
    with pytest.raises(TiersimError, match=f"{part}: is a link; a part of a folder of results must not be one"):
        run_sweep(study(), out=folder, resume=True, jobs=1)
    assert content(tmp_path / "elsewhere" / "it") == before


def test_a_timeline_is_not_written_through_a_link(folder, tmp_path):
    (folder / "cells").mkdir()
    (folder / "cells" / ("ab" * 8)).symlink_to(tmp_path)
    with Writer(folder, resume=True) as writer, pytest.raises(TiersimError, match="is a link"):
        writer.cell_folder("ab" * 20)


@pytest.mark.parametrize("part", ["segments", "study.json", "segments/00001.jsonl"])
@pytest.mark.parametrize("verb", ["show", "export", "query", "report"])
def test_results_are_not_read_through_a_link(verb, part, folder, tmp_path, capsys, monkeypatch):
    moved_behind_a_link(folder / part, tmp_path / "elsewhere" / "it")
    words = {
        "show": ["results", "show", folder],
        "export": ["results", "export", folder, "--csv", tmp_path / "x.csv"],
        "query": ["results", "query", folder, "SELECT * FROM cells"],
        "report": ["report", folder, "-o", tmp_path / "r.html"],
    }
    monkeypatch.setattr("sys.argv", ["tiersim", *map(str, words[verb])])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"{part}: is a link" in said.err
    assert not [path for path in ("x.csv", "r.html") if (tmp_path / path).exists()]


def test_a_cell_or_a_view_is_not_read_through_a_link(folder, tmp_path):
    id = Store(folder).cells[0]["id"]
    (folder / "cells").mkdir()
    (folder / "cells" / id[:16]).symlink_to(tmp_path)
    with pytest.raises(TiersimError, match="is a link"):
        Store(folder).cell_folder(id)
    (folder / "views").symlink_to(tmp_path)
    with pytest.raises(TiersimError, match="views: is a link"):
        row_view(folder, 0)


@pytest.mark.parametrize("part", ["summary.json", "comparison.json", "views"])
def test_a_run_is_neither_read_nor_written_through_a_link(part, tmp_path):
    from sim.commands.repeating import read_saved

    (tmp_path / "x").write_text(json.dumps({"asked": {"profile": "p", "trace": "t"}}))
    out = tmp_path / "out"
    out.mkdir()
    (out / part).symlink_to(tmp_path / "x")
    with pytest.raises(TiersimError, match=f"{part}: is a link"):
        check_folder(out, "comparison")
    if part != "views":
        with pytest.raises(TiersimError, match=f"{part}: is a link"):
            read_saved(out / part)


def test_the_folder_itself_may_be_a_link(folder, study, tmp_path):
    (tmp_path / "mine").symlink_to(folder)
    assert run_sweep(study(), out=tmp_path / "mine", resume=True, jobs=1).progress.ran == 1
    assert part_of(tmp_path / "mine", "study.json").is_file()


@pytest.mark.parametrize("name", ["².jsonl", "x.jsonl", "-3.jsonl", f"{'9' * 5000}.jsonl"[-255:]])
def test_a_segment_of_any_name_does_not_stop_a_sweep(name, folder, study):
    (folder / "segments" / name).touch()
    assert run_sweep(study(), out=folder, resume=True, jobs=1).progress.ran == 1
    assert (folder / "segments" / "00002.jsonl").stat().st_size


def with_records(folder, change):
    """The same folder with every record changed."""
    for segment in (folder / "segments").glob("*.jsonl"):
        records = [record for record in read_segment(segment) if record]
        for i, record in enumerate(records):
            change(i, record)
        segment.write_bytes(b"".join(map(line_of, records)))


@pytest.mark.timeout(30)
def test_a_hundred_thousand_damaged_lines_are_counted_at_once(folder):
    with open(folder / "segments" / "00001.jsonl", "ab") as segment:
        segment.write(b"\n" * 100_000)
    store = Store(folder)
    known = len(store.records())
    assert (known, store.damaged) == (len(store.cells) - 1, 100_000)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_longer_than_any_is_damaged_with_all_that_follows_and_is_not_read(end, folder, monkeypatch):
    monkeypatch.setattr("sim.sweeps.store.MOST_LINE", 1 << 16)
    segment = folder / "segments" / "00001.jsonl"
    good = segment.read_bytes()
    segment.write_bytes(good + b"0" * (1 << 20) + end + (good if end else b""))
    lines = list(read_segment(segment))
    count = good.count(b"\n")
    assert [record is None for record in lines] == [False] * count + [True]
    store = Store(folder)
    assert [bool(record) for _, record in store.rows()].count(False) == 1
    assert store.damaged == 1


def test_a_last_line_that_is_nested_too_deeply_is_damaged(folder):
    with open(folder / "segments" / "00001.jsonl", "ab") as segment:
        segment.write(b"0 " + b"[" * 100_000)
    assert Store(folder).whole_rows()


@pytest.mark.parametrize("had", [None, "1 s", [1], {}])
def test_a_cell_that_took_too_long_under_no_known_limit_is_run_again(had, folder, study):
    def ended(i, record):
        record["row"] = {"status": "timed_out", "fits": None, "error": ""}
        record["ran"]["time_limit_s"] = had

    with_records(folder, ended)
    swept = run_sweep(study(time_limit="60 s"), out=folder, resume=True, executor=Says())
    assert swept.progress.ran == swept.progress.total


class Says:
    """An executor that runs nothing."""

    def run(self, jobs):
        for job in jobs:
            yield job.id, {"row": {"status": "ok", "fits": None}, "ran": {}}


def test_an_axis_that_is_called_as_a_column_hides_no_id(folder, tmp_path, capsys, monkeypatch):
    about = json.loads((folder / "study.json").read_text())
    about.pop("sum")
    ids = [cell["id"] for cell in about["cells"]]
    for cell in about["cells"]:
        cell["labels"]["cell"] = {"a": [1]}
    (folder / "study.json").write_text(json.dumps(about))
    assert [row["cell"] for row in flat_rows(Store(folder).rows())] == ids
    monkeypatch.setattr("sys.argv", ["tiersim", "report", str(folder), "-o", str(tmp_path / "r.html"), "--runs", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err


def test_a_table_that_would_be_empty_for_the_most_part_is_refused(folder, monkeypatch):
    module = sys.modules[flat_rows.__module__]
    monkeypatch.setattr(module, "MOST_PLACES", 1000)
    monkeypatch.setattr(module, "PLACES_PER_FIGURE", 2)
    flat_rows(Store(folder).rows())
    with_records(folder, lambda i, record: record["row"].update({f"x{i}.{k}": k for k in range(1000)}))
    with pytest.raises(TiersimError, match="not the results of a sweep"):
        flat_rows(Store(folder).rows())


@pytest.mark.timeout(60)
def test_a_page_holds_no_cell_against_more_filters_than_it_can(folder, tmp_path, monkeypatch):
    from sim.commands.report_sweep import _Runs
    from sim.foreign import Trust

    store = Store(folder)
    study = {**store.study, "model": "gpt2", "batch": list(range(1, 1000))}
    study["skip"] = [{}, *({"batch": [10**6 + i] * 10} for i in range(1000))]
    store.study = study
    runs = _Runs(store, Trust(folder, False, {}), {})
    assert runs._tasks() == ([], {})
    assert "filters" in runs.notes[0]
