"""How fast the engine is: each case against a bare SimPy `timeout` loop of as many ops, in one process.

    python benchmarks/speed.py [--layers 96] [--repeats 7] [--json]

The ratio is the figure; microseconds depend on the machine. Cases run in turn and the least time of
each counts, so that other work on the machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import simpy

from sim.analysis.peak_memory import peak_bytes
from sim.engine.prepare import prepare
from sim.engine.replay import replay
from sim.experiment import problem_for, simulate
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.hardware.profile import load_profile
from sim.plan import Plan
from sim.policies import load
from sim.trace.graph import Trace
from workloads import w1

GB = 10**9


def platform(capacity: int = 10**12) -> Platform:
    """One device with the figures of W1, a host, and a link each way on which copies queue."""
    return Platform(
        "w1",
        (Tier("hbm", capacity, capacity, 1500 * GB, device=0), Tier("host", 10**13, 10**13, 100 * GB)),
        (Engine("gpu", 0, "hbm", ("hbm",), {"fp16": 156 * 10**12}),),
        (Link("d2h", "hbm", "host", 25 * GB), Link("h2d", "host", "hbm", 25 * GB)),
    )


def bare(ops: int) -> None:
    """The floor: one process that waits for as many timeouts as there are ops."""
    env = simpy.Environment()

    def process() -> simpy.events.ProcessGenerator:
        for _ in range(ops):
            yield env.timeout(1)

    env.process(process())
    env.run()


def cases(trace: Trace) -> dict[str, Callable[[], object]]:
    """What is measured: replays of a ready plan, and whole runs, planning included, on one trace."""
    machine = platform()
    prepare(trace, machine)  # flat lists, made once a trace and shared by all runs, as in a sweep
    peak = peak_bytes(replay(Plan(trace), machine))["hbm"]
    recompute = load("full_recompute").plan(problem_for(trace, machine))
    swap = load("swap_all").plan(problem_for(trace, machine))
    prepare(swap.trace, machine)
    tight, shipped = int(0.6 * peak), load_profile("a100_80_sxm")
    return {
        "keep_all": lambda: replay(Plan(trace), machine),
        "full_recompute": lambda: replay(recompute, machine),
        "swap_all": lambda: replay(swap, machine),
        "swap_all, planned": lambda: simulate(trace, shipped, "swap_all", budget="10 TB"),
        "dtr with room": lambda: simulate(trace, machine, "dtr"),
        "lru_tiering at 0.6": lambda: simulate(trace, machine, "lru_tiering", budget=tight),
        "dtr_eq at 0.6": lambda: simulate(trace, machine, "dtr", heuristic="dtr_eq", budget=tight),
        "dtr at 0.6": lambda: simulate(trace, machine, "dtr", heuristic="dtr", budget=tight),
    }


def measure(trace: Trace, names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Per case its microseconds an op and its ratio to the bare loop."""
    ops = len(trace.ops)
    runs = {"bare": lambda: bare(ops)} | {name: run for name, run in cases(trace).items() if name in names}
    best = dict.fromkeys(runs, float("inf"))
    with only_own_garbage():
        for _ in range(repeats):
            for name, run in runs.items():
                began = time.process_time()
                run()
                best[name] = min(best[name], time.process_time() - began)
    return {name: {"us_per_op": s / ops * 1e6, "ratio": s / best["bare"]} for name, s in best.items()}


@contextmanager
def only_own_garbage() -> Iterator[None]:
    """Python's collector passes over what was there before, or a run would pay for the size of its process."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    trace = w1(words.layers)
    found = measure(trace, list(cases(trace)), words.repeats)
    if words.json:
        print(json.dumps({"layers": words.layers, "ops": len(trace.ops), "cases": found}, indent=2))
        return
    print(f"W1, {words.layers} layers, {len(trace.ops)} ops")
    for name, figures in found.items():
        print(f"{name:14} {figures['us_per_op']:9.2f} us an op {figures['ratio']:8.1f} times bare")


if __name__ == "__main__":
    main()
