"""A comparison's folder whose rows lack something: one line that names the key, or a page without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sim.errors import TiersimError
from tests.fuzz.readers import make_comparison, run_command


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right folder, in which one policy cancelled copies."""
    folder = tmp_path_factory.mktemp("saved") / "comparison"
    make_comparison(folder)
    return folder


def bent(saved: Path, folder: Path, key: str, part: str | None, value: Any) -> Path:
    """A copy of the folder in which a key of the second row, or a part of it, is another value, or is missing (...)."""
    shutil.copytree(saved, folder)
    path = folder / "comparison.json"
    about = json.loads(path.read_text())
    holder, name = (about["rows"][1], key) if part is None else (about["rows"][1][key], part)
    assert name in holder or name == "exchanged_bytes"  # which a run on one device has not
    if value is ...:
        del holder[name]
    else:
        holder[name] = value
    path.write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    ("key", "part", "value", "says"),
    [
        ("fits", None, ..., r"rows\[1\]: not a row of a comparison"),
        ("policy", None, 3, r"rows\[1\]: not a row of a comparison"),
        ("moved_bytes", "h2d", None, r"rows\[1\]\.moved_bytes: not a value of that figure"),
        ("devices", None, {"a": 1}, r"rows\[1\]\.devices: not a value of that figure"),
        ("exchanged_bytes", None, {"a": 1}, r"rows\[1\]\.exchanged_bytes: not a value of that figure"),
        ("makespan_ns", None, ..., r"rows\[1\]\.makespan_ns: not a value of that figure"),
    ],
)
def test_a_row_without_what_a_page_needs_is_named(
    key: str, part: str | None, value: Any, says: str, saved: Path, tmp_path: Path
) -> None:
    folder = bent(saved, tmp_path / "bent", key, part, value)
    with pytest.raises(TiersimError, match=says):
        run_command("report", str(folder), "-o", str(tmp_path / "page.html"), "--runs", "0")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("key", "part", "value"), [("counters", "cancelled_bytes", ...), ("overlap_by_link", "h2d", None)]
)
def test_what_a_row_may_lack_is_left_out(key: str, part: str, value: Any, saved: Path, tmp_path: Path) -> None:
    folder = bent(saved, tmp_path / "bent", key, part, value)
    run_command("report", str(folder), "-o", str(tmp_path / "page.html"), "--runs", "0")
    assert (tmp_path / "page.html").is_file()
