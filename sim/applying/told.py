"""The setting of a framework that comes nearest to a run: all that it can be told, simulated and compared with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from sim.applying.as_pytorch import Cost, cost_of
from sim.applying.meaning import Meaning, meaning_of
from sim.applying.settings import Framework, Setting
from sim.errors import Infeasible, PolicyError
from sim.experiment import Result, simulate, unlimited
from sim.trace.layers import tensor_layers
from sim.trace.phases import saved_tensors
from sim.trace.tensor import ROLE_CODE

MOST = 4
"""How many settings of one kind (the same options with other numbers) are simulated."""

STATE = ("weight", "gradient", "optimizer_state")


@dataclass(frozen=True)
class Tried:
    """A setting, simulated where memory is never short.

    meaning: what it does.
    disagreement: the part of bytes that it treats otherwise than the run.
    """

    setting: Setting
    cost: Cost
    meaning: Meaning
    disagreement: float


def nearest_setting(result: Result, meaning: Meaning, framework: Framework) -> Tried:
    """The setting that treats most bytes as the run does; of several, that with the nearest memory and time.

    Settings that fit the device come first. Raises PolicyError where none of them can be simulated.
    """
    trace, ample = meaning.trace, unlimited(result.platform)
    planned, budget = cost_of(result.log), result.platform.home(0).capacity
    tried: list[Tried] = []
    for setting in likely(meaning, framework.settings(int(tensor_layers(trace).max(initial=-1)) + 1)):
        try:
            run = simulate(trace, ample, setting.policy)
        except (Infeasible, PolicyError):  # not on this machine, or not for this model
            continue
        does = meaning_of(run)
        tried.append(Tried(setting, cost_of(run.log), does, disagreement(meaning, does)))
    if not tried:
        raise PolicyError("export: no setting of this framework can be simulated for this model on this machine")

    def rank(one: Tried) -> tuple[bool, float, float]:
        pairs = zip(astuple(one.cost), astuple(planned), strict=True)
        distance = sum(abs(math.log(ours / theirs)) for ours, theirs in pairs)
        return one.cost.peak_bytes > budget, round(one.disagreement, 3), distance

    return min(tried, key=rank)


def likely(meaning: Meaning, settings: Iterable[Setting]) -> list[Setting]:
    """Of each kind the settings that recompute and move in the layers in which the run does, as far as they can."""
    both = shares(meaning)

    def mismatch(setting: Setting) -> float:
        pairs = zip(both, (setting.recomputes, setting.moves), strict=True)
        return sum(
            abs((share > 0 if setting.partly else share) - (layer in chosen))
            for by_layer, chosen in pairs
            for layer, share in enumerate(by_layer)
        )

    kinds: dict[object, list[Setting]] = {}
    for setting in sorted(settings, key=mismatch):
        words = tuple(key if not isinstance(value, str) else (key, value) for key, value in setting.options.items())
        kinds.setdefault((words, setting.policy.count("+"), bool(setting.moves)), []).append(setting)
    return [setting for kind in kinds.values() for setting in kind[:MOST]]


def shares(meaning: Meaning) -> tuple[list[float], list[float]]:
    """Per layer the part of the bytes that backward needs which the run recomputed, and which it moved."""
    layer, fates, size = tensor_layers(meaning.trace).tolist(), fates_of(meaning), meaning.trace.tensor_columns.bytes
    count = max(layer, default=-1) + 1
    total, found = [0] * count, {"recomputed": [0] * count, "moved": [0] * count}
    for t, fate in fates.items():
        if layer[t] >= 0:
            total[layer[t]] += int(size[t])
            if fate in found:
                found[fate][layer[t]] += int(size[t])
    recomputed, moved = (
        [part / max(whole, 1) for part, whole in zip(each, total, strict=True)] for each in found.values()
    )
    return recomputed, moved


def fates_of(meaning: Meaning) -> dict[int, str]:
    """What the run did to each forward result that backward reads."""
    trace = meaning.trace
    return {
        t: "moved" if t in meaning.moved else "recomputed" if int(trace.producer[t]) in meaning.recomputed else "kept"
        for t in saved_tensors(trace).tolist()
        if trace.producer[t] >= 0
    }


def disagreement(one: Meaning, other: Meaning) -> float:
    """The part of bytes that two runs of a trace treat otherwise.

    Saved results count by whether they were kept, recomputed or moved; weights, gradients and optimizer state by
    whether they left the device, where one run sends them away; gradients also by whether updates ran during backward.
    """
    size, role = one.trace.tensor_columns.bytes, one.trace.tensor_columns.role
    ours, theirs = fates_of(one), fates_of(other)
    total = sum(int(size[t]) for t in ours)
    differing = sum(int(size[t]) for t, fate in ours.items() if theirs.get(t) != fate)
    for name in STATE:
        differs = (name in one.away) != (name in other.away) or (name == "gradient" and one.early != other.early)
        counts = differs or name in one.away
        held = int(size[(role == ROLE_CODE[name])].sum()) if counts else 0
        total += held
        differing += held * differs
    return differing / max(total, 1)
