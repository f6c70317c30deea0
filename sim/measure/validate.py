"""Compares a real training step, under four ways of keeping activations, with the same step simulated.

A GPT-2 or a Llama is run. The memory of the simulated step follows from the configuration alone. Its time comes from a
profile of this machine, if one is given (`tiersim calibrate` writes one), else from the op times of the real plain
step; in that case the row of `none` is an input, and the others are predictions.

Any other model is captured: PyTorch's memory tracker observes its step under fake tensors (see `sim.measure.tracked`),
and there are no times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sim.analysis.peak_memory import peaks_by_phase
from sim.errors import PolicyError, TiersimError, TraceError, WorkloadError, closest, near
from sim.experiment import simulate, unlimited
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.measure import choose_device, require_torch
from sim.trace.graph import Trace
from workloads.capturing.reference import Unsized
from workloads.capturing.selections import Selected
from workloads.measured import with_measured
from workloads.models import model_names, read_config
from workloads.other_models import NotBuiltIn
from workloads.steps import is_reference
from workloads.transformer import transformer

if TYPE_CHECKING:
    from sim.measure.captured import CapturedStep

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
SEQUENCE = 128
"""Tokens per sample where nothing else is asked for."""

BATCHES = (2, 4, 8, 16, 32, 64, 256, 1024, 4096)
APART = 0.01
"""Batches that are tried in turn where none is asked for, until the simulated peaks differ by this share."""

CHECKPOINTED = "under the checkpoints of {}"
RECOMPUTES = "the step recomputes under checkpoints of its own: validate it without them"
ONE_MEMORY = "fake tensors have one memory: nothing would be moved"


class NotRun(WorkloadError):
    """A model that is not among those that are run here; it is captured."""


@dataclass(frozen=True)
class Row:
    """One policy's peak and time, measured and simulated; None where `note` says why it was not run.

    policy: a key of `POLICIES`.
    simulated_by: the policy of this package.
    measured_bytes, simulated_bytes: peaks.
    measured_ns, simulated_ns: times of a step; a captured step has none that is measured.
    note: remarks, "" for none.
    batch: samples of the step.
    measured_phases, simulated_phases: peaks within `forward`, `backward` and `update`.
    """

    policy: str
    simulated_by: str
    measured_bytes: int | None
    simulated_bytes: int | None
    measured_ns: int | None
    simulated_ns: int | None
    note: str = ""
    batch: int | None = None
    measured_phases: Mapping[str, int] | None = None
    simulated_phases: Mapping[str, int] | None = None

    @property
    def memory_error(self) -> float | None:
        """Simulated / measured peak - 1."""
        return _error(self.simulated_bytes, self.measured_bytes)

    @property
    def time_error(self) -> float | None:
        """Simulated / measured time - 1."""
        return _error(self.simulated_ns, self.measured_ns)

    def phase_error(self, phase: str) -> float | None:
        """Simulated / measured peak within a phase - 1."""
        return _error((self.simulated_phases or {}).get(phase), (self.measured_phases or {}).get(phase))


def _error(ours: int | None, real: int | None) -> float | None:
    return ours / real - 1 if ours is not None and real else None


def _most(peaks: Mapping[str, int] | None) -> int | None:
    return max(peaks.values()) if peaks else None


def validate(
    model: str | Mapping[str, Any] | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: str = "fp32",
    attention: str = "sdpa",
    selected: Selected = None,
    device: str | None = None,
    repeats: int = 7,
    profile: Platform | None = None,
    policies: Sequence[str] = tuple(POLICIES),
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Run (or track) and simulate one step under each policy. Returns one row per policy.

    On CUDA the measured peak is `max_memory_allocated` minus the memory that is allocated between steps without
    belonging to a tensor of the step (cuBLAS's workspaces; a note says how much). It includes temporary workspaces of
    kernels and the allocator's rounding. On a CPU it is the bytes of live storages, which includes neither; dropout is
    0 there, because its CPU kernel saves a mask of another size. Of a captured model it is that of PyTorch's memory
    tracker under fake tensors, with the library's own checkpoints or, if it has none, PyTorch's round each layer.

    model: a GPT-2 or a Llama by name, a config, or None for a tiny GPT-2; these are run. Any other `config.json`, and
        a function (`FILE.py:FUNCTION`), are captured.
    batch: samples per step; None for the first of `BATCHES` at which the simulated peaks of the policies differ, so
        that not all are those of the optimizer. A function without that parameter has its own.
    sequence: tokens per sample; by default 128, the positions of a GPT-2 that has fewer, or what a function has.
    precision: fp32, bf16 or amp_bf16.
    attention: sdpa or eager.
    selected: of a captured model, as for `workloads.capture.capture`.
    device: `cuda` or `cpu`; by default `cuda` where there is such a device.
    repeats: timed steps per policy, of which the median counts.
    profile: of this machine, for the simulated times.
    policies: names in `POLICIES`.
    progress: called with what is running.

    Raises TiersimError without PyTorch or the device, WorkloadError for a model that can't be captured.
    """
    require_torch("tiersim validate")
    _check(precision, attention, repeats, policies)
    report = progress or (lambda text: None)
    model = TINY if model is None else model
    try:
        usual = SEQUENCE if is_reference(model) else _usual_length(model)
        length = usual if sequence is None else sequence
        config = None if is_reference(model) else config_of(model, length)
    except (NotRun, NotBuiltIn):
        config = None
    if config is not None:
        if selected is not None:
            raise WorkloadError("selected: this model is run, not captured; leave it out")
        job = _Job(config, length, precision, attention, choose_device(device), repeats, profile)
        return job.rows(batch, policies, report)
    from sim.measure.captured import captured_step

    if device is not None:
        raise TiersimError(f"device {device!r}: a captured model runs on none; its tensors are fake")
    step = captured_step(model, precision, attention, selected)
    return _tracked(step, model, batch, sequence, profile, policies, report)


