"""FlexGen: weights, cache and hidden states of inference over device, host and drive, by a linear program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen

from sim.errors import Deadlock, Infeasible, PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.flexgen.block import plan_of
from sim.policies.offload.flexgen.job import Job
from sim.policies.offload.flexgen.placement import Shares, cpu_engine, figures, placed

TRIED = (1.0, 0.95, 0.9, 0.8, 0.7, 0.55)
"""Parts of the device's memory that the program, whose count is an estimate, is given in turn, until its plan fits."""
ALL_AWAY = (0.0, 1.0) * 3
"""Fractions on device and host with which what the program calls impossible is tried, a batch at a time."""


@dataclass(frozen=True, kw_only=True)
class FlexGen(Policy):
    """Generate for a block of batches together, so that weights that are fetched serve all of them.

    The batches of a block run column by column: all of them pass a layer, then the next one, so that each layer's
    weights are fetched once per pass of a block and not per batch. Which part of the weights, of the key-value cache
    and of the hidden states resides on the device, on the host and on the drive behind it is what a linear program
    finds to take the least time per token; the number of batches is the one for which that is least. Weights come one
    layer ahead, cache and hidden states one batch ahead, and both leave when they are made. Attention to a cache on the
    host runs on its processor where a replay of the program's best plan either way says that this is faster.
    Source: Sheng, Zheng, Yuan, Li, Ryabinin, Fu, et al., "FlexGen: High-Throughput Generative Inference of Large
        Language Models with a Single GPU", ICML 2023, arXiv:2303.06865: section 4.1 (block schedule), 4.2 (placement),
        4.3 (cost model and program).
    Bounds: of W bytes of weights away from the device W cross its link per pass and block, batches of a block times
        less than batch by batch. A pass takes at least the largest of its copies per direction and its computation.
        The program has eleven columns and is solved for each number of batches; then a replay for each part of the
        memory that is tried and each place of attention, until one fits.
    Departs: bytes and times come from trace and machine, not from a model's sizes. The size of a batch is the trace's:
        batches are its independent parts (`micro_batches`). Whole tensors are placed, in proportion layer by layer, the
        cache by batch and layer, where the paper divides tensors. Links, not measured rates, set the paces, and their
        fixed times do not count in the program. The largest of copies and computation is that of a whole phase, as of
        its layers where these are alike; the paper's is per layer. Of the host it counts what resides there, and no
        buffers. No compression to 4 bits: weights of four bits are `frozen_dtype` of the workload. The program does not
        know by how much a replay needs more than it counts; it is repeated with less memory where its plan does not
        fit; where none does, everything is tried away from the device, batch by batch.

    batches: of a block; None for the number with the most tokens per second.
    attention: to what is not on the device: on the `device`, on the `host`'s processor, or `auto`.
    percent: instead of the program: weights on the device, on the host, cache on the device, on the host, hidden states
        on the device, on the host; the rest of each goes to the drive.
    Notes of the plan: `batches`, `block_ns` (the program's time of a block), `on_cpu`, and the parts of each.
    Raises PolicyError for a platform without host tier, a trace that is not inference on one device, attention on the
    host without an engine `cpu` there, or percents that leave something to a drive that does not exist; Infeasible
    where no placement fits.
    """

    moves = True
    rewrites = True
    needs = frozenset({"host", "inference"})
    manages = ("activations", "weights")
    solver = "lp"
    fidelity = "equations"
    rarely = "it moves only what the budget lacks"
    other_values = by_parameter(batches=1, attention="device", percent=(50, 50, 50, 50, 50, 50))

    batches: Annotated[int, Ge(1)] | None = None
    attention: Literal["auto", "device", "host"] = "auto"
    percent: Annotated[tuple[Annotated[int, Ge(0), Le(100)], ...], MinLen(6)] | None = None

    def __post_init__(self) -> None:
        if self.percent is None:
            return
        if len(self.percent) != 6:
            raise PolicyError(f"flexgen: percent: {len(self.percent)} numbers; it needs 6")
        for device, host in zip(self.percent[::2], self.percent[1::2], strict=True):
            if device + host > 100:
                raise PolicyError(f"flexgen: percent: {device} and {host} are more than 100")

    def plan(self, problem: Problem) -> Plan:
        """The fastest block by the program whose plan fits."""
        platform = problem.platform
        if platform.host is None:
            raise PolicyError(f"flexgen: {platform.name} has no host tier to offload to")
        tiers = (problem.home, *platform.cascade(platform.host.name)[:2])
        cpu = cpu_engine(platform, platform.host.name)
        if self.attention == "host" and cpu < 0:
            raise PolicyError(f"flexgen: {platform.name} has no engine 'cpu' at home in {platform.host.name!r}")
        job = Job(problem)
        fixed = self._fractions(tiers)
        averages = figures(job, cpu)
        error: Infeasible | Deadlock | None = None
        for share in (*TRIED, math.inf) if job.batches else ():
            last = share == math.inf
            fits: list[tuple[int, Plan]] = []
            for on_cpu in self._on_cpu(cpu):
                found = [
                    one
                    for count in ((1,) if last else self._counts(len(job.batches)))
                    if (one := placed(averages, job, tiers, count, on_cpu, share, fixed or (ALL_AWAY if last else ())))
                ]
                if not found:
                    continue
                plan = plan_of(job, min(found, key=lambda one: _per_batch(one, len(job.batches))), tiers)
                try:
                    fits.append((problem.evaluate(plan).end, plan))
                except (Infeasible, Deadlock) as refused:
                    error = refused
            if fits:
                return min(fits, key=lambda one: one[0])[1]
        if error is not None:
            raise error
        if not job.batches:
            return Plan(problem.trace)
        raise Infeasible(
            f"flexgen: no placement of weights, cache and hidden states fits {', '.join(map(repr, tiers))}"
        )

    def _fractions(self, tiers: tuple[str, ...]) -> tuple[float, ...]:
        if self.percent is None:
            return ()
        for device, host in zip(self.percent[::2], self.percent[1::2], strict=True):
            if device + host < 100 and len(tiers) < 3:
                raise PolicyError(f"flexgen: percent: {device} and {host} leave a part to a drive, and there is none")
        return tuple(part / 100 for part in self.percent)

    def _counts(self, most: int) -> Iterator[int]:
        """Batches of a block to try."""
        yield from range(1, most + 1) if self.batches is None else (min(self.batches, most),)

    def _on_cpu(self, cpu: int) -> tuple[bool, ...]:
        if self.attention == "auto":
            return (False, True) if cpu >= 0 else (False,)
        return (self.attention == "host",)


def _per_batch(shares: Shares, batches: int) -> float:
    """Time of all blocks, the last of which may be smaller, taken as in proportion."""
    return shares.ns * batches / shares.batches
