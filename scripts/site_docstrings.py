"""Docstrings of this project as Markdown: labels in bold, parameters as lists; for mkdocstrings and for policy pages.

Docstrings here say `name: what it is`, run on within a paragraph, and label parts as `Source:` or `Raises …`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import dedent
from typing import Any

import griffe

LABEL = re.compile(r"(Source|Bounds|Departs|Notes(?: of the plan)?): |(Raises) ")
ITEM = "- "
EMPHASIS = re.compile(r"(?<![\w*])\*(\w(?:[\w -]*\w)?)\*(?![\w*])")
INLINE = re.compile(r"(`+[^`]*`+)")


def as_markdown(text: str, names: Iterable[str] = ()) -> str:
    """A docstring as Markdown. names: of the parameters or fields that it may describe."""
    parts: list[str] = []
    for part in text.strip().split("\n\n"):
        if parts and _is_code(part) and _is_code(parts[-1]):
            parts[-1] += f"\n\n{part}"
        elif part.strip():
            parts.append(part)
    return "\n\n".join(_paragraph(part, frozenset(names)) for part in parts)


def _paragraph(text: str, names: frozenset[str]) -> str:
    lines = text.strip("\n").splitlines()
    if lines[0].startswith(">>>"):
        return "\n".join(["```pycon", *lines, "```"])
    if _is_code(text):
        return _code(dedent("\n".join(lines)))
    parts: list[list[str]] = [[]]
    for before, line in zip(["", *lines], lines, strict=False):
        is_item, indented = line.lstrip().startswith(ITEM), len(line) - len(line.lstrip())
        ends = parts[-1][:1] and parts[-1][0].startswith(ITEM) and before and not indented
        if LABEL.match(line) or is_item or ends:
            parts.append([])
        parts[-1].append(line.strip())
    shown = [(part[0].startswith(ITEM), _labelled(_joined(part), names)) for part in parts if part]
    text = ""
    for number, (is_item, part) in enumerate(shown):
        text += ("" if not number else "\n" if is_item and shown[number - 1][0] else "\n\n") + part
    return text


def _is_code(text: str) -> bool:
    return all(line.startswith("    ") for line in text.splitlines() if line)


def _code(text: str) -> str:
    """An indented block: Python where it is some."""
    try:
        compile(text, "docstring", "exec")
    except SyntaxError:
        return f"```text\n{text}\n```"
    return f"```python\n{text}\n```"


def _joined(lines: list[str]) -> str:
    """One line of a paragraph's, to be read as plain text but for code; a word broken at a hyphen keeps it."""
    parts = INLINE.split(re.sub(r"(?<=\w-)\n", "", "\n".join(lines)).replace("\n", " "))
    return "".join(part if part.startswith("`") else _plain(part) for part in parts)


def _plain(text: str) -> str:
    """Text whose signs stand for themselves, but for words between asterisks."""
    parts = EMPHASIS.split(text.replace("<", "&lt;"))
    return "".join(f"*{part}*" if i % 2 else part.replace("*", "\\*") for i, part in enumerate(parts))


def _labelled(text: str, names: frozenset[str]) -> str:
    found = LABEL.match(text)
    if found:
        label, rest = found.group(1) or found.group(2), text[found.end() :]
        return f"**{label}**{':' if found.group(1) else ''} {rest}"
    return _listed(text, names)


def _listed(text: str, names: frozenset[str]) -> str:
    """The sentences that start with `name: ` or `name, other: ` as items of a list."""
    if not names:
        return text
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    starts = list(re.finditer(rf"(?:^|(?<=[.:;)] ))((?:{one})(?:,? (?:and )?(?:{one}))*): ", text))
    if not starts:
        return text
    before = text[: starts[0].start()].strip()
    items = []
    for found, end in zip(starts, [*(s.start() for s in starts[1:]), len(text)], strict=True):
        label = re.sub(r"\w+", lambda word: f"`{word[0]}`" if word[0] in names else word[0], found.group(1))
        items.append(f"- {label}: {text[found.end() : end].strip()}")
    return "\n\n".join(part for part in (before, "\n".join(items)) if part)


class Prose(griffe.Extension):
    """Rewrites each docstring that mkdocstrings is about to render."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """A function's, with its parameters."""
        _rewrite(func, [parameter.name.lstrip("*") for parameter in func.parameters])

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """A class's, with its fields and those of its constructor."""
        init = cls.members.get("__init__")
        more = [p.name.lstrip("*") for p in init.parameters] if isinstance(init, griffe.Function) else []
        _rewrite(cls, [*cls.members, *more])

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """A module's."""
        _rewrite(mod, [])


def _rewrite(item: griffe.Object, names: Iterable[str]) -> None:
    if item.docstring is not None:
        item.docstring.value = as_markdown(item.docstring.value, names)
