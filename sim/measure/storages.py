"""Observes a real iteration: a tracker of live storages, and a clock for each op."""

# mypy: allow-subclassing-any

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workloads.importers.optrace import kind_of
from workloads.measured import MeasuredOp

VIEWS = frozenset((
    *("view", "_unsafe_view", "t", "transpose", "expand", "detach", "alias", "unsqueeze", "slice", "select"),
    *("split", "as_strided", "lift_fresh", "_local_scalar_dense", "permute", "squeeze", "_reshape_alias"),
))  # fmt: skip
"""ATen ops that run no kernel."""


class StorageTracker(TorchDispatchMode):
    """Bytes of all live storages on one device, each counted once however many views it has.

    It counts what PyTorch allocates as tensors; workspaces inside kernels are invisible. Storages that are live at the
    start must be registered with `hold`.

    live: bytes now.
    phase: of the iteration, set from outside.
    highest: the most bytes after any op, by phase.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device).type
        self.live = 0
        self.phase = "forward"
        self.highest: dict[str, int] = {}
        self._known: set[int] = set()

    @property
    def peak(self) -> int:
        """The most bytes over all phases."""
        return max(self.highest.values(), default=0)

    def hold(self, tensors: Iterable[Any]) -> None:
        """Count the storages of these tensors until they are released."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != self.device:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            self._known.add(key)
            size = storage.nbytes()
            self.live += size
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, then count its results."""
        out = func(*args, **(kwargs or {}))
        self.hold(tree_leaves(out))
        self.highest[self.phase] = max(self.highest.get(self.phase, 0), self.live)
        return out


class OpClock(TorchDispatchMode):
    """The time of every op.

    On a CPU it is wall-clock time. On a CUDA device it is the time between two events on the op's stream, so that the
    device need not synchronise with Python after each op; any time that it waits for Python is included.

    phase, layer: of the current op, set from outside; layer -1 for none.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.phase = "forward"
        self.layer = -1
        self._seen: list[tuple[MeasuredOp, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and record its time."""
        name = str(func)
        view = getattr(func, "_opname", "") in VIEWS or name.startswith("profiler")
        layer = -1 if self.phase == "update" else self.layer
        op = MeasuredOp(kind_of(name, self.phase), self.phase, layer, 0, view)
        if self.device.type == "cuda":
            marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            marks[0].record()
            out = func(*args, **(kwargs or {}))
            marks[1].record()
            self._seen.append((op, marks))
        else:
            began = time.perf_counter_ns()
            out = func(*args, **(kwargs or {}))
            self._seen.append((op, time.perf_counter_ns() - began))
        return out

    @property
    def ops(self) -> list[MeasuredOp]:
        """All ops with their times; on a CUDA device this waits for the last one to end."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [replace(op, ns=round(first.elapsed_time(last) * 1e6)) for op, (first, last) in self._seen]
        return [replace(op, ns=ns) for op, ns in self._seen]
