"""Notebooks as pages: text as it is, code in fences, what was printed or drawn as it was stored."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

STYLE = re.compile(r"<style.*?</style>\s*", re.DOTALL)


def page_of(path: Path) -> tuple[str, dict[str, bytes]]:
    """The page of a stored notebook, and the pictures that it shows: name -> PNG."""
    pictures: dict[str, bytes] = {}
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(_fenced("python", "\n".join(line for line in source.splitlines() if not line.startswith("%"))))
        for output in cell["outputs"]:
            parts.append(_output(output, path.stem, pictures))
    return "\n\n".join(part for part in parts if part), pictures


def _output(output: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        name = f"{stem}-{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode("".join(data["image/png"]))
        return f"![Figure {len(pictures)} of this notebook]({name})"
    if "text/html" in data:
        table = STYLE.sub("", "".join(data["text/html"])).replace(' border="1"', "")
        return f'<div class="output" markdown="0">{table}</div>'
    text = "".join(data.get("text/plain", output.get("text", "")))
    return _fenced("text", text.rstrip()) if text.strip() else ""


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"
