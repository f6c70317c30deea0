"""Fake stand-ins for modules, optimizers and inputs: shapes and types, no data."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sim.errors import WorkloadError


def fake_like(torch: Any, value: Any) -> Any:
    """The same structure with fake tensors; a function is called. To be used under a fake mode."""
    if callable(value) and not isinstance(value, torch.Tensor):
        value = value()
    if isinstance(value, torch.Tensor):
        return _fake(torch, value)
    if isinstance(value, Mapping):
        return {key: fake_like(torch, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(fake_like(torch, x) for x in value)
    return value


def fake_module(torch: Any, mode: Any, module: Any, optimizer: Any) -> tuple[Any, Any]:
    """A module without data and its optimizer or None, for use under `mode`, a fake mode.

    A function builds the module on the "meta" device, where `to` works as ever, or if that fails under `mode`.
    """
    ready = isinstance(module, torch.nn.Module)
    if not ready and not callable(module):
        raise WorkloadError(f"module: needs a torch.nn.Module or a function that builds one, has {module!r}")
    tuned = isinstance(optimizer, torch.optim.Optimizer)
    if tuned and not ready:
        raise WorkloadError("optimizer: give a function of the parameters, for the module is built by a function")
    if not ready:
        module = _built(torch, mode, module)
    _refuse_compiled(module)
    memo = _memo(torch, mode, module, optimizer if tuned else None)
    with mode:
        module = copy.deepcopy(module, memo)
        if tuned:
            return module, copy.deepcopy(optimizer, memo)
        if optimizer is None:
            return module, None
        if not callable(optimizer):
            raise WorkloadError(f"optimizer: needs a function of the parameters, has {optimizer!r}")
        trainable = [p for p in module.parameters() if p.requires_grad]
        if not trainable:
            raise WorkloadError("optimizer: the module has no trainable parameter")
        return module, optimizer(trainable)


def _refuse_compiled(module: Any) -> None:
    for name, part in module.named_modules():
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None:
            which = f"part {name!r}" if name else "it"
            raise WorkloadError(
                f"module: {which} was compiled with torch.compile, whose kernels are not PyTorch's own; capture the "
                "module as it was before"
            )


def _built(torch: Any, mode: Any, build: Any) -> Any:
    try:
        with torch.device("meta"):
            module = build()
    except Exception:
        with mode:  # it asks for values while it is built
            module = build()
    if not isinstance(module, torch.nn.Module):
        raise WorkloadError(f"module: the function returned {type(module).__name__}, no torch.nn.Module")
    return module


def _fake(torch: Any, tensor: Any) -> Any:
    if tensor.layout != torch.strided:
        raise WorkloadError(f"a tensor of layout {tensor.layout} has no storage to simulate")
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _memo(torch: Any, mode: Any, module: Any, optimizer: Any) -> dict[int, Any]:
    """What a deep copy puts in place of each tensor; tensors that share a storage share one again."""
    # a module may also hold tensors that it has not registered
    held = import_module("torch.utils._pytree").tree_leaves([vars(part) for part in module.modules()])
    tensors = [*module.parameters(), *module.buffers()]
    known = set(map(id, tensors))
    tensors += [x for x in held if isinstance(x, torch.Tensor) and id(x) not in known]
    if optimizer is not None:
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise WorkloadError("optimizer: updates parameters that the module does not have")
        for state in optimizer.state.values():
            tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
    numbers = {id(x): x.item() for x in tensors if _is_number(torch, x)}  # may be asked for: step counters
    sharing = Counter(x.untyped_storage()._cdata for x in tensors)
    flat: dict[tuple[int, Any], Any] = {}
    memo: dict[int, Any] = {}
    for tensor in tensors:
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        with mode:
            if id(tensor) in numbers:
                made = torch.tensor(numbers[id(tensor)], dtype=dtype)
            elif sharing[storage._cdata] == 1:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            else:
                key = (storage._cdata, dtype)
                if key not in flat:
                    flat[key] = torch.empty(storage.nbytes() // tensor.element_size(), dtype=dtype, device="cpu")
                made = flat[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    return memo


def _is_number(torch: Any, tensor: Any) -> bool:
    """Whether a tensor is a real number whose value can be read."""
    real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
    return real and tensor.dim() == 0
