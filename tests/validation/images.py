"""PyTorch's own figures of convolution nets with checkpoints round their blocks, beside ours, built and captured.

`truth/make_images.py` made the file, from the nets in `truth/image_models.py`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from typing import Any

from sim.experiment import simulate
from sim.trace import Trace
from tests.validation.oracle import DATA, POLICIES, Peaks, machine, peaks_of
from workloads import cnn

BUILT = ("resnet-50",)
"""Nets that `workloads.cnn` divides into the same blocks; its VGG counts every convolution."""


@cache
def rows() -> dict[str, dict[str, Any]]:
    """Every case by net, batch and policy."""
    found = json.loads((DATA / "pytorch_images.json").read_text(encoding="utf-8"))
    return {f"{row['net']}_b{row['batch']}_{row['policy']}": row for row in found["rows"]}


CHECKPOINTED = {"densenet-121": "Dense"}
"""Where the checkpoints of the truth are round other modules than those that repeat: its transitions do, too."""


def ways() -> list[tuple[str, str]]:
    """Case and how its trace is made: built from a name, or captured where PyTorch is installed."""
    built = [(case, "built") for case, row in rows().items() if row["net"] in BUILT]
    return built + ([(case, "captured") for case in rows()] if find_spec("torch") else [])


@cache
def trace_of(net: str, batch: int, way: str) -> Trace:
    """One step of SGD with momentum, without checkpoints: the policy puts them there."""
    if way == "built":
        return cnn(net, batch)
    import torch

    from tests.validation.truth.image_models import NETS
    from workloads.capture import capture

    return capture(
        NETS[net],
        torch.zeros(batch, 3, 224, 224, device="meta"),
        targets=torch.zeros(batch, dtype=torch.int64, device="meta"),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        kernels="cuda",
        layers=CHECKPOINTED.get(net),
    )


@cache
def simulated(case: str, way: str) -> Peaks:
    """The peaks of one case as the engine has them."""
    row = rows()[case]
    policy, parameters = POLICIES[row["policy"]]
    return peaks_of(simulate(trace_of(row["net"], row["batch"], way), machine(), policy, **parameters).log)
