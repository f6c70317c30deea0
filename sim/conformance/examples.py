"""Random examples: a trace, a platform and a budget that meet a policy's needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sim.conformance.digits import Digits
from sim.conformance.models import generations, models
from sim.conformance.random_platforms import Document, platform_of, random_platforms
from sim.conformance.random_traces import random_traces
from sim.engine.allocators.cached_blocks import SMALL_REQUEST
from sim.experiment import reference_run
from sim.hardware.platform import Platform
from sim.log import CAUSE, EventLog
from sim.policies.base import Policy
from sim.trace.graph import Trace

DISPATCH_SCALE = Decimal("0.0005")
"""Makes nanoseconds, as ops take here, of the microseconds of a CPU that dispatches them."""

SPARE = (100, 60, 45, 30, 15, 70, 5, 50, 20, 0, 80, -10)
"""Budgets, in percent of the way from the largest working set to the unconstrained peak."""


def examples_for(policy: Policy) -> st.SearchStrategy[Example]:
    """Examples for a policy: they meet its needs, and are small if it plans slowly."""
    launches = not policy.optimal  # an optimum is one of times of ops that add up
    if policy.slow:
        return random_examples(policy.needs, real=0, longest=8, launches=launches)
    return random_examples(policy.needs, launches=launches)


@dataclass(frozen=True)
class Example:
    """A trace, a platform as the document of its profile, and a budget in bytes.

    ample: a budget in bytes that keeping everything fits into, 0 if nobody knows.
    called: the name of the platform, "" for the usual one.
    """

    trace: Trace
    machine: Document
    budget: int
    ample: int = 0
    called: str = ""

    @property
    def platform(self) -> Platform:
        """The platform with that budget."""
        platform = platform_of(self.machine, self.budget)
        return replace(platform, name=self.called) if self.called else platform

    def with_more_memory(self) -> Iterator[Example]:
        """This one, one with half of what it lacks, and one with ample memory."""
        yield self
        for budget in ((self.budget + self.ample) // 2, self.ample):
            if budget > self.budget:
                yield replace(self, budget=budget)


@st.composite
def random_examples(
    draw: st.DrawFn,
    needs: frozenset[str] = frozenset(),
    *,
    exact: bool = False,
    real: int = 1,
    longest: int = 0,
    launches: bool = False,
) -> Example:
    """A trace and a platform that meet a policy's needs, and a budget from ample to too little.

    exact: whether allocators with addresses are left out.
    real: of ten traces, how many are of small models.
    longest: most forward ops of the other traces, 0 for what suits the needs.
    launches: whether on three machines of ten the device waits for a CPU that dispatches its ops.
    """
    digits = Digits(draw(st.integers(0, 6 * 8 * 8 * 8 * len(SPARE) - 1)))
    one = digits.pick((True,) * 5 + (False,)) or bool(needs & {"chain", "history", "inference"})
    one = one and "peers" not in needs
    cpu = digits.pick((False, True, False, False, True, False, False, False)) or "cpu" in needs
    host = digits.pick((True,) * 7 + (False,)) or bool(needs & {"host", "cpu"})
    spare, tight = digits.pick(SPARE), digits.pick((0, 0, 0, 0, 0, 10, 50, 100))
    if "peers" in needs:
        spare = (100 + spare) // 2  # what one stage lacks another one has only where little is lacking
    stores = {store: store in needs for store in ("drive", "slc", "pool")}
    machine = draw(
        random_platforms(devices=1 if one else 2 + ("peers" in needs), host=host, cpu=cpu, exact=exact, **stores)
    )
    kind = draw(st.integers(0, 9))
    if launches and kind % 3 == 1:
        machine = {**machine, "dispatch": "cpu", "dispatch_scale": DISPATCH_SCALE}
    real_model = kind >= 10 - real and not needs & {"inference", "peers"}
    generates = "inference" in needs and bool(kind % 2)
    caches = machine["tiers"]["hbm"]["allocator"] == "caching"
    if caches and (real_model or generates):  # small models fit into the first segment, whatever the budget
        machine, caches = _with(machine, "hbm", allocator="exact"), False
    unit = SMALL_REQUEST // 2 if caches else 1  # tensors need segments of both pools
    if generates:
        trace = draw(generations())
    elif real_model:
        trace = draw(models())
    else:
        steps = longest or (18 if needs & {"chain", "layers"} else 36 if "peers" in needs else 12)
        trace = draw(random_traces(needs=needs, devices=1 if one else 2, cpu=cpu, unit=unit, longest=steps))
    log = reference_run(trace, platform_of(machine))
    if tight and host:
        # a host that holds its initial tensors, and some percent of what the device needs
        most = {tier.name: peak for tier, peak in zip(log.platform.tiers, _peaks(log))}
        left = most["host"] + max(most.values()) * tight // 100
        machine = _with(machine, "host", capacity=f"{max(left, 1)} B")
    top, floor = _peak_and_floor(log)
    # addresses may leave gaps: a quarter on top is ample
    return Example(trace, machine, max(1, floor + (top - floor) * spare // 100), ample=top + top // 4)


def _with(machine: Document, tier: str, **fields: Any) -> Document:
    """The machine with other fields of a tier."""
    return {**machine, "tiers": {**machine["tiers"], tier: {**machine["tiers"][tier], **fields}}}


def _peaks(log: EventLog) -> list[int]:
    """The most bytes in use, or reserved by an allocator that caches, per tier."""
    tables = (log.changes, log.reserved)
    return [
        max(int(np.cumsum(rows[rows[:, 1] == i, 2]).max(initial=0)) for rows in tables)
        for i in range(len(log.platform.tiers))
    ]


def _peak_and_floor(log: EventLog) -> tuple[int, int]:
    """The unconstrained peak of a device's memory, and its initial tensors plus the largest working set, in bytes."""
    platform, trace, peaks = log.platform, log.trace, _peaks(log)
    size, top, floor = trace.tensor_columns.bytes, 0, 0
    for i, tier in enumerate(platform.tiers):
        if tier.device < 0:
            continue
        top = max(top, peaks[i])
        rows = log.changes[(log.changes[:, 1] == i) & (log.changes[:, 5] == CAUSE["placed"])]
        fixed = set(rows[:, 3].tolist())
        need = 0
        for op in trace.ops:
            if platform.home(op.device).name == tier.name:
                used = sum(int(size[t]) for t in {*op.reads, *op.writes} if t not in fixed)
                need = max(need, op.workspace + used)
        floor = max(floor, int(rows[:, 2].sum()) + need)
    return top, min(top, floor)


def for_each(drawn: st.SearchStrategy[Example], look: Callable[[Example], None], count: int, first: int) -> None:
    """Call `look` with `count` examples, which depend on the seed `first` alone."""

    @seed(first)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def all_of_them(example: Example) -> None:
        look(example)

    with on_its_own():
        all_of_them()


@contextmanager
def on_its_own() -> Iterator[None]:
    """Keep hypothesis from reading constants out of the user's files: examples would change with them.

    So does what it has read before, for other tests of the process. It would also leave a folder of what it read where
    the user works.
    """
    from hypothesis.internal.conjecture import providers

    instead: dict[str, Any] = {"_get_local_constants": getattr(providers, "Constants", None), "CONSTANTS_CACHE": {}}
    own = {name: getattr(providers, name) for name in instead if hasattr(providers, name) and instead[name] is not None}
    for name in own:
        setattr(providers, name, instead[name])
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(providers, name, value)
