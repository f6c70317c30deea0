"""What unlimited memory would give."""

from __future__ import annotations

from dataclasses import dataclass

from sim.advice.candidates import UNUSUAL
from sim.advice.question import Question
from sim.analysis.summary import samples_in
from sim.policies import load


@dataclass(frozen=True)
class Ceiling:
    """What unlimited memory would give.

    speed: samples, or iterations, per second; 0 where it cannot run even then.
    peak: bytes of the home tier.
    """

    speed: float
    peak: int


def ceiling(asked: Question) -> Ceiling:
    """The run of everything kept, with unlimited memory."""
    if asked.kept is None:
        return Ceiling(0.0, 0)
    end, peak = asked.kept
    return Ceiling((samples_in(asked.trace.meta) or 1) * 1e9 / max(1, end), peak)


def keeps_to_class(policy: str) -> bool:
    """Whether the plans of a policy are of the class that `Question.bound` is about, as far as its traits tell."""
    chosen = load(policy)
    return not (chosen.rewrites or chosen.saves or set(chosen.manages) - {"activations"} or UNUSUAL & chosen.needs)
