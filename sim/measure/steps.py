"""Measures training steps of a GPT-2 or a Llama on the local machine."""

# mypy: allow-subclassing-any

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sim.measure.gpt2 import Gpt2, Run, checkpointed, plain, saved_on_host, selective
from sim.measure.llama import Llama
from sim.measure.storages import OpClock, StorageTracker
from workloads.measured import MeasuredOp

WARM_UP = 2
"""Steps before the measured ones; the first one creates the optimizer's state."""

COPY_BYTES = 1 << 26
"""Size of the copies that `copy_rates` times."""
UNIT = 512
"""PyTorch's CUDA allocator rounds sizes up to multiples of this many bytes."""

RUNS: Mapping[str, Run] = {
    "none": plain,
    "checkpoint": checkpointed,
    "selective checkpoint": selective,
    "save_on_cpu": plain,
}
"""How each policy calls a layer."""


class Steps:
    """One model with its data and optimizer (AdamW, foreach) on one device.

    config: keys of a Hugging Face `config.json` of GPT-2 or Llama.
    batch, sequence, precision, attention, dropout: as for `transformer`.
    device: to run on.
    beside: bytes on a CUDA device, measured by `peak`, that belong to no tensor of the step: workspaces that cuBLAS
        keeps once it has them.
    """

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
        is_gpt2 = config["model_type"] == "gpt2"
        with self.device:
            built = (
                Gpt2(config, attention=attention, dropout=dropout) if is_gpt2 else Llama(config, attention=attention)
            )
        self.model = built.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
        self.ids = torch.randint(config["vocab_size"], (batch, sequence), device=self.device)
        self.labels = self.ids.clone()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.is_cuda = self.device.type == "cuda"
        self.beside = 0

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def step(self, policy: str, enter: Callable[[str], None] = lambda phase: None) -> None:
        """Run one iteration; `enter` is called at the start of each phase."""
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

    def peaks(self, policy: str) -> dict[str, int]:
        """The peak bytes on the device during each phase of an iteration in the steady state."""
        for _ in range(WARM_UP):
            self.step(policy)
        return self._cuda_peaks(policy) if self.is_cuda else self._storages_peaks(policy)

    def times(self, policies: Sequence[str], repeats: int) -> dict[str, int]:
        """Median nanoseconds of an iteration under each policy; they alternate so that drift affects all equally."""
        times: dict[str, list[int]] = {policy: [] for policy in policies}
        for _ in range(repeats):
            for policy in policies:
                self.synchronize()
                started = time.perf_counter_ns()
                self.step(policy)
                self.synchronize()
                times[policy].append(time.perf_counter_ns() - started)
        return {policy: round(statistics.median(samples)) for policy, samples in times.items()}

    def _held(self) -> list[Tensor]:
        """All tensors that live between two steps, except step counters, which a trace does not have."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [*self.model.parameters(), *(v for v in state if v.numel() > 1), self.ids, self.labels]

    def _cuda_peaks(self, policy: str) -> dict[str, int]:
        gc.collect()
        self.synchronize()
        known = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in self._held()}
        rounded = sum(-(-size // UNIT) * UNIT for size in known.values())
        self.beside = int(torch.cuda.memory_allocated(self.device)) - rounded
        peaks: dict[str, int] = {}
        phases: list[str] = []

        def enter(phase: str) -> None:
            if phases:
                peaks[phases[-1]] = int(torch.cuda.max_memory_allocated(self.device)) - self.beside
            phases.append(phase)
            torch.cuda.reset_peak_memory_stats(self.device)

        self.step(policy, enter)
        enter("")
        self.synchronize()
        return peaks

    def _storages_peaks(self, policy: str) -> dict[str, int]:
        gc.collect()
        storages = StorageTracker(self.device.type)
        storages.hold(self._held())

        def enter(phase: str) -> None:
            storages.phase = phase

        with storages:
            self.step(policy, enter)
        return dict(storages.highest)

    def fits(self, policy: str, limit: int) -> bool:
        """Whether a step runs on a CUDA device if PyTorch may use `limit` bytes of it."""
        whole = torch.cuda.get_device_properties(self.device).total_memory
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole), self.device)
        try:
            self.step(policy)
            self.synchronize()
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        return True

    def op_times(self, repeats: int = 3) -> list[MeasuredOp]:
        """The ops of a plain iteration in order, each with its median time over `repeats` iterations."""
        self.step("none")
        lists = []
        for _ in range(repeats):
            clock = OpClock(self.device.type)

            def enter(phase: str, clock: OpClock = clock) -> None:
                clock.phase = phase
                clock.layer = -1

            with _layers_known(self.model, clock), clock:
                self.step("none", enter)
            lists.append(clock.ops)
        return [replace(op, ns=round(statistics.median(times))) for op, times in _zipped(lists)]

    def copy_rates(self) -> tuple[int, int]:
        """Bytes per second of copies to new pages of pageable host memory, and back."""
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        to_host, back = [], []
        for _ in range(5):
            self.synchronize()
            started = time.perf_counter_ns()
            packed = source.to("cpu", copy=True)
            self.synchronize()
            middle = time.perf_counter_ns()
            packed.to(self.device, copy=True)
            self.synchronize()
            to_host.append(middle - started)
            back.append(time.perf_counter_ns() - middle)
        out, home = (round(COPY_BYTES * 10**9 / statistics.median(times)) for times in (to_host, back))
        return out, home


def _zipped(lists: list[list[MeasuredOp]]) -> Iterator[tuple[MeasuredOp, list[int]]]:
    """Each op with its times in all runs; the runs have the same ops."""
    for same in zip(*lists, strict=True):
        yield same[0], [op.ns for op in same]


@contextmanager
def _layers_known(model: Gpt2 | Llama, clock: OpClock) -> Iterator[None]:
    """Keep `clock.layer` up to date while the context lasts: in forward by calls, in backward by gradients."""

    def set_to(layer: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            clock.layer = layer

        return hook

    def before(layer: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
            clock.layer = layer
            if inputs[0].requires_grad:
                inputs[0].register_hook(set_to(layer - 1))  # its gradient is complete: the preceding layer follows

        return hook

    def after(layer: int) -> Callable[[Any, tuple[Tensor, ...], Tensor], None]:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
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
