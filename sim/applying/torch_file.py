"""A plan as a Python file for PyTorch: the code that wraps modules, and the plan as data."""

from __future__ import annotations

import pprint
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from sim.applying.as_pytorch import Checkpoint, Sent
from sim.applying.choosing import Choice
from sim.applying.parts import calls_of, counted
from sim.trace.graph import Trace

MARK = "PLAN: Sequence[Mapping[str, Any]] = ()\n"
"""The line of the code that the plan replaces."""


def entries_of(trace: Trace, checkpoints: Sequence[Checkpoint], sent: Sequence[Sent] = ()) -> list[dict[str, Any]]:
    """What is wrapped, as data: see `PLAN` in the code."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for checkpoint in (each for outer in checkpoints for each in outer.all):
        paths = tuple(module.path for module in checkpoint.modules)
        found[paths] = {"modules": list(paths), "checkpoint": True}
        if save := saved_by_name(trace, checkpoint):
            found[paths]["save"] = save
    for each in sent:
        paths = tuple(module.path for module in each.modules)
        entry = found.setdefault(paths, {"modules": list(paths), "checkpoint": False})
        entry["send"] = "all" if each.everything else sent_by_name(trace, each)
        if each.inputs and not each.everything:
            entry["send_input"] = True
    return list(found.values())


def sent_by_name(trace: Trace, sent: Sent) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Per name of an op how many of it a call runs, and of those sent the positions and which of their results."""
    found: dict[str, set[tuple[int, int]]] = {}
    runs = calls_of(sent.modules)
    for ops in runs:
        for op, (name, position) in zip(ops, counted(trace, ops), strict=True):
            for k, t in enumerate(trace.writes(op)):
                if t in sent.results:
                    found.setdefault(name, set()).add((position, k))
    names = [name for name, _ in counted(trace, runs[0])]
    return {name: (names.count(name), sorted(pairs)) for name, pairs in sorted(found.items())}


def saved_by_name(trace: Trace, checkpoint: Checkpoint) -> dict[str, tuple[int, list[int]]]:
    """Per name of an op how many of it a call of the checkpoint runs, and the positions of those that are kept."""
    names = counted(trace, checkpoint.regions[0].forward)
    kept: dict[str, set[int]] = {}
    for region in checkpoint.regions:
        for op, (name, position) in zip(region.forward, counted(trace, region.forward), strict=True):
            if op in checkpoint.keep:
                kept.setdefault(name, set()).add(position)
    return {
        name: (sum(each == name for each, _ in names), sorted(positions)) for name, positions in sorted(kept.items())
    }


def torch_text(trace: Trace, choice: Choice, about: Sequence[str]) -> str:
    """The file. about: lines that say what it is, which become comments."""
    code = (files("sim.applying") / "torch_code.py").read_text(encoding="utf-8")
    _, _, code = code.partition('"""\n')  # its own docstring
    before, mark, after = code.partition(MARK)
    assert mark, "the code has lost the line that the plan replaces"
    plan = pprint.pformat(entries_of(trace, choice.checkpoints, choice.sent), width=100, sort_dicts=False)
    return f"{comment(about)}{before}PLAN: Sequence[Mapping[str, Any]] = {plan}\n{after}"


def comment(lines: Sequence[str]) -> str:
    """Lines of text as comments, whatever is in them."""
    safe = ("".join(sign if sign.isprintable() else " " for sign in line).rstrip() for line in lines)
    return "".join(f"# {line}".rstrip() + "\n" for line in safe)
