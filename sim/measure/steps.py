"""Training steps of a GPT-2 on the machine at hand, measured."""

# mypy: disable-error-code="import-not-found", allow-subclassing-any

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sim.measure.gpt2 import Gpt2, Run, checkpointed, plain, saved_on_host, selective
from sim.measure.ledger import Ledger, OpClock
from workloads.measured import MeasuredOp

WARM_UP = 2
"""Steps before the measured ones: the optimizer's state is made in the first."""

COPY_BYTES = 1 << 26
"""Size of the copies that `copy_rate` times."""

RUNS: Mapping[str, Run] = {
    "none": plain,
    "checkpoint": checkpointed,
    "selective checkpoint": selective,
    "save_on_cpu": plain,
}
"""How each policy calls a layer."""


class Steps:
    """One model with its data and optimizer (AdamW, foreach) on one device."""

    def __init__(
        self,
        config: Mapping[str, Any],
        batch: int,
        sequence: int,
        precision: str,
        attention: str,
        dropout: float,
        device: str,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.precision = torch.device(device), precision
        self.model = Gpt2(config, attention=attention, dropout=dropout).to(self.device).train()
        if precision == "bf16":
            self.model = self.model.to(torch.bfloat16)
        self.ids = torch.randint(config["vocab_size"], (batch, sequence), device=self.device)
        self.labels = self.ids.clone()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.is_cuda = self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def step(self, policy: str, enter: Callable[[str], None] = lambda phase: None) -> None:
        """One iteration; `enter` is told each phase as it begins."""
        enter("forward")
        with saved_on_host() if policy == "save_on_cpu" else nullcontext(), self._autocast():
            loss = self.model(self.ids, self.labels, RUNS[policy])
        enter("backward")
        loss.backward()
        del loss
        enter("update")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> AbstractContextManager[Any]:
        wanted = self.precision == "amp_bf16"
        return torch.autocast(self.device.type, torch.bfloat16) if wanted else nullcontext()

    def peak(self, policy: str) -> int:
        """The most bytes on the device in one iteration in the steady state."""
        for _ in range(WARM_UP):
            self.step(policy)
        return self._cuda_peak(policy) if self.is_cuda else self._ledger_peak(policy)

    def times(self, policies: Sequence[str], repeats: int) -> dict[str, int]:
        """Median nanoseconds of an iteration under each policy, run in turn so that drift hits all alike."""
        taken: dict[str, list[int]] = {policy: [] for policy in policies}
        for _ in range(repeats):
            for policy in policies:
                self.synchronize()
                began = time.perf_counter_ns()
                self.step(policy)
                self.synchronize()
                taken[policy].append(time.perf_counter_ns() - began)
        return {policy: round(statistics.median(each)) for policy, each in taken.items()}

    def _cuda_peak(self, policy: str) -> int:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step(policy)
        self.synchronize()
        return int(torch.cuda.max_memory_allocated(self.device))

    def _ledger_peak(self, policy: str) -> int:
        gc.collect()
        ledger = Ledger(self.device.type)
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        # a step counter is 4 bytes that no tensor of ours stands for
        ledger.hold([*self.model.parameters(), *(v for v in state if v.numel() > 1), self.ids, self.labels])

        def enter(phase: str) -> None:
            ledger.phase = phase

        with ledger:
            self.step(policy, enter)
        return ledger.peak

    def op_times(self, repeats: int = 3) -> list[MeasuredOp]:
        """The ops of a plain iteration in order, each with its median time over `repeats` iterations."""
        self.step("none")
        lists = []
        for _ in range(repeats):
            clock = OpClock(self.synchronize)

            def enter(phase: str, clock: OpClock = clock) -> None:
                clock.phase = phase
                clock.layer = -1

            with _layers_known(self.model, clock), clock:
                self.step("none", enter)
            lists.append(clock.ops)
        return [replace(op, ns=round(statistics.median(times))) for op, times in _zipped(lists)]

    def copy_rate(self) -> int:
        """Bytes per second of a copy from the device to ordinary host memory."""
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(5):
            self.synchronize()
            began = time.perf_counter_ns()
            source.to("cpu", copy=True)
            self.synchronize()
            times.append(time.perf_counter_ns() - began)
        return round(COPY_BYTES * 10**9 / statistics.median(times))


def _zipped(lists: list[list[MeasuredOp]]) -> Iterator[tuple[MeasuredOp, list[int]]]:
    """Each op with its times in all runs; the runs have the same ops."""
    for same in zip(*lists, strict=True):
        yield same[0], [op.ns for op in same]


@contextmanager
def _layers_known(model: Gpt2, clock: OpClock) -> Iterator[None]:
    """While this lasts the clock knows the layer: forward from the calls, backward from the gradients as they pass."""

    def set_to(layer: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            clock.layer = layer

        return hook

    def before(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            clock.layer = layer
            if inputs[0].requires_grad:
                inputs[0].register_hook(set_to(layer - 1))  # its gradient is whole: what follows is the layer before

        return hook

    def after(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            clock.layer = -1
            if layer == len(model.layers) - 1:
                output.register_hook(set_to(layer))

        return hook

    handles = [
        handle
        for i, layer in enumerate(model.layers)
        for handle in (layer.register_forward_pre_hook(before(i)), layer.register_forward_hook(after(i)))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
