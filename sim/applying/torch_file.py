"""A plan as a Python file for PyTorch: the code that wraps modules, and the plan as data."""

from __future__ import annotations

import pprint
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from sim.applying.as_pytorch import Checkpoint
from sim.applying.parts import counted
from sim.trace.graph import Trace

MARK = "PLAN: Sequence[Mapping[str, Any]] = ()\n"
"""The line of the code that the plan replaces."""


def plan_of(trace: Trace, checkpoints: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """The checkpoints as data: paths, and of each kind of op that is kept how many run and which are kept."""
    found = []
    for checkpoint in checkpoints:
        entry: dict[str, Any] = {"modules": [module.path for module in checkpoint.modules]}
        if save := saved_by_name(trace, checkpoint):
            entry["save"] = save
        found.append(entry)
    return found


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


def torch_text(trace: Trace, checkpoints: Sequence[Checkpoint], about: Sequence[str]) -> str:
    """The file. about: lines that say what it is, which become comments."""
    code = (files("sim.applying") / "torch_code.py").read_text(encoding="utf-8")
    _, _, code = code.partition('"""\n')  # its own docstring
    before, mark, after = code.partition(MARK)
    assert mark, "the code has lost the line that the plan replaces"
    plan = pprint.pformat(plan_of(trace, checkpoints), width=100, sort_dicts=False)
    return f"{comment(about)}{before}PLAN: Sequence[Mapping[str, Any]] = {plan}\n{after}"


def comment(lines: Sequence[str]) -> str:
    """Lines of text as comments, whatever is in them."""
    safe = ("".join(sign if sign.isprintable() else " " for sign in line).rstrip() for line in lines)
    return "".join(f"# {line}".rstrip() + "\n" for line in safe)
