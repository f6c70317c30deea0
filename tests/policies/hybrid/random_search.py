"""A random search for plans that beat `hybrid`, or the bound: compositions, and changes of its own plan.

python -m tests.policies.hybrid.random_search              what is searched, and the seconds for each
python -m tests.policies.hybrid.random_search NAME 300     so many seconds of processor time for one of these

Compositions divide the layers, or names of modules, among policies that keep, drop, recompute or copy activations.
Changes are of one to three decisions in the plan of `hybrid`: a tensor stays, is dropped after a reader, leaves for
the host and returns at another op than before. From a change that takes no longer the next ones start. Nothing here is
`hybrid`'s own code: plans are lists of actions, and their time is the engine's.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from sim.analysis.peak_memory import home_peak
from sim.errors import TiersimError
from sim.experiment import problem_for, simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.least_time import lower_bound
from sim.plan import Action, Drop, Move, Plan, Problem, Recompute
from sim.trace import Trace
from workloads import transformer

PLENTY = 10**15
POLICIES = (
    "full_recompute", "selective_recompute", "every_k(k=2)", "every_k(k=3)", "chen", "sac_knapsack", "twremat",
    "swap_all", "vdnn", "capuchin", "delta", "superneurons", "lru_tiering", "mt3000_layered", "keep_all",
)  # fmt: skip
MODULES = ("*.attn*", "*.mlp*", "*.fc*", "*.ln*", "*.act*")


@dataclass(frozen=True)
class Cell:
    """A model on a machine, with a budget so far between the peak of recomputing all and that of keeping all."""

    model: str
    batch: int
    sequence: int
    profile: str
    rate: int
    share: float

    @cached_property
    def trace(self) -> Trace:
        """One iteration."""
        return transformer(self.model, batch=self.batch, sequence=self.sequence, precision="amp_bf16")

    @cached_property
    def platform(self) -> Platform:
        """The machine, its link at `rate` GB/s each way, its memory as small as the budget."""
        rates = {f"links.{way}.rate": f"{self.rate} GB/s" for way in ("d2h", "h2d")}
        machine = load_profile(self.profile, overrides=rates)
        kept, least = (
            home_peak(simulate(self.trace, machine, policy, budget=PLENTY).log)
            for policy in ("keep_all", "full_recompute")
        )
        return machine.with_budget(int(least + self.share * (kept - least)))


CELLS = {
    "mt3000 5": Cell("gpt2-medium", 4, 1024, "mt3000_survey", 5, 0.3),
    "mt3000 10": Cell("gpt2-medium", 4, 1024, "mt3000_survey", 10, 0.05),
    "a100": Cell("gpt2-medium", 4, 1024, "a100_40_pcie", 25, 0.1),
    "a100 5": Cell("gpt2-medium", 4, 1024, "a100_40_pcie", 5, 0.5),
}


@dataclass
class Found:
    """What a search has come to. ns: the least time. tried, fitted: how many. by: what took the least time."""

    ns: int
    by: str = "hybrid"
    tried: int = 0
    fitted: int = 0
    words: list[str] = field(default_factory=list)

    def looked(self, ns: int | None, by: str) -> bool:
        """Note one; whether it takes no longer than the best so far."""
        self.tried += 1
        self.fitted += ns is not None
        if ns is not None and ns < self.ns:
            self.ns, self.by = ns, by
            return True
        return ns == self.ns


def composition(draw: random.Random, layers: int) -> str:
    """Two or three policies, each for some layers or modules."""
    one, two, three = draw.sample(POLICIES, 3)
    first, second = sorted(draw.sample(range(layers - 1), 2))
    return draw.choice(
        (
            f"layers 0-{first}: {one}; rest: {two}",
            f"layers 0-{first}: {one}; layers {first + 1}-{second}: {two}; rest: {three}",
            f"{draw.choice(MODULES)}: {one}; rest: {two}",
            f"layers 0-{first} & {draw.choice(MODULES)}: {one}; rest: {two}",
            f"{one}; checkpoints: {two}",
        )
    )


class Changes:
    """Random changes of a plan for a problem of one device."""

    def __init__(self, problem: Problem, draw: random.Random) -> None:
        self._trace, self._draw = problem.trace, draw
        self._home, self._host = problem.home, problem.platform.host.name if problem.platform.host else ""
        columns, outputs = self._trace.tensor_columns, set(self._trace.outputs)
        self._tensors = [
            t
            for t in range(len(columns.bytes))
            if self._trace.producer[t] >= 0 and self._trace.replaced_by[t] < 0 and t not in outputs
            if columns.bytes[t] > 10**5 and len(self._gaps(t))
        ]
        self._sizes = [float(columns.bytes[t]) for t in self._tensors]

    def _gaps(self, tensor: int) -> list[tuple[int, int]]:
        """Two ops that follow each other in reading or making a tensor, with others between them."""
        uses = sorted({int(self._trace.producer[tensor]), *map(int, self._trace.readers(tensor))})
        return [(a, b) for a, b in pairwise(uses) if b - a > 8]

    def _without(self, actions: Sequence[Action], tensor: int) -> list[Action]:
        """The actions that are about other tensors."""
        op = int(self._trace.producer[tensor])
        alone = len(self._trace.writes(op)) == 1
        return [
            each
            for each in actions
            if not (isinstance(each, Recompute) and alone and each.op == op)
            and not (not isinstance(each, Recompute) and each.tensor == tensor)
        ]

    def changed(self, actions: Sequence[Action]) -> list[Action]:
        """The same with one to three decisions drawn again."""
        draw, found = self._draw, list(actions)
        for _ in range(draw.choice((1, 1, 2, 3))):
            moves = [i for i, each in enumerate(found) if isinstance(each, Move)]
            if moves and draw.random() < 0.4:
                i = draw.choice(moves)
                found[i] = self._shifted(found[i])
                continue
            (tensor,) = draw.choices(self._tensors, self._sizes)
            found = self._without(found, tensor)
            after, before = draw.choice(self._gaps(tensor))
            way = draw.choice(("stays", "dropped", "copied"))
            if way == "dropped":
                found.append(Drop(tensor, after=after))
            elif way == "copied" and self._host:
                back = max(after + 1, before - int(draw.expovariate(1 / 30)))
                found += [Move(tensor, self._host, after=after), Move(tensor, self._home, before=back)]
        return found

    def _shifted(self, move: Action) -> Action:
        """A copy asked for a little earlier or later."""
        by, count = self._draw.choice((-40, -10, -3, -1, 1, 3, 10, 40)), len(self._trace.ops)
        if move.before is not None:
            return replace(move, before=min(max(int(move.before) + by, 0), count - 1))
        return replace(move, after=min(max(int(move.after or 0) + by, 0), count - 1))


def search(name: str, seconds: float, seed: int = 0) -> Found:
    """Half of the time for compositions, half for changes; what beats `hybrid` or the bound is printed."""
    cell, draw = CELLS[name], random.Random(seed)
    trace, machine = cell.trace, cell.platform
    kept = simulate(trace, machine, "keep_all", budget=PLENTY).log.end
    hybrid = simulate(trace, machine, "hybrid")
    bound = lower_bound(trace, machine, seconds=600.0).makespan_ns or 0

    def share(ns: int) -> str:
        return f"{100 * (ns / kept - 1):.3f} %"

    print(f"{name}: {machine.home().capacity / 1e9:.2f} GB, hybrid {share(hybrid.log.end)}, bound {share(bound)}")
    composed, changed = Found(hybrid.log.end), Found(hybrid.log.end)
    layers, began = int(trace.op_columns.layer.max()) + 1, time.process_time()
    best_composed: tuple[int, str] | None = None
    while time.process_time() - began < seconds / 2:
        text = composition(draw, layers)
        try:
            ns = simulate(trace, machine, text).log.end
            best_composed = min(best_composed or (ns, text), (ns, text))
        except TiersimError:
            ns = None
        composed.looked(ns, text)
    problem = problem_for(trace, machine)
    changes, actions, began = Changes(problem, draw), list(hybrid.plan.actions), time.process_time()
    while time.process_time() - began < seconds / 2:
        tried = changes.changed(actions)
        try:
            ns = problem.evaluate(Plan(trace, tuple(tried))).end
        except TiersimError:
            ns = None
        if changed.looked(ns, f"after {changed.tried} changes"):
            actions = tried
    for what, found in (("compositions", composed), ("changes", changed)):
        word = "BELOW THE BOUND " if found.ns < bound else "FASTER " if found.ns < hybrid.log.end else ""
        print(f"  {what}: {found.tried} tried, {found.fitted} fit; {word}{share(found.ns)} by {found.by}")
    if best_composed:
        print(f"  the best composition: {share(best_composed[0])} by {best_composed[1]}", flush=True)
    return min(composed, changed, key=lambda found: found.ns)


def main(arguments: Sequence[str]) -> None:
    """Search, or say what can be searched."""
    if not arguments:
        print("\n".join(f"{name}: {cell}" for name, cell in CELLS.items()))
        return
    search(arguments[0], float(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
