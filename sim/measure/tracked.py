"""Peaks of a captured step under PyTorch's own memory tracker, as it is and under checkpoints.

The tracker (`torch.distributed._tools.mem_tracker.MemTracker`) observes the same fake step as the capture, and shares
no code with it beyond the kernels that are chosen: it keeps its own account of storages, its own hooks, and it knows
what lives before the step from Python's list of objects.
"""

# mypy: allow-subclassing-any, allow-untyped-calls

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools import mem_tracker, mod_tracker
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sim.measure.gpt2 import EXPENSIVE as PRODUCTS
from workloads.capturing.kernels import counts_on_host
from workloads.capturing.packed import HOST

OWN: Mapping[str, Mapping[str, Any]] = {
    "gradient_checkpointing_enable": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "enable_gradient_checkpointing": {},
    "set_grad_checkpointing": {},
}
"""The methods by which transformers, diffusers and timm switch their checkpoints on, and their arguments."""

EXPENSIVE = (*PRODUCTS, "convolution", "_grouped_mm")
"""ATen ops whose results selective checkpoints keep."""

POLICIES = ("none", "checkpoint", "selective checkpoint")
"""The mechanisms of `sim.measure.validate.POLICIES` that need no second memory."""


class Tracked:
    """An observer of a capture: PyTorch's tracker.

    policy: one of `POLICIES`.
    layers: paths of the modules that are checkpointed where the model has no checkpoints of its own.
    highest: the most bytes by phase, known after the capture.
    whose: whose checkpoints they are: the model's class, "torch", or "" for none.
    """

    def __init__(self, policy: str, layers: Sequence[str] = ()) -> None:
        self.policy, self.layers = policy, tuple(dict.fromkeys(layers))
        self.highest: dict[str, int] = {}
        self.whose = ""

    def prepare(self, model: Any) -> None:
        """Switch the checkpoints on."""
        if self.policy == "checkpoint":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of transformers, which renames its method
                self.whose = with_own_checkpoints(model)
        if self.policy != "none" and not self.whose:
            self.whose = "torch"
            chosen = {} if self.policy == "checkpoint" else {"context_fn": keeping_expensive()}
            with_checkpoints_round(self.layers, model, **chosen)

    @contextmanager
    def around(self, model: Any, optimizers: Sequence[Any]) -> Iterator[None]:
        """Track a step. All that lives before it counts, except counters of steps, which are on a GPU's host."""
        tracker = PhaseTracker()
        tracker.fake = True
        counters = (
            tuned.state[parameter].get("step")
            for tuned in optimizers
            for group in tuned.param_groups
            for parameter in group["params"]
            if counts_on_host(group) and parameter in tuned.state
        )
        tracker.host = {x.untyped_storage()._cdata for x in counters if isinstance(x, torch.Tensor)}
        mode = mem_tracker.active_fake_mode()
        alive = (x for x in gc.get_objects() if type(x) is FakeTensor and x.fake_mode is mode)
        tracker.track_external(*(x for x in alive if x.layout == torch.strided))
        tracker.track_external(model, *optimizers)
        with tracker.tracking():
            yield
        self.highest = dict(tracker.highest)


class PhaseTracker(mem_tracker.MemTracker):
    """The tracker, with the most bytes of each phase.

    host: storages that are not counted.
    fake: whether the step is fake. The few tensors with data that it has count from their first use, but for numbers of
        packed sequences, which are on a GPU's host.
    highest: by phase. What runs after a backward pass outside modules (clipping, averages) counts as update.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: set[int] = set()
        self.fake = False
        self.highest: dict[str, int] = {}
        self.differentiating = self.after_backward = False

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track what runs in this context.

        The tracker's hooks on the inputs of a module (PyTorch 2.13, `ModTracker`) wait for the gradients of all of
        them, and hold those that have arrived meanwhile: one by one, all that flow past a network's embedding of time.
        They only tell in which module backward is, which a peak does not depend on, and are left out.
        """
        backward = self._backward(torch.autograd.backward)
        without_hooks = patch.object(mod_tracker, "register_multi_grad_hook", lambda *_, **__: None)
        with without_hooks, patch.object(torch.autograd, "backward", backward), self:
            yield

    def _backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose ops are of the backward pass, those outside autograd included."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            self.differentiating = self.after_backward = True
            try:
                return run(*args, **kwargs)
            finally:
                self.differentiating = False

        return observed

    def _update_and_maybe_create_winfos(self, t: Any, *args: Any, **kwargs: Any) -> Any:
        return set() if self._is_left_out(t) else super()._update_and_maybe_create_winfos(t, *args, **kwargs)

    def _track(self, reftype: Any, t: Any) -> None:
        """Count the result of an op."""
        if not self._is_left_out(t):
            super()._track(reftype, t)

    def _is_left_out(self, t: Any) -> bool:
        if self.fake and hasattr(t, HOST):
            return True
        return bool(self.host) and t.layout == torch.strided and t.untyped_storage()._cdata in self.host

    def _track_inputs_or_outputs(self, args: Any) -> int:
        """What a module is given or returns, in a flat list: a packed sequence can't be rebuilt from sizes."""
        return int(super()._track_inputs_or_outputs(tree_leaves(args)))

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        """A module that the step calls once more has new statistics; the tracker would refuse the call.

        They are of each module, and no part of what all storages take.
        """
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)

    def _track_module_params_and_buffers(self, module: Any, install_grad_hooks: bool = True) -> Any:
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)  # it refuses frozen weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, then note what all storages take."""
        for each in tree_leaves((args, kwargs)) if self.fake and func._opname != "lift_fresh" else ():
            if type(each) is torch.Tensor:
                self._update_and_maybe_create_winfos(each, mem_tracker._MemRefType.OTH)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        held = sum(each[mem_tracker._TOTAL_KEY] for each in self.get_tracker_snapshot("current").values())
        phase = self._phase()
        self.highest[phase] = max(self.highest.get(phase, 0), held)
        return out

    def _phase(self) -> str:
        if self._in_opt:
            return "update"
        if self.differentiating or self._mod_tracker.is_bw:
            return "backward"
        if len(self._mod_tracker.parents) > 1:
            self.after_backward = False
        return "update" if self.after_backward else "forward"


# ---- checkpoints ---------------------------------------------------------------------------------


def with_own_checkpoints(model: Any) -> str:
    """Switch on the checkpoints that the model's library has, in each outermost part that has them.

    Returns the names of the classes, "" where none has any.
    """
    switched: dict[str, str] = {}
    for path, part in model.named_modules():
        if any(path == each or path.startswith(f"{each}.") or not each for each in switched):
            continue
        for name, arguments in OWN.items():
            if callable(switch := getattr(part, name, None)):
                try:
                    switch(**arguments)
                except (ValueError, AttributeError, NotImplementedError):  # this model has none
                    continue
                switched[path] = type(part).__name__
                break
    return " and ".join(dict.fromkeys(switched.values()))


def with_checkpoints_round(paths: Sequence[str], model: Any, **chosen: Any) -> None:
    """Put PyTorch's non-reentrant checkpoint round each of these parts of the model."""
    for path in paths:
        module = model.get_submodule(path)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **chosen)


def keeping_expensive() -> Callable[[], Any]:
    """What a checkpoint needs to keep the results of matrix products and fused attention."""

    def choose(_context: Any, op: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
        kept = getattr(op, "_opname", "") in EXPENSIVE
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, choose)
