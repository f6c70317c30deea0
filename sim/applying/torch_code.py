"""Wraps modules of a model in checkpoints, as a plan says. This file is copied into exported files as it is."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Run = Callable[..., Any]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def name_of(op: Any) -> str:
    """What the plan calls an op: matrix products and fused attention have one name each."""
    name = str(op).split(".")[1]
    if name in PRODUCTS:
        return "product"
    return "attention" if name.startswith("_scaled_dot_product_") else name


class Keeping:
    """The policy of one call of a selective checkpoint: of each kind of op it keeps those that the plan numbers.

    save: name of an op -> how many of that name a call runs, and the positions of those whose results are kept.
    """

    def __init__(self, save: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        self.save = save
        self.seen: tuple[Counter[str], Counter[str]] = Counter(), Counter()

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Whether the result of this op is kept."""
        name = name_of(op)
        seen = self.seen[context.is_recompute]
        position = seen[name]
        seen[name] += 1
        keeps = name in self.save and position in self.save[name][1]
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(self) -> Any:
        """The contexts of the forward pass and of the recomputation."""
        return create_selective_checkpoint_contexts(self)

    def check(self, where: str) -> None:
        """Raise RuntimeError if the call ran another number of these ops than the plan was made for."""
        for name, (count, _) in self.save.items():
            if self.seen[0][name] != count:
                raise RuntimeError(
                    f"{where}: runs {self.seen[0][name]} ops {name!r}, and the plan was made for {count}; export it "
                    "once more, from a trace of this model"
                )


def checkpointed(run: Run, where: str, save: Mapping[str, tuple[int, Sequence[int]]]) -> Run:
    """A function whose activations are recomputed in backward, except those that `save` names."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if not save:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        keeping = Keeping(save)
        result = checkpoint(run, *args, use_reentrant=False, context_fn=keeping.contexts, **kwargs)
        keeping.check(where)
        return result

    return call


class Together:
    """Neighbours in a list of modules under one checkpoint: the first runs all, the others pass its result on."""

    def __init__(self, modules: Sequence[nn.Module], paths: Sequence[str]) -> None:
        self.runs = [module.forward for module in modules]
        self.where = f"{paths[0]} to {paths[-1]}"
        self.passed: Any = None
        for module, path in zip(modules, paths, strict=True):
            if module._forward_hooks or module._forward_pre_hooks:
                raise RuntimeError(f"{path}: has hooks, which would not run under a checkpoint round several modules")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call all modules, each on the first result of the one before."""
        x, rest = args[0], args[1:]
        del args
        for run in self.runs[:-1]:
            x = first_of(run(x, *rest, **kwargs), self.where)
        return self.runs[-1](x, *rest, **kwargs)

    def entering(self, call: Run) -> Run:
        """What the first module becomes."""

        def enter(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.passed = weakref.ref(first_of(result, self.where))
            return result

        return enter

    def passing(self, *args: Any, **kwargs: Any) -> Any:
        """What each other module becomes."""
        if self.passed is None or self.passed() is not args[0]:
            raise RuntimeError(f"{self.where}: these modules are not called one after the other on each other's result")
        return args[0]


def first_of(result: Any, where: str) -> Any:
    """The tensor that a module hands to the next."""
    if not isinstance(result, torch.Tensor):
        raise RuntimeError(f"{where}: a module returns {type(result).__name__}, not a tensor for the next one")
    return result


def apply(model: nn.Module, plan: Sequence[Mapping[str, Any]] | None = None) -> nn.Module:
    """Wrap the modules that the plan names, in place; returns the model. Parameters and their names stay.

    plan: by default this file's.

    Raises RuntimeError for a path that is not a module of the model, or one that is wrapped already.
    """
    for entry in PLAN if plan is None else plan:
        paths = entry["modules"]
        modules = [_module(model, path) for path in paths]
        save = entry.get("save") or {}
        if len(modules) == 1:
            modules[0].forward = checkpointed(modules[0].forward, paths[0], save)
            continue
        together = Together(modules, paths)
        call = checkpointed(together.run, together.where, save)
        for module in modules[1:]:
            module.forward = together.passing
        modules[0].forward = together.entering(call)
    return model


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise RuntimeError(f"{path}: is not a module of {type(model).__name__}: {error}") from None
    if "forward" in vars(module):
        raise RuntimeError(f"{path}: is wrapped already")
    return module


PLAN: Sequence[Mapping[str, Any]] = ()
"""Per checkpoint: `modules`, the paths of those that it calls one after the other; `save`, per name of an op how many
of them a call runs, and which of those it keeps."""
