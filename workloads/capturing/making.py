"""What a script does while it makes its model, and PyTorch does not do under fake tensors.

- Models are compiled: what `torch.compile` is given stays as it is.
- Modules change their type or layout, and are copied deeply (for a moving average).
- Weights are drawn until all lie within bounds, which can't be seen: they are within bounds at once.
- A loader's workers load in processes of their own: they load in the step's.
- Distributions check their arguments and values: they are taken to be valid.
- The form of a model depends on a sequence of numbers (`torch.linspace` for rates of dropped paths): while the model is
  made, such a sequence has its values, until it is combined with a fake tensor.
- A step makes a batch of arrays: what it computes of them on the host has values and is not recorded, until it is sent
  to the GPU. What is sent there as the model is made keeps its values; ops on such tensors alone are not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from workloads.capturing.cuda_calls import goes_to_gpu
from workloads.capturing.packed import HOST

COMPILED = "what is compiled by torch.compile runs uncompiled"
LOADED = "a loader's workers load in the step's own process"
VALID = "arguments and values of distributions are valid"


def in_constructor(torch: Any) -> bool:
    """Whether a module is being built, whose form may depend on values."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def made_under_fake_tensors(assumed: Callable[[str], None], all_numbers: bool = False) -> Iterator[Callable[[], None]]:
    """Let a script make its model under fake tensors while the context lasts; `assumed` is called with notes.

    all_numbers: tensors of given numbers have their values, too; parameters may be among them.

    It gives a function to call when the model is made and the step begins.
    """
    making = True
    torch: Any = import_module("torch")
    modes: Any = import_module("torch.overrides")
    without_modes = import_module("torch.utils._python_dispatch")._disable_current_modes
    leaves = import_module("torch.utils._pytree").tree_leaves
    tensor, sequences = torch.Tensor, (torch.linspace, torch.arange, *([torch.tensor] if all_numbers else []))
    deep = tensor.__deepcopy__

    def is_plain(value: Any) -> bool:
        """Whether a tensor has values; one of vmap and its like may have a fake one inside.

        Numbers of a packed sequence have, too, and what is made by them is fake.
        """
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
        return type(value) is tensor and not wrapped and not hasattr(value, HOST)

    class Mode(modes.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is deep and hasattr(args[0], "fake_mode"):
                return _copied(torch, *args)
            given = [x for x in leaves((args, kwargs)) if isinstance(x, tensor)]
            has_values = all(map(is_plain, given)) if given else making and func in sequences
            if not has_values:
                return func(*args, **kwargs)
            with without_modes():
                out = func(*args, **kwargs)
            if making or not goes_to_gpu(torch, func, args, kwargs):
                return out
            return torch.ops.aten.lift_fresh.default(out)  # a tensor like others, whose ops are the step's

    def compile(model: Any = None, **_: Any) -> Any:
        assumed(COMPILED)
        return (lambda given: given) if model is None else model

    def made() -> None:
        nonlocal making
        making = False

    def compile_in_place(self: Any, *_: Any, **__: Any) -> None:
        assumed(COMPILED)

    answers: tuple[tuple[Any, str, Any], ...] = (
        (torch, "compile", compile),
        (torch.nn.Module, "compile", compile_in_place),
        *_around_a_batch(assumed),
        (torch.nn.init, "_no_grad_trunc_normal_", lambda drawn, *_, **__: drawn),
        # modules exchange the contents of fake parameters, unless a weak reference to one is known; the mode has them
        (torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda _: [])),
    )
    from unittest.mock import patch  # brings asyncio with it

    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(patch.object(owner, name, answer))
        stack.enter_context(Mode())
        yield made


def _around_a_batch(assumed: Callable[[str], None]) -> tuple[tuple[Any, str, Any], ...]:
    """How batches are loaded, and how what is sampled is checked: owner, name and replacement."""
    loader = import_module("torch.utils.data.dataloader").DataLoader
    distribution = import_module("torch.distributions").Distribution
    iterator, made = loader._get_iterator, distribution.__init__

    def loaded_here(self: Any) -> Any:
        workers, self.num_workers = self.num_workers, 0
        if workers:
            assumed(LOADED)
        try:
            return iterator(self)
        finally:
            self.num_workers = workers

    def unchecked(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("validate_args", self._validate_args) is not False:
            assumed(VALID)
        made(self, *args, **{**kwargs, "validate_args": False})

    return (loader, "_get_iterator", loaded_here), (distribution, "__init__", unchecked)


def made_fake(mode: Any, module: Any) -> None:
    """Let buffers that have values be fake tensors, as everything else is."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not hasattr(buffer, "fake_mode"):
                part._buffers[name] = mode.from_tensor(buffer)


def _copied(torch: Any, fake: Any, memo: dict[int, Any]) -> Any:
    if id(fake) not in memo:
        copy = fake.detach().clone().requires_grad_(fake.requires_grad)
        memo[id(fake)] = torch.nn.Parameter(copy, fake.requires_grad) if isinstance(fake, torch.nn.Parameter) else copy
    return memo[id(fake)]