def _check(precision: str, attention: str, repeats: int, policies: Sequence[str]) -> None:
    if precision not in PRECISIONS:
        raise WorkloadError(f"precision {precision!r} cannot be validated{near(precision, PRECISIONS)}")
    if attention not in ("sdpa", "eager"):
        raise WorkloadError(f"attention {attention!r} cannot be validated{near(attention, ('sdpa', 'eager'))}")
    if repeats < 1:
        raise TiersimError(f"repeats must be at least 1, not {repeats}{closest(repeats, 1)}")
    for policy in policies:
        if policy not in POLICIES:
            raise TiersimError(f"policy {policy!r} cannot be validated{near(policy, POLICIES)}")


# ---- models that are run -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    config: Mapping[str, Any]
    sequence: int
    precision: str
    attention: str
    device: str
    repeats: int
    profile: Platform | None

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def dropout(self) -> float:
        return 0.1 if self.on_cuda and self.config["model_type"] == "gpt2" else 0.0

    def trace(self, batch: int) -> Trace:
        return transformer(
            self.config,
            batch=batch,
            sequence=self.sequence,
            precision=self.precision,
            attention=self.attention,
            dropout=self.dropout,
        )

    def rows(self, batch: int | None, policies: Sequence[str], report: Callable[[str], None]) -> list[Row]:
        from sim.measure.steps import Steps

        run = [policy for policy in policies if self.on_cuda or policy != "save_on_cpu"]
        batch = batch or _chosen(self.trace, run, report, _free_bytes(self.device))
        trace = self.trace(batch)
        steps = Steps(self.config, batch, self.sequence, self.precision, self.attention, self.dropout, self.device)
        peaks, beside = {}, {}
        for policy in run:
            report(f"{policy}: memory of a step on {self.device}")
            peaks[policy], beside[policy] = steps.peaks(policy), steps.beside
        report(f"{self.repeats} steps under each policy, in turn")
        times = steps.times(run, self.repeats)
        if self.profile is None:
            report("op times of the plain step")
            trace = _timed(trace, steps, times.get("none") or steps.times(["none"], self.repeats)["none"])
        platform = roomy(*steps.copy_rates()) if self.profile is None else unlimited(self.profile)
        rows = []
        for policy in policies:
            name, parameters = POLICIES[policy]
            if policy not in run:
                note = "the host is the device here: nothing would be moved"
                rows.append(Row(policy, name, None, None, None, None, note))
                continue
            report(f"{policy}: simulated by {name}")
            log = simulate(trace, platform, name, **parameters).log
            found = peaks_by_phase(log, unit=512 if self.on_cuda else 1)
            notes = ["its op times are the measured ones"] if policy == "none" and self.profile is None else []
            if beside[policy]:
                notes.append(f"{beside[policy] / 2**20:.1f} MiB outside the step's tensors left out")
            both = _most(peaks[policy]), _most(found), times[policy], log.end
            rows.append(Row(policy, name, *both, "; ".join(notes), batch, peaks[policy], found))
        return rows


# ---- models that are captured --------------------------------------------------------------------


