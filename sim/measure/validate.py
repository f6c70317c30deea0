"""Compares a real training step, under four ways of keeping activations, with the same step simulated.

The memory of the simulated step follows from the configuration alone. Its time comes from a profile of this machine, if
one is given (`tiersim calibrate` writes one), else from the op times of the real plain step; in that case the row of
`none` is an input, and the others are predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.errors import TiersimError, WorkloadError, near
from sim.experiment import simulate, unlimited
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.log import EventLog
from sim.measure import choose_device, require_torch
from sim.trace.graph import Trace
from workloads.measured import with_measured
from workloads.models import model_names, read_config
from workloads.transformer import transformer

TINY = {
    "model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 128, "vocab_size": 1024,
    "activation_function": "gelu_new",
}  # fmt: skip
"""The default model: takes seconds on any machine."""

POLICIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "none": ("keep_all", {}),
    "checkpoint": ("full_recompute", {}),
    "selective checkpoint": ("selective_recompute", {"recompute": "all_but_matmul"}),
    "save_on_cpu": ("save_on_cpu", {}),
}
"""The mechanism in PyTorch -> the policy that simulates it, with its parameters."""

PRECISIONS = ("fp32", "bf16", "amp_bf16")


@dataclass(frozen=True)
class Row:
    """One policy's peak and time, measured and simulated; None where `note` says why it was not run.

    policy: a key of `POLICIES`.
    simulated_by: the policy of this package.
    measured_bytes, simulated_bytes: peaks.
    measured_ns, simulated_ns: times of a step.
    note: remarks, "" for none.
    """

    policy: str
    simulated_by: str
    measured_bytes: int | None
    simulated_bytes: int | None
    measured_ns: int | None
    simulated_ns: int | None
    note: str = ""

    @property
    def memory_error(self) -> float | None:
        """Simulated / measured peak - 1."""
        return _error(self.simulated_bytes, self.measured_bytes)

    @property
    def time_error(self) -> float | None:
        """Simulated / measured time - 1."""
        return _error(self.simulated_ns, self.measured_ns)


def _error(ours: int | None, real: int | None) -> float | None:
    return ours / real - 1 if ours is not None and real else None


def validate(
    model: str | Mapping[str, Any] | None = None,
    *,
    batch: int = 4,
    sequence: int = 128,
    precision: str = "fp32",
    attention: str = "sdpa",
    device: str | None = None,
    repeats: int = 7,
    profile: Platform | None = None,
    policies: Sequence[str] = tuple(POLICIES),
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Run and simulate one step under each policy. Returns one row per policy.

    On CUDA the measured peak is `max_memory_allocated` minus the memory that is allocated between steps without
    belonging to a tensor of the step (cuBLAS's workspaces; a note says how much). It includes temporary workspaces of
    kernels and the allocator's rounding. On a CPU it is the bytes of live storages, which includes neither; dropout is
    0 there, because its CPU kernel saves a mask of another size.

    model: a GPT-2 or a Llama by name, a config, or None for a tiny GPT-2.
    batch, sequence: samples per step, tokens per sample.
    precision: fp32, bf16 or amp_bf16.
    attention: sdpa or eager.
    device: `cuda` or `cpu`; by default `cuda` where there is such a device.
    repeats: timed steps per policy, of which the median counts.
    profile: of this machine, for the simulated times.
    policies: names in `POLICIES`.
    progress: called with what is running.

    Raises TiersimError without PyTorch or the device, WorkloadError for a model of another family.
    """
    require_torch("tiersim validate")
    from sim.measure.steps import Steps

    place = choose_device(device)
    if precision not in PRECISIONS:
        raise WorkloadError(f"precision {precision!r} cannot be validated{near(precision, PRECISIONS)}")
    if attention not in ("sdpa", "eager"):
        raise WorkloadError(f"attention {attention!r} cannot be validated{near(attention, ('sdpa', 'eager'))}")
    if repeats < 1:
        raise TiersimError(f"repeats must be at least 1, not {repeats}")
    for policy in policies:
        if policy not in POLICIES:
            raise TiersimError(f"policy {policy!r} cannot be validated{near(policy, POLICIES)}")
    config = config_of(TINY if model is None else model, sequence)
    on_cuda = place.startswith("cuda")
    dropout = 0.1 if on_cuda and config["model_type"] == "gpt2" else 0.0
    trace = transformer(
        config, batch=batch, sequence=sequence, precision=precision, attention=attention, dropout=dropout
    )
    steps = Steps(config, batch, sequence, precision, attention, dropout, place)
    report = progress or (lambda text: None)
    run = [policy for policy in policies if on_cuda or policy != "save_on_cpu"]
    peaks, beside = {}, {}
    for policy in run:
        report(f"{policy}: memory of a step on {place}")
        peaks[policy], beside[policy] = steps.peak(policy), steps.beside
    report(f"{repeats} steps under each policy, in turn")
    times = steps.times(run, repeats)
    report("op times of the plain step")
    timed = _timed(trace, steps, times.get("none") or steps.times(["none"], repeats)["none"]) if not profile else trace
    platform = roomy(*steps.copy_rates()) if profile is None else unlimited(profile)
    rows = []
    for policy in policies:
        name, parameters = POLICIES[policy]
        if policy not in run:
            rows.append(
                Row(policy, name, None, None, None, None, "the host is the device here: nothing would be moved")
            )
            continue
        report(f"{policy}: simulated by {name}")
        log = simulate(timed, platform, name, **parameters).log
        peak = rounded_peak(log, 512 if on_cuda else 1)
        notes = ["its op times are the measured ones"] if policy == "none" and profile is None else []
        if beside[policy]:
            notes.append(f"{beside[policy] / 2**20:.1f} MiB outside the step's tensors left out")
        rows.append(Row(policy, name, peaks[policy], peak, times[policy], log.end, "; ".join(notes)))
    return rows


