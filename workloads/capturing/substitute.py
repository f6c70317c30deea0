"""Fake stand-ins for modules, optimizers and inputs: shapes and types, no data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
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


def fake_module(torch: Any, module: Any, optimizer: Any) -> tuple[Any, Any]:
    """A module without data and its optimizer or None. To be used under a fake mode."""
    ready = isinstance(module, torch.nn.Module)
    if not ready and not callable(module):
        raise WorkloadError(f"module: needs a torch.nn.Module or a function that builds one, has {module!r}")
    tuned = isinstance(optimizer, torch.optim.Optimizer)
    if tuned and not ready:
        raise WorkloadError("optimizer: give a function of the parameters, for the module is built by a function")
    if ready:
        memo = _memo(torch, module, optimizer if tuned else None)
        module = copy.deepcopy(module, memo)
        if tuned:
            return module, copy.deepcopy(optimizer, memo)
    else:
        module = module()
        if not isinstance(module, torch.nn.Module):
            raise WorkloadError(f"module: the function returned {type(module).__name__}, no torch.nn.Module")
    if optimizer is None:
        return module, None
    if not callable(optimizer):
        raise WorkloadError(f"optimizer: needs a function of the parameters, has {optimizer!r}")
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise WorkloadError("optimizer: the module has no trainable parameter")
    return module, optimizer(trainable)


def _fake(torch: Any, tensor: Any) -> Any:
    if tensor.layout != torch.strided:
        raise WorkloadError(f"a tensor of layout {tensor.layout} has no storage to simulate")
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _memo(torch: Any, module: Any, optimizer: Any) -> dict[int, Any]:
    """What a deep copy puts in place of each tensor; tensors that share a storage share one again."""
    tensors = [*module.parameters(), *module.buffers()]
    if optimizer is not None:
        known = set(map(id, tensors))
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise WorkloadError("optimizer: updates parameters that the module does not have")
        for state in optimizer.state.values():
            tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
    sharing: dict[int, int] = {}
    for tensor in tensors:
        address = tensor.untyped_storage()._cdata
        sharing[address] = sharing.get(address, 0) + 1
    flat: dict[tuple[int, Any], Any] = {}
    memo: dict[int, Any] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.numel() == 1 and tensor.device.type == "cpu" and tensor.dim() == 0:
            made = torch.tensor(tensor.item(), dtype=tensor.dtype)  # its value may be asked for: a step counter
        elif sharing[storage._cdata] == 1:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            key = (storage._cdata, tensor.dtype)
            if key not in flat:
                flat[key] = torch.empty(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype, device="cpu")
            made = flat[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    return memo
