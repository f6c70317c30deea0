"""Runs the notebooks and stores them with their outputs, without anything of the machine they ran on.

python scripts/run_notebooks.py [NOTEBOOK ...]        all in notebooks/ by default; needs the `test` extra
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def notebooks() -> list[Path]:
    """The notebooks of the repository, in order."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path) -> Any:
    """The notebook after a run of all its cells in `folder`. Raises nbclient's CellExecutionError."""
    import nbformat
    from nbclient import NotebookClient

    import sim

    # the kernel imports the same package as we do, wherever it runs
    places = [str(Path(sim.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in places if place)}
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=env)
    return book


def stored(book: Any) -> str:
    """The text of a notebook to keep: outputs and order of cells, no times, no versions."""
    import nbformat

    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {key: cell.metadata[key] for key in ("tags",) if key in cell.metadata}
    text: str = nbformat.writes(book, version=4)
    return text + "\n"


def main() -> None:
    """Run what was asked for."""
    for path in [Path(name) for name in sys.argv[1:]] or notebooks():
        path.write_text(stored(executed(path, path.resolve().parent)), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
