"""What real PyTorch needed, beside what the engine says of the same configuration under the same policy."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from sim.experiment import simulate
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.log import EventLog
from sim.trace import ROLES, Trace
from sim.trace.op import PHASES
from workloads import cnn, transformer

DATA = Path(__file__).parent / "data"
PHASE_COLUMNS = {"forward": "forward", "backward": "backward", "update": "optimizer"}
"""Our phases and what the columns of the file call them."""

POLICIES = {
    "none": ("keep_all", {}),
    "full_ckpt": ("full_recompute", {}),
    "selective_ckpt": ("selective_recompute", {"recompute": "all_but_matmul"}),
    "titan_ckpt": ("selective_recompute", {"recompute": "every_second_product"}),
    "save_on_cpu": ("save_on_cpu", {}),
    "optimizer_in_backward": ("optimizer_in_backward", {}),
}
"""What was done in PyTorch, and our policy with its parameters."""

ROLES_OF = {
    "parameter": ("weight",),
    "activation": ("activation",),
    "rest": ("gradient", "temporary", "optimizer_state"),
}
"""Categories that both sides tell apart: PyTorch's tracker calls a sum of gradients temporary until it is
accumulated, and counts temporaries of the optimizer as its state."""

ROUNDING = 512
"""Bytes to which PyTorch's figures round every storage."""


@cache
def rows() -> dict[str, dict[str, str]]:
    """Every case by its id: transformers, then image nets."""
    found = {}
    for name in ("pytorch_memory.csv", "pytorch_memory_cnn.csv"):
        with (DATA / name).open(encoding="utf-8") as file:
            found.update({row["case_id"]: row for row in csv.DictReader(file)})
    return found


@cache
def machine() -> Platform:
    """A device and a host in which all cases fit. Peaks do not depend on its rates: nothing overlaps here."""
    room = 1 << 46
    return Platform(
        "roomy",
        (Tier("hbm", room, room, 10**12, device=0), Tier("host", room, room, 10**11, kind="ddr")),
        (Engine("gpu", 0, "hbm", ("hbm",), {"fp32": 10**13, "bf16": 10**14}, launch=1000),),
        (Link("d2h", "hbm", "host", 10**10), Link("h2d", "host", "hbm", 10**10)),
    )


def trace_of(row: dict[str, str]) -> Trace:
    """The trace of a case, from its configuration alone."""
    if row["seq"] == "0":
        return net_of(row)
    return _trace(row["config_json"], *(row[key] for key in KEYS))


def net_of(row: dict[str, str]) -> Trace:
    """The trace of a convolution net; the modules that PyTorch ran had no ReLU in place."""
    kind = {"precision": row["precision"], "optimizer": row["optimizer"]}
    return cnn(row["model"], int(row["batch"]), **kind, inplace_relu=False)


KEYS = ("family", "batch", "seq", "precision", "attn", "optimizer")


@cache
def _trace(config: str, family: str, batch: str, seq: str, precision: str, attn: str, optimizer: str) -> Trace:
    return transformer(
        {**json.loads(config), "model_type": family},
        batch=int(batch),
        sequence=int(seq),
        precision=precision,
        attention=attn,
        optimizer=optimizer,
    )


@dataclass(frozen=True)
class Peaks:
    """The highest point of each phase on the device, by role; and bytes of the host's highest point."""

    by_phase: dict[str, dict[str, int]]
    host: int

    def total(self, phase: str) -> int:
        return sum(self.by_phase[phase].values())

    def category(self, phase: str, category: str) -> int:
        return sum(self.by_phase[phase].get(role, 0) for role in ROLES_OF[category])


def peaks_of(log: EventLog, unit: int = ROUNDING) -> Peaks:
    """Peaks of a run with each tensor rounded up to `unit` bytes: read from the log's rows alone.

    A moment belongs to the phase of the op of the iteration (not a recomputed one) that started last.
    """
    time, tier, delta, tensor = (log.change(name) for name in ("time", "tier", "delta", "tensor"))
    delta = np.sign(delta) * (-(-np.abs(delta) // unit) * unit)
    first = log.interval("why") == 0
    starts, ops = log.interval("start")[first], log.interval("op")[first]
    order = np.argsort(starts, kind="stable")
    starts, phase_of = starts[order], log.trace.op_columns.phase[ops[order]]
    here = tier == log.platform.tier_ids["hbm"]
    at = phase_of[np.maximum(np.searchsorted(starts, time[here], "right") - 1, 0)]
    change, role = delta[here], np.append(log.trace.tensor_columns.role, ROLES.index("temporary"))[tensor[here]]
    used = np.cumsum(change)
    found = {}
    for code, phase in enumerate(PHASES):
        rows = np.flatnonzero((at == code) & (change > 0))
        if not len(rows):
            continue
        top = rows[np.argmax(used[rows])]
        held = np.bincount(role[: top + 1], weights=change[: top + 1], minlength=len(ROLES))
        found[phase] = {name: int(size) for name, size in zip(ROLES, held, strict=True)}
    return Peaks(found, int(np.cumsum(delta[~here]).max(initial=0)))


@cache
def simulated(case: str) -> Peaks:
    """The peaks of one case as the engine has them."""
    row = rows()[case]
    policy, parameters = POLICIES[row["policy"]]
    return peaks_of(simulate(trace_of(row), machine(), policy, **parameters).log)


def keep_all_activations(row: dict[str, str]) -> int:
    """Bytes that autograd would keep of a case without checkpointing, weights left out."""
    return sum(tensor.bytes for tensor in trace_of(row).tensors if tensor.saved_for)
