"""A run's plan in the words of a framework: as code, flags or settings, with what it costs there."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sim.applying.as_pytorch import Cost, cost_of
from sim.applying.choosing import Allowed, Choice, nearest
from sim.applying.meaning import Meaning, meaning_of
from sim.applying.parts import Module, dispatched, modules_of
from sim.applying.settings import FRAMEWORKS
from sim.applying.told import nearest_setting
from sim.applying.torch_file import torch_text
from sim.arguments import explained
from sim.errors import PolicyError, near
from sim.experiment import Result
from sim.policies import label
from sim.solvers.regions import Region
from sim.trace.graph import Trace
from sim.trace.op import COMMUNICATION, KINDS
from sim.units import format_bytes, format_time

__all__ = ["TARGETS", "Cost", "Exported", "check_framework", "export"]

SAME = 0.01
"""Up to this part of peak and time an exported plan counts as the run's own."""
TOLD = 0.05
"""Up to this part of the bytes that a setting treats otherwise than the run, it counts as the plan."""


@dataclass(frozen=True)
class Exported:
    """A plan in the words of a framework.

    to: the framework.
    text: the file.
    suffix: of the file's name.
    planned: what the run cost.
    cost: what the exported plan costs there, simulated on the same machine without a limit of memory.
    budget: bytes of the device.
    differences: what the framework cannot be told, and what happens instead.
    told: whether this is the plan; False where the framework has no switch for it, and the text is the nearest that it
        has.
    """

    to: str
    text: str
    suffix: str
    planned: Cost
    cost: Cost
    budget: int
    differences: tuple[str, ...]
    told: bool = True

    @property
    def fits(self) -> bool:
        """Whether the exported plan stays within the memory of the run."""
        return self.cost.peak_bytes <= self.budget

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the file; it appears complete or not at all. Raises OSError where it cannot be written."""
        from sim.outputs import write_text

        return write_text(Path(path), self.text)


@explained
def export(result: Result, to: str, *, layers: str | None = None) -> Exported:
    """A run's plan for a framework, with what it costs there.

    What the plan does is read from the run, not from its policy's name: which results were kept, recomputed or
    moved. What the framework cannot be told is replaced by the nearest that it can be, which is simulated. PyTorch gets
    a Python file, the others their options; where none of their switches does what the plan does, `told` is False.

    result: of `simulate`.
    to: the framework, a key of `TARGETS`.
    layers: paths of the layers in the model, with `*` for the number; by default those that the trace was captured
        from, or those of Hugging Face's model of that family.

    Raises PolicyError for a framework that is not known, and for a plan of which nothing can be said there.
    """
    check_framework(to)
    meaning = meaning_of(result)
    if to in FRAMEWORKS:
        return _settings(to, result, meaning)
    return _torch(result, meaning, modules_of(meaning.trace, layers))


def check_framework(name: str) -> None:
    """Raise PolicyError for a framework that is not known, naming the nearest that is."""
    if name not in TARGETS:
        raise PolicyError(f"export: {name!r} is not a known framework{near(name, TARGETS)}")


def _torch(result: Result, meaning: Meaning, modules: tuple[Module, ...]) -> Exported:
    planned = cost_of(result.log)
    choice = nearest(meaning, modules, result.platform, planned, Allowed())
    budget = result.platform.home(0).capacity
    differences = (
        *_over_devices(meaning.trace),
        *_differences(meaning, choice, planned),
        *_short_of_memory(choice.cost, budget),
    )
    about = [
        f"Activation checkpointing for {_model(meaning)}, as {label(result.policy)} planned it on "
        f"{result.platform.name}.",
        "Written by tiersim; needs PyTorch alone.",
        "",
        "    import this_file",
        "    model = this_file.apply(model)",
        "",
        f"Simulated: peak {_cost(choice.cost)}; the run it stands for: peak {_cost(planned)}.",
        *differences,
    ]
    text = torch_text(meaning.trace, choice, about)
    return Exported("torch", text, ".py", planned, choice.cost, budget, differences)


def _settings(to: str, result: Result, meaning: Meaning) -> Exported:
    framework, planned = FRAMEWORKS[to], cost_of(result.log)
    found = nearest_setting(result, meaning, framework)
    told = found.disagreement <= TOLD
    differences = [*_over_devices(meaning.trace), *([found.setting.note] if found.setting.note else [])]
    if told and not found.setting.options:
        differences.append(f"No setting is needed: it is what {to} does by itself.")
    if not told:
        differences.append(
            f"{to} has no switch for this plan. The nearest, which {found.setting.policy!r} simulates, treats "
            f"{found.disagreement:.0%} of the bytes otherwise: kept, recomputed or moved."
        )
    left_out = [words for words in meaning.changes if words not in found.meaning.changes]
    differences += [f"The plan also {words}; that is left out here." for words in left_out]
    budget = result.platform.home(0).capacity
    differences += [*_beside(found.cost, planned), *_short_of_memory(found.cost, budget)]
    text = framework.text(found.setting.options)
    return Exported(to, text, framework.suffix, planned, found.cost, budget, tuple(differences), told)


TARGETS = ("torch", *FRAMEWORKS)
"""The frameworks."""


def _model(meaning: Meaning) -> str:
    return str(meaning.trace.meta.get("model", "a model"))


def _cost(cost: Cost) -> str:
    return f"{format_bytes(cost.peak_bytes)}, time {format_time(cost.makespan_ns)}"


def _differences(meaning: Meaning, choice: Choice, planned: Cost) -> tuple[str, ...]:
    """What the exported plan does otherwise than the run, a line each."""
    found = [f"The plan also {words}; that is left out here." for words in meaning.changes]
    if meaning.away:
        roles = ", ".join(f"{format_bytes(size)} of {role.replace('_', ' ')}" for role, size in meaning.away.items())
        found.append(f"The plan keeps {roles} off the device at times; that is left out here.")
    if meaning.elsewhere:
        found.append(f"The plan runs ops on another engine ({', '.join(meaning.elsewhere)}); that is left out here.")
    sent = {t for each in choice.sent for t in (*each.results, *each.inputs)}
    if stay := meaning.moved.keys() - sent:
        size = meaning.trace.tensor_columns.bytes
        total = format_bytes(sum(int(size[t]) for t in stay))
        found.append(f"The plan moves {len(meaning.moved)} activations; {len(stay)} of them, {total}, stay here.")
    if sent:
        found.append(
            "Activations are sent to the host when they are saved, and fetched one ahead of backward, not at the "
            "plan's moments."
        )
    outside = [op for op in meaning.recomputed if not any(op in c.forward for c in _regions(choice))]
    if outside:
        names = meaning.trace.op_columns.name
        found.append(
            f"The plan recomputes {len(outside)} ops outside of what is wrapped here ({names[outside[0]]!r} is the "
            "first); their results are kept."
        )
    here = Counter(op for c in choice.checkpoints for each in c.all for region in each.regions for op in region.forward)
    again = [op for op, sweeps in meaning.sweeps.items() if len(sweeps) > max(1, here[op])]
    if again:
        found.append(f"The plan recomputes {len(again)} ops more often than these checkpoints do.")
    if twice := _updating_twice(meaning, choice):
        found.append(
            f"{twice} batch normalizations run in recomputation, too, and update their running statistics once more; "
            "gradients are the same."
        )
    return (*found, *_beside(choice.cost, planned))


DIVIDED = {"tensor_ranks": "tensor parallelism over {}", "context_ranks": "context parallelism over {}",
           "stages": "{} stages", "zero": "ZeRO {}"}  # fmt: skip
"""What the metadata of a trace that is divided over devices says of that, in words."""


def _over_devices(trace: Trace) -> list[str]:
    """That a run is one of several devices, where it exchanges something: no option here divides anything."""
    kinds = {KINDS[kind] for kind in set(trace.op_columns.kind.tolist())}
    if trace.devices == 1 and not kinds & set(COMMUNICATION):
        return []
    said = [text.format(n) for key, text in DIVIDED.items() if (n := int(trace.meta.get(key) or 0)) > (key != "zero")]
    where = f" ({', '.join(said)})" if said else ""
    return [f"The run is one over several devices{where}, which nothing written here divides: set that up, too."]


def _short_of_memory(cost: Cost, budget: int) -> list[str]:
    """That an exported plan takes more than the run had, where it does."""
    return [f"It does not fit: the run had {format_bytes(budget)}."] if cost.peak_bytes > budget else []


def _updating_twice(meaning: Meaning, choice: Choice) -> int:
    """How many ops with a state beside their results, the running statistics of batch normalization, are recomputed."""
    again = {op for c in choice.checkpoints for region in c.regions for op in region.forward if op not in c.keep}
    return sum("batch_norm" in dispatched(meaning.trace, op) for op in again)


def _beside(cost: Cost, planned: Cost) -> list[str]:
    """What an exported plan costs beside the run, where that is not the same."""
    ratio = (cost.peak_bytes / planned.peak_bytes - 1, cost.makespan_ns / planned.makespan_ns - 1)
    if max(map(abs, ratio)) <= SAME:
        return []
    return [f"So it is the nearest that can be told, not the same: peak {ratio[0]:+.1%}, time {ratio[1]:+.1%}."]


def _regions(choice: Choice) -> list[Region]:
    return [region for checkpoint in choice.checkpoints for region in checkpoint.regions]