def _tracked(
    step: CapturedStep,
    model: Any,
    batch: int | None,
    sequence: int | None,
    profile: Platform | None,
    policies: Sequence[str],
    report: Callable[[str], None],
) -> list[Row]:
    from sim.applying.parts import modules_of
    from sim.measure.tracked import POLICIES as TRACKED
    from sim.measure.tracked import Tracked

    fixed = {} if sequence is None and is_reference(model) else {"sequence": sequence or SEQUENCE}
    run = [policy for policy in policies if policy in TRACKED]
    simulated = cache(lambda batch: step.simulated({**fixed, **({"batch": batch} if batch else {})}))
    with suppress(Unsized):
        batch = batch or _chosen(simulated, run, report)
    trace = simulated(batch)
    if trace.meta.get("recomputed"):
        run = [policy for policy in run if policy == "none"]
    sizes = {**fixed, **({"batch": batch} if batch else {})}
    captured = trace.meta.get("layer_names")
    layers = [module.path for module in modules_of(trace)] if captured is None else captured
    rows = []
    for policy in policies:
        name, parameters = POLICIES[policy]
        if policy not in run:
            rows.append(Row(policy, name, None, None, None, None, RECOMPUTES if policy in TRACKED else ONE_MEMORY))
            continue
        report(f"{policy}: memory of a fake step under PyTorch's tracker")
        tracker = Tracked(policy, layers)
        step.observed(sizes, tracker)
        notes = [CHECKPOINTED.format(tracker.whose)] if tracker.whose else []
        found, end = None, None
        try:
            log = simulate(trace, unlimited(profile) if profile else roomy(10**10, 10**10), name, **parameters).log
            found, end = peaks_by_phase(log), log.end if profile else None
        except (PolicyError, TraceError) as error:
            notes.append(str(error))
        both = _most(tracker.highest), _most(found), None, end
        rows.append(Row(policy, name, *both, "; ".join(notes), batch, tracker.highest, found))
    return rows


# ---- both ----------------------------------------------------------------------------------------


def _chosen(
    trace: Callable[[int], Trace], policies: Sequence[str], report: Callable[[str], None], room: int | None = None
) -> int:
    """The first batch at which the simulated peaks of the policies differ, or the largest tried.

    room: bytes that the step may take, None for any number.
    """
    fitting = BATCHES[0]
    for batch in BATCHES:
        report(f"batch {batch}: do the peaks of the policies differ?")
        if trace(batch).meta.get("recomputed"):
            return batch  # whatever the batch, its own checkpoints are all that is run
        peaks = sorted(_peaks(trace(batch), policies))
        if room is not None and peaks and peaks[-1] > room:
            return fitting
        fitting = batch
        if all(larger > (1 + APART) * smaller for smaller, larger in pairwise(peaks)):
            return batch
    return fitting


def _peaks(trace: Trace, policies: Sequence[str]) -> Iterator[int]:
    for policy in policies:
        name, parameters = POLICIES[policy]
        try:
            log = simulate(trace, roomy(10**10, 10**10), name, **parameters).log
        except (PolicyError, TraceError):
            continue
        yield max(peaks_by_phase(log).values())


def _free_bytes(device: str) -> int:
    """Half of the memory that is free on a device: a step needs some beside its tensors."""
    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):  # a system that does not tell
        return 1 << 32


def _usual_length(model: str | Mapping[str, Any]) -> int:
    """How many tokens a sample has where nobody says: fewer where the model has fewer positions."""
    config = read_config(model)
    return min(SEQUENCE, config.positions) if config.learned else SEQUENCE


def config_of(model: str | Mapping[str, Any], sequence: int) -> dict[str, Any]:
    """Keys of a `config.json` for `sim.measure.steps`.

    Raises NotRun for a family that it does not have, WorkloadError for more tokens than the model has positions.
    """
    config = read_config(model)
    if config.family == "gpt2" and sequence > config.positions:
        raise WorkloadError(f"sequence: {sequence} is longer than the {config.positions} positions of {config.name!r}")
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
    raise NotRun(f"model {config.name!r} is neither a GPT-2 nor a Llama{near(config.name, names)}")


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


def as_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Rows to print: policy; MiB measured and simulated, with the error, in forward, backward and all; times; note."""

    def cell(value: float | None, form: str, scale: float = 1.0) -> str:
        return "–" if value is None else format(value / scale, form)

    def memory(real: int | None, ours: int | None) -> tuple[str, str, str]:
        return cell(real, ",.2f", 2**20), cell(ours, ",.2f", 2**20), cell(_error(ours, real), "+.2%")

    def phase(row: Row, name: str) -> tuple[str, str, str]:
        return memory((row.measured_phases or {}).get(name), (row.simulated_phases or {}).get(name))

    return [
        (
            row.policy,
            *phase(row, "forward"),
            *phase(row, "backward"),
            *memory(row.measured_bytes, row.simulated_bytes),
            cell(row.measured_ns, ",.2f", 1e6),
            cell(row.simulated_ns, ",.2f", 1e6),
            cell(row.time_error, "+.1%"),
            row.note,
        )
        for row in rows
    ]


HEADER = (
    "policy",
    *("forward MiB", "simulated", "error"),
    *("backward MiB", "simulated", "error"),
    *("peak MiB", "simulated", "error"),
    *("real ms", "simulated", "error"),
    "note",
)
"""Headings of the columns of `as_table`."""
