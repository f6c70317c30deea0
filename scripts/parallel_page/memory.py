"""What the first stage of Korthikanti's four models holds, printed and simulated.

Printed are, of the layers alone, bytes of weights, gradients and optimizer states (18 per parameter), and bytes of
activations that wait for backward when most microbatches are in flight. Both are read off the log here: of what the
layers read, what exists before the first op, and what forward has made when a microbatch's backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from scripts.parallel_page.measure import NO_LIMIT, PROFILE, SEQUENCE, VOCABULARY, Row, published
from sim import simulate
from sim.analysis.stages import stages
from sim.layout import lay_out
from sim.log import WHYS, EventLog
from sim.policies import load as load_policy
from sim.trace.layers import op_layers
from sim.trace.op import PHASE_CODE
from workloads import transformer, with_stack

RUN, AGAIN = WHYS.index("run"), WHYS.index("recompute")
MASK = "mask."
"""What the mask of the scores is called, which eager attention reads and Megatron-LM's kernel does without."""
CORE = {"recompute": "attention_core"}
WAYS: Mapping[str, tuple[str, Mapping[str, str], bool]] = {
    "none": ("keep_all", {}, False),
    "seq": ("keep_all", {}, True),
    "sel": ("selective_recompute", CORE, False),
    "seqsel": ("selective_recompute", CORE, True),
    "full": ("full_recompute", {}, False),
}
"""As the figures name them: the policy, its parameters, and whether tokens are divided outside of attention, too."""


def memory() -> Iterator[Row]:
    """Each model in each way, with as many microbatches as fill the pipeline."""
    for name, heads, width, layers, tp, pp, chunks, _, _, batch, *_ in published()["korthikanti"]:
        config = {
            "model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": SEQUENCE,
            "vocab_size": VOCABULARY, "activation_function": "gelu",
        }  # fmt: skip
        n = pp if chunks == 1 else 2 * pp
        base = transformer(
            config, batch=batch * n, sequence=SEQUENCE, precision="megatron_bf16", attention="eager",
            loss="vocab_parallel", optimizer="adamw_fused",
        )  # fmt: skip
        for way, (policy, parameters, by_tokens) in WAYS.items():
            layout: dict[str, Any] = {"tp": tp, "pp": pp, "micro_batches": n, "sequence_parallel": by_tokens}
            layout |= {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {}
            layout |= {"gradient_buffer": True}
            trace, platform = lay_out(base, PROFILE, layout, kernels=partial(with_stack, stack="fused"))
            log = simulate(trace, platform, load_policy(policy, **parameters), budget=NO_LIMIT).log
            state, saved = held_by_layers(log)
            sizes = {"state_gib": state, "activations_gib": saved, "peak_gib": stages(log)[0].peak_bytes}
            yield {"model": name, "way": way, **{key: round(size / 2**30, 3) for key, size in sizes.items()}}


def held_by_layers(log: EventLog) -> tuple[int, int]:
    """Of the layers of the first device: bytes that exist from the start, and the most bytes that forward has made
    for them and that wait for backward, when a microbatch's backward begins.

    What is recomputed does not wait, and what backward makes is not counted.
    """
    trace, platform = log.trace, log.platform
    phase, producer = np.asarray(trace.op_columns.phase), np.asarray(trace.producer)
    tensor, time, delta = (log.change(column) for column in ("tensor", "time", "delta"))
    layer, names = op_layers(trace), trace.tensor_columns.name
    at_home = (log.change("tier") == platform.tier_ids[platform.home(0).name]) & (tensor >= 0)
    born = at_home & (producer[tensor] < 0)
    born &= np.asarray(trace.tensor_columns.layer)[tensor] >= 0
    forward = np.flatnonzero((producer >= 0) & (phase[producer] == PHASE_CODE["forward"])).tolist()
    waits = np.zeros(len(producer), bool)
    of_layers = (t for t in forward if any(layer[op] >= 0 for op in trace.readers(t)))
    waits[[t for t in of_layers if not names[t].startswith(MASK)]] = True
    made = at_home & waits[tensor]
    most = 0
    for end in _turns(log, phase):
        there = made & ((time < end) | ((time == end) & (delta < 0)))
        most = max(most, int(delta[there].sum()))
    return int(delta[born & (log.change("op") < 0)].clip(min=0).sum()), most


def _turns(log: EventLog, phase: np.ndarray) -> list[int]:
    """The ends of forward ops of the first device after which it goes on to backward, or recomputes for it."""
    op, why = log.interval("op"), log.interval("why")
    own = np.flatnonzero((log.interval("device") == 0) & (op >= 0) & np.isin(why, [RUN, AGAIN]))
    own = own[np.argsort(log.interval("start")[own], kind="stable")]
    forward = (phase[op[own]] == PHASE_CODE["forward"]) & (why[own] == RUN)
    last = np.flatnonzero(forward[:-1] & ~forward[1:])
    ends: list[int] = log.interval("end")[own[last]].tolist()
    return ends


__all__ = ["WAYS", "held_by_layers", "memory"]
