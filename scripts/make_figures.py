"""Writes docs/figures.md, the figures of a summary and what rows have beside them, and the names of `sim.analysis`.

python scripts/make_figures.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

from sim.analysis import summary
from sim.analysis.figures import BESIDE, figures, figures_markdown
from sim.analysis.registry import analyses, meaning, modules

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "figures.md"
PACKAGE = ROOT / "sim" / "analysis" / "__init__.py"

LINE = 120
PACKAGE_DOCSTRING = '''\
"""What a run's log says: each analysis reads the log alone and gives a small frozen record or a table."""

# Made by scripts/make_figures.py: the public names of the files of this folder.
'''

TEXT = """# Figures and analyses

Made by `scripts/make_figures.py` from the declarations in `sim/analysis/`: tables, JSON, CSV and pages have these keys,
and a test holds this page to them. What is kept by tier, link or cause is nested in JSON and `key.part` in CSV.

## Of a run

{figures}
## Beside them, in comparisons, sweeps and pages

{beside}
## Analyses

`tiersim run --analysis NAME`; from Python, functions of `sim.analysis` that take a log.

| name | says |
| --- | --- |
{analyses}
"""


def page() -> str:
    """The page as it has to be."""
    rows = "\n".join(f"| `{name}` | {meaning(name)} |" for name in analyses())
    return TEXT.format(figures=figures_markdown(figures()), beside=figures_markdown(BESIDE), analyses=rows)


def public_names(module: ModuleType) -> list[str]:
    """What a file of analyses gives to the package: its `__all__`, else the functions and classes that it defines."""
    own = [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    ]
    return sorted(name for name in getattr(module, "__all__", own) if name[0] != "_")


def package() -> str:
    """The text of `sim/analysis/__init__.py` as it has to be."""
    names = {module.__name__: public_names(module) for module in (*modules(), summary)}
    imports = []
    for module in sorted(names):
        line = f"from {module} import {', '.join(names[module])}"
        if len(line) > LINE:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names[module]) + ")"
        imports.append(line)
    listed = "".join(f'    "{name}",\n' for name in sorted({name for each in names.values() for name in each}))
    return "\n".join([PACKAGE_DOCSTRING, *imports, "", f"__all__ = [\n{listed}]", ""])


if __name__ == "__main__":
    PACKAGE.write_text(package(), encoding="utf-8")
    TARGET.write_text(page(), encoding="utf-8")
