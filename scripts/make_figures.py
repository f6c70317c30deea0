"""Writes docs/figures.md: the figures of a summary and what rows have beside them, as they are declared.

python scripts/make_figures.py
"""

from __future__ import annotations

from pathlib import Path

from sim.analysis.figures import BESIDE, figures, figures_markdown
from sim.analysis.registry import analyses, meaning

TARGET = Path(__file__).resolve().parents[1] / "docs" / "figures.md"

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


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
