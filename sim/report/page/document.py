"""One HTML file from the data of a page: style, scripts and data inside, nothing outside."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import IO, Any

from sim.foreign_text import printable
from sim.report.colours import ROLE_COLOURS, WHY_COLOURS, ink_on
from sim.report.files import write_aside
from sim.report.page.run import RunView, SavedView, run_data
from sim.report.page.table import TableView, table_data

HERE = files("sim.report.page")
SCRIPTS = (
    *("format.js", "unpack.js", "grid.js", "viewport.js", "memory.js", "lanes.js", "scatter.js"),
    *("parts.js", "run.js", "sweep.js", "many.js", "page.js"),
)
"""Our scripts in the order of their dependencies; uPlot precedes them."""


def write_run_page(view: RunView | SavedView, path: str | os.PathLike[str]) -> Path:
    """Write the page of one run, as a whole; equal runs give equal files. Raises OSError."""
    return _write(path, view.title, {"kind": "run"}, {"run": run_data(view)})


def write_table_page(view: TableView, path: str | os.PathLike[str]) -> Path:
    """Write the page of many runs, as a whole; equal tables give equal files. Raises OSError."""
    runs = {f"run {id}": run_data(run) for id, run in view.runs.items()}
    return _write(path, view.title, {"kind": "table", "runs": list(view.runs)}, {"table": table_data(view), **runs})


def _write(path: str | os.PathLike[str], title: str, about: dict[str, Any], parts: Mapping[str, Any]) -> Path:
    text = document(title, about, parts).encode("utf-8", "replace")  # JSON may hold lone surrogates

    def write(file: IO[bytes]) -> None:
        file.write(text)

    return write_aside(path, write)


def document(title: str, about: Mapping[str, Any], parts: Mapping[str, Any]) -> str:
    """The file's text.

    Data is JSON, deflated, in base64, so that no text of it can end the element that holds it. The content policy in
    the head forbids the page all requests and all scripts but its own, whatever names contain.

    about: what the page holds.
    parts: data by name, each packed by itself.
    """
    colours = {"roles": ROLE_COLOURS, "whys": WHY_COLOURS}
    colours["inks"] = {why: ink_on(colour) for why, colour in WHY_COLOURS.items()}
    blocks = [f'<script type="text/plain" data-part="about">{pack({**about, "colours": colours})}</script>']
    blocks += [
        f'<script type="text/plain" data-part="{escape(name, quote=True)}">{pack(part)}</script>'
        for name, part in parts.items()
    ]
    style = _asset("uplot/uPlot.min.css") + "\n" + _asset("page.css")
    ours = "\n".join(_asset(name) for name in SCRIPTS)
    script = (
        f"/*! uPlot\n{_asset('uplot/LICENSE').strip()}\n*/\n{_library()}\n(() => {{\n'use strict';\n{ours}\n}})();\n"
    )
    return Template(_asset("template.html")).substitute(
        title=escape(printable(f"{title} – tiersim")),
        policy=f"default-src 'none'; img-src data:; style-src {_sum(style)}; script-src {_sum(script)}",
        style=style,
        blocks="\n".join(blocks),
        script=script,
    )


def pack(value: Any) -> str:
    """JSON values, packed for a page."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode()


def _library() -> str:
    """uPlot without its first line, which names its home; its licence stands in its place."""
    return _asset("uplot/uPlot.iife.min.js").partition("*/")[2].strip()


def _asset(name: str) -> str:
    return HERE.joinpath(name).read_text(encoding="utf-8")


def _sum(text: str) -> str:
    """How a content policy names the inline element with that text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