def config_of(model: str | Mapping[str, Any], sequence: int) -> dict[str, Any]:
    """Keys of a `config.json` for `sim.measure.steps`. Raises WorkloadError for a family that is not supported."""
    config = read_config(model)
    positions = max(config.positions, sequence)
    if config.family == "gpt2":
        return {
            "model_type": "gpt2",
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_embd": config.hidden,
            "n_positions": positions,
            "vocab_size": config.vocabulary,
            "activation_function": "gelu_new",
        }
    if config.family == "llama" and not config.biases and config.activation == "silu":
        return {
            "model_type": "llama",
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head,
            "hidden_size": config.hidden,
            "intermediate_size": config.ffn,
            "max_position_embeddings": positions,
            "vocab_size": config.vocabulary,
            "tie_word_embeddings": config.tied,
        }
    names = [name for name in model_names() if name.startswith(("gpt2", "llama"))]
    raise WorkloadError(f"model {config.name!r} is neither a GPT-2 nor a Llama{near(config.name, names)}")


def _timed(trace: Trace, steps: Any, plain_ns: int) -> Trace:
    """The trace with op durations of the plain step, scaled so that they sum to its time."""
    ops = steps.op_times()
    spent = {phase: sum(op.ns for op in ops if op.phase == phase) for phase in ("forward", "backward", "update")}
    total = sum(spent.values())
    return with_measured(trace, ops, phase_ns={p: round(plain_ns * ns / total) for p, ns in spent.items()}).trace


def roomy(out: int, back: int) -> Platform:
    """A machine with unlimited memory, for traces with measured op times.

    out, back: rates of copies to and from the host in bytes/s.
    """
    capacity = 1 << 60
    return Platform(
        "this machine",
        (Tier("hbm", capacity, capacity, 10**12, device=0), Tier("host", capacity, capacity, 10**11, kind="ddr")),
        (Engine("device", 0, "hbm", ("hbm",), {"fp32": 10**13}),),
        (Link("d2h", "hbm", "host", out), Link("h2d", "host", "hbm", back)),
    )


def rounded_peak(log: EventLog, unit: int) -> int:
    """The peak bytes in the home tier of device 0 with every tensor rounded up to a multiple of `unit` bytes."""
    in_home = log.change("tier") == log.platform.tier_ids[log.platform.home(0).name]
    delta = log.change("delta")[in_home]
    return int(np.cumsum(np.sign(delta) * (-(-np.abs(delta) // unit) * unit)).max(initial=0))


def as_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Rows to print: policy, measured and simulated MiB and milliseconds with their errors, note."""

    def cell(value: float | None, form: str, scale: float = 1.0) -> str:
        return "–" if value is None else format(value / scale, form)

    return [
        (
            row.policy,
            cell(row.measured_bytes, ",.2f", 2**20),
            cell(row.simulated_bytes, ",.2f", 2**20),
            cell(row.memory_error, "+.2%"),
            cell(row.measured_ns, ",.2f", 1e6),
            cell(row.simulated_ns, ",.2f", 1e6),
            cell(row.time_error, "+.1%"),
            row.note,
        )
        for row in rows
    ]


HEADER = ("policy", "real MiB", "simulated", "error", "real ms", "simulated", "error", "note")
"""Headings of the columns of `as_table`."""
