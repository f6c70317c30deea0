"""The comparison as a Markdown table, for documents and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from sim.report.cells import MODEL_ERROR, Row, columns, failure_lines, key_lines, ordered, state_lines
from sim.report.footer import Footer, footer_lines
from sim.report.verdict import verdict_lines

SPECIAL = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_{}[]<>#|~$"})


def comparison_markdown(
    rows: Sequence[Row],
    *,
    footer: Footer | None = None,
    model_error: float = MODEL_ERROR,
    binary: bool = False,
) -> str:
    """What `sim.report.table.comparison_text` has: the verdict, which comes first here, a table, and two lists."""
    shown = columns(rows, model_error=model_error, binary=binary)
    verdict = [escaped(line) for line in verdict_lines(rows, model_error, binary=binary)]
    lines = [
        *verdict,
        *([""] if verdict else []),
        _line([column.title for column in shown]),
        _line(["---:" if column.right else "---" for column in shown], escape=False),
        *(_line([column.text(row) for column in shown]) for row in ordered(rows)),
    ]
    failing = [*state_lines(rows, binary=binary), *failure_lines(rows, binary=binary)]
    below = [*key_lines(rows, model_error), *(footer_lines(footer, binary=binary) if footer else [])]
    for block in (failing, below):
        if block:
            lines += ["", *(f"- {escaped(line)}" for line in block)]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text with Markdown's special characters escaped."""
    return text.translate(SPECIAL).replace("\n", " ")


def _line(cells: Sequence[str], *, escape: bool = True) -> str:
    return f"| {' | '.join(escaped(cell) if escape else cell for cell in cells)} |"
