"""The prose uses the field's words: docstrings, comments, messages and documents, package by package."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PLACES = (
    *sorted({path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("sim/*/__init__.py")}),
    *("sim", "workloads", "hardware_profiles", "docs", "scripts", "tests", "."),
)
"""Packages, with all that is in them, and the folders whose own files count: `sim`, `docs` and the root."""

OWN_FILES_ONLY = ("sim", ".")

COUNTED = r"(?:bytes?|ns|nanoseconds|seconds|FLOPs?|2|two|numbers?|rows?|one|entry|entries|points?|lines?|bits?|class)"
UNIT = (
    r"(?:bytes?|op|tier|layer|policy|device|stage|tensor|node|sample|row|token|element|parameter|machine|line|iteration"
    r"|microbatch|cell|link|step|channel|multiply-add|kind|type|part|run|second|transfer|column|position|query|rank"
    r"|model|plane|interval|block|size|file|user)"
)

DIALECT = {
    rf"\b{COUNTED} an? {UNIT}\b(?! that)": "per op, per tier: 'bytes per layer', 'one row per policy'",
    r"\b(?:comput|ma[dk]|r[ua]n)(?:e|es|ed|s|ing|ning)? (?:it |them )?again\b": "recompute, repeat",
    r"\bbur(?:y|ies|ied|ying)\b": "free, release",
    r"\bdear(?:er|est)?\b": "expensive",
    r"\bfoot\b": "footer",
    r"\b(?:lies?|lying|lay) there\b": "is resident, exists",
    r"\bthere (?:from|at) the (?:start|beginning|end)\b": "exists from the start, exists at the end",
    r"\b(?:is|are|was|were|be|has|have|had) gone\b": "has been freed, is lost, has been evicted",
    r"\bwhat goes\b": "what is evicted",
    r"\bmakers?\b": "producer",
    r"\bunfree\w*": "removing unnecessary recomputation",
    r"\b(?:no|has|have|had|enough|finds?|found|makes?|made|more) room\b(?!-)|\broom for\b": "free space, fits",
    r"(?<![Tt]here )\bis no (?!(?:more|less|longer|better|worse|such|doubt|exception|larger)\b)\w+": "is not a",
    r"\banew\b": "again, a new one",
    r"\bstands? (?:above|below|behind|beside|twice)\b": "precedes, follows, appears twice",
    r"\bmeta data\b": "metadata",
}
"""Words of this code base's old dialect, and what the field writes; see the project's glossary."""

KEYS = ("there from the start, role", "tensors there from the start, taken as inputs")
"""Keys of metadata and of reports: names that users may have in files, not prose."""

LOWER = [re.compile(pattern.removeprefix(r"\b").lower()) for pattern in DIALECT]
"""What a text in lower case has where it has any of them: searched for ten times as fast."""
CODE = re.compile(rf"`[^`\n]*`|https?://\S+|{'|'.join(map(re.escape, KEYS))}")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def files_of(place: str) -> list[Path]:
    """The Python and Markdown files of a package, with those of the folders in it, or of a folder alone.

    This file is not among them: it has the words themselves.
    """
    pattern = "*" if place in OWN_FILES_ONLY else "**/*"
    found = (path for path in (ROOT / place).glob(pattern) if path.suffix in (".py", ".md"))
    return sorted(path for path in found if path != Path(__file__).resolve())


def prose_of(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Every piece of prose with its line: of Markdown the paragraphs, of Python docstrings, comments and messages."""
    if path.suffix == ".md":
        for match in re.finditer(r"(?:.+\n?)+", FENCE.sub(lambda m: "\n" * m[0].count("\n"), text)):
            yield text.count("\n", 0, match.start()) + 1, match[0]
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_string = tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE") and " " in token.string
        if token.type == tokenize.COMMENT or is_string:
            yield token.start[0], token.string


def one_line(text: str) -> str:
    """The text without line breaks, and without the marks of comments behind them."""
    return " ".join(re.sub(r"\n\s*#?", "\n", text).split())


def found_in(path: Path, text: str) -> list[str]:
    """What is to be rewritten: file, line, the words, and what to write instead."""
    hits: list[str] = []
    whole = one_line(text).lower()
    if not any(pattern.search(whole) for pattern in LOWER):  # not even in its code
        return hits
    for line, prose in prose_of(path, text):
        plain = one_line(CODE.sub("`code`", prose))
        for pattern, instead in DIALECT.items():
            found = re.finditer(pattern, plain, re.IGNORECASE)
            hits += [f"{path.name}:{line}: {match[0]!r}: {instead}" for match in found]
    return hits


def hits_in(place: str) -> list[str]:
    """All hits of a place."""
    return [hit for path in files_of(place) for hit in found_in(path, path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("place", PLACES)
def test_the_prose_uses_the_words_of_the_field(place):
    assert hits_in(place) == []


PLANTED = (
    ("a dead tensor is buried", "buried"),
    ("bytes a layer", "bytes a layer"),
    ("a figure of 2 a multiply-add", "2 a multiply-add"),
    ("drops what is dear", "dear"),
    ("the foot of a table", "foot"),
    ("which op made it: its maker", "maker"),
    ("the weight lies there", "lies there"),
    ("there from the start", "there from the start"),
    ("the old value is gone", "is gone"),
    ("it is computed again", "computed again"),
    ("Compute again", "Compute again"),
    ("a tensor that has no room", "no room"),
    ("unfreeing a schedule", "unfreeing"),
    ("it is no chain", "is no chain"),
    ("it stands above", "stands above"),
)


@pytest.mark.parametrize(("words", "hit"), PLANTED)
@pytest.mark.parametrize(
    "form", ['def f():\n    """{} here."""\n', "x = 1  # {}\n", 'raise ValueError(f"op {{x}}: {} here")\n', "{}.\n"]
)
def test_a_planted_word_is_found(form, words, hit):
    path = Path("planted.md" if form == "{}.\n" else "planted.py")
    assert any(repr(hit) in line for line in found_in(path, form.format(words)))


def test_a_phrase_that_a_line_break_divides_is_found():
    assert found_in(Path("x.py"), '"""Takes 4 bytes\n    an op."""\n')
    assert found_in(Path("x.md"), "Takes 4 bytes\nan op.\n")


@pytest.mark.parametrize(
    "text",
    [
        "foot = Foot(maker)\n",
        'x = "maker"\n',
        "# calls `run again` of a class\n",
        '"""An op that reads a tensor; there is no room-temperature superconductor, and it is no longer pinned."""\n',
        '"""One op runs, an op reads a layer of weights, and a device waits for a link."""\n',
    ],
)
def test_names_code_and_plain_english_are_left_alone(text):
    assert found_in(Path("x.py"), text) == []
