"""What a user waits for: `simulate()` on a shipped profile, planning included, in a process of its own.

    python benchmarks/simulate.py KIND SIZE POLICY [SHARE]

KIND is `w1` or `chain`, of SIZE layers, or `gpt2`, GPT-2 medium with SIZE layers. POLICY may have parameters, SHARE
is its budget as a part of what keeping everything needs. Prints one JSON record: processor seconds of the first call on
that trace, of a bare SimPy loop with as many timeouts as the trace has ops, in this process, and of a further call.

Nothing is done to the garbage collector. What is loaded on first use is loaded before, by the same policy on a trace of
two layers; building the trace, reading the profile and the run without a limit that the budget is a share of are not
timed either.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from benchmarks.speed import bare
from sim import load_policy, load_profile, simulate
from sim.analysis.peak_memory import home_peak
from sim.errors import TiersimError
from sim.experiment import reference_run
from sim.trace.graph import Trace
from workloads import chain, transformer, w1

PROFILE = "a100_40_pcie"
LONG_S = 1.0
"""Of what takes longer, further calls are not timed."""
MIB = 1 << 20
GPT2_MEDIUM = {
    "model_type": "gpt2",
    "n_embd": 1024,
    "n_head": 16,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}


def rotor_chain(layers: int) -> Trace:
    """Equal blocks, backward twice as long as forward: 16 MiB between blocks, 17 times as much saved in each."""
    a = 16 * MIB
    times = [1_000_000] * layers, [2_000_000] * layers
    return chain(*times, [a] * (layers + 1), [17 * a] * layers, backward_temp=[17 * a] * layers)


def gpt2(layers: int) -> Trace:
    """GPT-2 medium with so many layers, 4 samples of 1,024 tokens."""
    return transformer({**GPT2_MEDIUM, "n_layer": layers}, batch=4, sequence=1024, precision="amp_bf16")


TRACES: dict[str, Callable[[int], Trace]] = {"w1": w1, "chain": rotor_chain, "gpt2": gpt2}


def least(times: int, run: Callable[[], object]) -> float:
    """The least processor seconds of some runs."""
    found = []
    for _ in range(times):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return min(found)


def timed(kind: str, size: int, policy: str, share: float | None = None) -> dict[str, Any]:
    """The record of one case."""
    platform, chosen = load_profile(PROFILE), load_policy(policy)

    def budget(trace: Trace, part: float) -> int:
        return int(part * home_peak(reference_run(trace, platform)))

    small, trace = TRACES[kind](2), TRACES[kind](size)
    for part in (share or 1.0, 1.0):
        with suppress(TiersimError):  # a small trace may not fit its share
            simulate(small, platform, chosen, budget=budget(small, part))
    limit, status = budget(TRACES[kind](size), share or 1.0), "ok"  # of its twin: nothing of this one is prepared
    began = time.process_time()
    try:
        simulate(trace, platform, chosen, budget=limit)
    except TiersimError as error:
        status = type(error).__name__
    took = time.process_time() - began
    ops = len(trace.op_columns.name)
    loop = least(5, lambda: bare(ops))
    found: dict[str, Any] = {"ops": ops, "status": status, "cpu_s": took, "bare_s": loop, "ratio": took / loop}
    if status == "ok" and took < LONG_S:
        calls = max(1, int(0.05 / max(took, 0.001)))  # some clocks tick only every few milliseconds
        found["again_s"] = least(3, lambda: [simulate(trace, platform, chosen, budget=limit) for _ in range(calls)])
        found["again_s"] /= calls
    return found


if __name__ == "__main__":
    kind, size, policy, *rest = sys.argv[1:]
    print(json.dumps(timed(kind, int(size), policy, float(rest[0]) if rest else None)))
