"""Fake substitutes for modules, optimizers and inputs: shapes and types, no data."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sim.errors import WorkloadError
from workloads.capturing.cuda_calls import answered
from workloads.capturing.making import made_under_fake_tensors
from workloads.capturing.packed import keep_values


def fake_like(torch: Any, value: Any) -> Any:
    """The same structure with fake tensors; a function is called for its result. Call it under a fake mode."""
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
    """A module without data, and its optimizer or None, for use under a fake mode.

    torch: the package.
    mode: the fake mode.
    module: a module to copy, or a function that builds one: on the "meta" device, where `to` works as usual, or if that
        fails under `mode`.
    optimizer: an optimizer of the module, a function of its parameters, or None.

    Raises WorkloadError for wrong arguments.
    """
    ready = isinstance(module, torch.nn.Module)
    if not ready and not callable(module):
        raise WorkloadError(f"module: needs a torch.nn.Module or a function that builds one, has {module!r}")
    tuned = isinstance(optimizer, torch.optim.Optimizer)
    if tuned and not ready:
        raise WorkloadError("optimizer: give a function of the parameters, because the module is built by a function")
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
                "module uncompiled"
            )


def _refuse_to_compile(_: str) -> None:
    raise WorkloadError("module: a part of it is compiled with torch.compile; capture the module uncompiled")


def _built(torch: Any, mode: Any, build: Any) -> Any:
    try:
        with answered("meta", _unnoted), torch.device("meta"):
            module = build()
    except Exception:
        with mode, answered("cpu", _unnoted), made_under_fake_tensors(_refuse_to_compile, all_numbers=True):
            module = build()  # it reads values
    if not isinstance(module, torch.nn.Module):
        raise WorkloadError(f"module: the function returned {type(module).__name__}, not a torch.nn.Module")
    return module


def _unnoted(_: str) -> None:
    """Where a module is built makes no difference."""


def _fake(torch: Any, tensor: Any) -> Any:
    if tensor.layout != torch.strided:
        raise WorkloadError(f"a tensor of layout {tensor.layout} has no storage to simulate")
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    keep_values(fake, tensor)
    return fake.requires_grad_(tensor.requires_grad)


def _memo(torch: Any, mode: Any, module: Any, optimizer: Any) -> dict[int, Any]:
    """The substitute of each tensor in a deep copy; tensors that share a storage keep sharing one."""
    # a module may also hold tensors that are not registered
    held = import_module("torch.utils._pytree").tree_leaves([vars(part) for part in module.modules()])
    tensors = [*module.parameters(), *module.buffers()]
    known = set(map(id, tensors))
    tensors += [x for x in held if isinstance(x, torch.Tensor) and id(x) not in known]
    if optimizer is not None:
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise WorkloadError("optimizer: updates parameters that the module does not have")
        for state in optimizer.state.values():
            tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
    scalars = {id(x): x.item() for x in tensors if _is_number(torch, x)}  # step counters, whose values may be read
    sharing = Counter(x.untyped_storage()._cdata for x in tensors)
    flat: dict[tuple[int, Any], Any] = {}
    memo: dict[int, Any] = {}
    for tensor in tensors:
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        with mode:
            if id(tensor) in scalars:
                fake = torch.tensor(scalars[id(tensor)], dtype=dtype)
            elif sharing[storage._cdata] == 1:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            else:
                key = (storage._cdata, dtype)
                if key not in flat:
                    flat[key] = torch.empty(storage.nbytes() // tensor.element_size(), dtype=dtype, device="cpu")
                fake = flat[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    return memo


def _is_number(torch: Any, tensor: Any) -> bool:
    """Whether a tensor is a real number whose value can be read."""
    real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
    return real and tensor.dim() == 0
