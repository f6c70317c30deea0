"""Wraps modules of a model, as a plan says. This file is copied into exported files as it is."""

# mypy: allow-subclassing-any

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Run = Callable[..., Any]
HOST = "cpu"
AHEAD = 1
"""How many copies are fetched before they are needed."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def name_of(op: Any) -> str:
    """What the plan calls an op: matrix products and fused attention have one name each."""
    words = str(op).split(".")
    name = words[min(1, len(words) - 1)]
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
        check_counts(where, self.seen[0], self.save)


def check_counts(where: str, seen: Mapping[str, int], expected: Mapping[str, tuple[int, Any]]) -> None:
    """Raise RuntimeError if a call ran another number of some ops than the plan was made for."""
    for name, (count, _) in expected.items():
        if seen[name] != count:
            raise RuntimeError(
                f"{where}: runs {seen[name]} ops {name!r}, and the plan was made for {count}; export it once more, "
                "from a trace of this model"
            )


def checkpointed(run: Run, where: str, save: Mapping[str, tuple[int, Sequence[int]]]) -> Run:
    """A function whose activations are recomputed in backward, except those that `save` names."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        refuse_cache(where, (*args, *kwargs.values()))
        if not save:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        keeping = Keeping(save)
        result = checkpoint(run, *args, use_reentrant=False, context_fn=keeping.contexts, **kwargs)
        keeping.check(where)
        return result

    return call


def refuse_cache(where: str, arguments: Sequence[Any]) -> None:
    """Raise RuntimeError where a call fills a cache of keys and values, which recomputation would fill once more."""
    for kind in map(type, arguments):
        if kind.__module__.startswith("transformers.") and kind.__name__.endswith("Cache"):
            raise RuntimeError(
                f"{where}: is called with a {kind.__name__}, which recomputation would fill once more; build the model "
                "with use_cache=False, capture it, and export once more"
            )


# ---- offload -------------------------------------------------------------------------------------


class Copy:
    """The storage of a tensor that autograd saved, on the host; all views of it are made from one copy back.

    streams: to copy on, None where the device has none.
    """

    def __init__(self, tensor: torch.Tensor, streams: Streams | None) -> None:
        self.streams, self.device = streams, tensor.device
        flat = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        if streams is None:
            self.host = torch.empty_like(flat, device=HOST).copy_(flat)
        else:
            self.host = torch.empty_like(flat, device=HOST, pin_memory=True)
            self.left = streams.leave(flat, self.host)
        self.back: torch.Tensor | None = None
        self.arrived: Any = None

    def fetch(self) -> None:
        """Begin to copy it back, unless that has begun."""
        if self.back is None:
            self.back = torch.empty_like(self.host, device=self.device)
            if self.streams is None:
                self.back.copy_(self.host)
            else:
                self.arrived = self.streams.come_back(self.host, self.back, self.left)

    def flat(self) -> torch.Tensor:
        """The storage on the device, as one row; the computation waits for it."""
        self.fetch()
        assert self.back is not None
        if self.streams is not None:
            self.streams.wait(self.arrived)
        return self.back


class Streams:
    """One stream out and one back, beside that of the computation. module: `torch.cuda`, or a device's like it."""

    def __init__(self, module: Any) -> None:
        self.module, self.out, self.back = module, module.Stream(), module.Stream()

    def leave(self, source: torch.Tensor, host: torch.Tensor) -> Any:
        """Copy to the host once the computation so far has run. Returns the event of its end."""
        self.out.wait_stream(self.module.current_stream())
        with self.module.stream(self.out):
            host.copy_(source, non_blocking=True)
        source.record_stream(self.out)  # its memory is not reused before that
        return self.out.record_event()

    def come_back(self, host: torch.Tensor, target: torch.Tensor, left: Any) -> Any:
        """Copy to the device once the copy out has ended. Returns the event of its end."""
        self.back.wait_event(left)
        self.back.wait_stream(self.module.current_stream())  # the target's memory may be in use until then
        with self.module.stream(self.back):
            target.copy_(host, non_blocking=True)
        target.record_stream(self.back)
        return self.back.record_event()

    def wait(self, arrived: Any) -> None:
        """Let the computation wait for a copy."""
        self.module.current_stream().wait_event(arrived)


class Offload:
    """Sends chosen storages to the host when autograd saves them, and fetches them one ahead of backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.chosen: dict[int, tuple[Any, int]] = {}  # address of a storage -> the storage, and its number
        self.copies: dict[int, Any] = {}  # number -> its copy, while autograd has it
        self.next = 0
        self.packing = False
        self.streams: Streams | None = None

    def choose(self, tensor: Any) -> None:
        """Mark a storage; numbers are given in this order."""
        storage = tensor.untyped_storage()
        if self._number(storage) is None:
            self.chosen[storage._cdata] = (weakref.ref(storage), self.next)
            self.next += 1

    def _number(self, storage: torch.UntypedStorage) -> int | None:
        known = self.chosen.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else None

    def pack(self, tensor: torch.Tensor, everything: bool = False) -> Any:
        """What autograd keeps in place of a tensor."""
        storage = tensor.untyped_storage()
        if everything and storage.nbytes() >= LEAST and not self._is_weight(storage):
            self.choose(tensor)
        number = self._number(storage)
        if number is None:
            return tensor
        copy = self.copies[number]() if number in self.copies else None
        if copy is None:
            if not tensor.is_cpu and self.streams is None:
                self.streams = Streams(getattr(torch, tensor.device.type))
            self.packing = True  # what this runs does not count as an op of the call
            copy = Copy(tensor, self.streams)
            self.packing = False
            self.copies[number] = weakref.ref(copy)
        return number, copy, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that backward reads; begins to fetch those that it reads next."""
        if isinstance(packed, torch.Tensor):
            return packed
        number, copy, dtype, shape, stride, offset = packed
        copy.fetch()
        earlier = (each for i in range(number - 1, -1, -1) if i in self.copies and (each := self.copies[i]()))
        for other, _ in zip(earlier, range(AHEAD), strict=False):
            other.fetch()
        whole: torch.Tensor = copy.flat().view(dtype).as_strided(shape, stride, offset)
        return whole

    def _is_weight(self, storage: torch.UntypedStorage) -> bool:
        model = self.model()
        weights = () if model is None else (*model.parameters(), *model.buffers())
        return any(weight.untyped_storage()._cdata == storage._cdata for weight in weights)


LEAST = 1024
"""Bytes of the smallest storage that is sent where a module sends all that is saved in it."""


class Choosing(TorchDispatchMode):
    """Marks the results of those ops of a call that the plan numbers.

    results: name of an op -> how many of that name a call runs; and of those the positions, each with that of a result.
    """

    def __init__(self, offload: Offload, results: Mapping[str, tuple[int, Sequence[tuple[int, int]]]]) -> None:
        super().__init__()
        self.offload, self.results = offload, results
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and mark its results."""
        out = func(*args, **(kwargs or {}))
        name = name_of(func)
        if name in self.results and not self.offload.packing:
            position = self.seen[name]
            self.seen[name] += 1
            made = {x.untyped_storage()._cdata: x for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
            for wanted, k in self.results[name][1]:
                if wanted == position and k < len(made):
                    self.offload.choose(list(made.values())[k])
        return out

    def check(self, where: str) -> None:
        """Raise RuntimeError if the call ran another number of these ops than the plan was made for."""
        check_counts(where, self.seen, self.results)


def offloading(call: Run, where: str, offload: Offload, entry: Mapping[str, Any]) -> Run:
    """A function of whose saved tensors the plan sends some to the host."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if entry.get("send_input"):
            offload.choose(args[0])
        everything = entry.get("send") == "all"
        choosing = Choosing(offload, {} if everything else entry.get("send") or {})
        with saved_tensors_hooks(lambda tensor: offload.pack(tensor, everything), offload.unpack):
            if not choosing.results:
                return call(*args, **kwargs)
            with choosing:
                result = call(*args, **kwargs)
        choosing.check(where)
        return result

    return run


# ---- several modules, and all of them --------------------------------------------------------------


class Together:
    """Neighbours in a list of modules under one checkpoint: the first runs all, the others pass its result on."""

    def __init__(self, modules: Sequence[nn.Module], paths: Sequence[str]) -> None:
        self.runs = [module.forward for module in modules]
        self.where = f"{paths[0]} to {paths[-1]}"
        self.passed: Any = None
        self.others: tuple[Any, ...] = ()
        self.beside: tuple[Any, ...] | None = None  # what else each returns, None where that is the tensor alone
        self.left = 0
        for module, path in zip(modules, paths, strict=True):
            if module._forward_hooks or module._forward_pre_hooks:
                raise RuntimeError(f"{path}: has hooks, which would not run under a checkpoint round several modules")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call all modules, each on the first result of the one before."""
        x, rest = args[0], args[1:]
        del args
        for run in self.runs[:-1]:
            x, _ = divided(self.called(run, x, *rest, **kwargs), (rest, kwargs), self.where)
        return self.called(self.runs[-1], x, *rest, **kwargs)

    def called(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """Call one of them, with the further arguments that the first got."""
        try:
            return run(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            if run is self.runs[0]:
                raise
            raise RuntimeError(
                f"{self.where}: a module fails on the result of the one before and the further arguments of the first, "
                f"so that they cannot share a checkpoint: {error}"
            ) from error

    def entering(self, call: Run) -> Run:
        """What the first module becomes."""

        def enter(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.others, self.left = (args[1:], kwargs), len(self.runs) - 1
            first, self.beside = divided(result, self.others, self.where)
            self.passed = weakref.ref(first)
            return first if self.beside is None else (first, *self.beside)

        return enter

    def passing(self, *args: Any, **kwargs: Any) -> Any:
        """What each other module becomes."""
        if self.passed is None or self.passed() is not args[0]:
            raise RuntimeError(f"{self.where}: these modules are not called one after the other on each other's result")
        if not same_arguments(self.others, (args[1:], kwargs)):
            raise RuntimeError(f"{self.where}: these modules are not called with the same further arguments")
        result = args[0] if self.beside is None else (args[0], *self.beside)
        self.left -= 1
        if self.left <= 0:
            self.others, self.beside = (), None  # nothing is held beyond the last of them
        return result


def same_arguments(ones: Any, others: Any) -> bool:
    """Whether two calls got the same arguments: the same objects, or plain values that are equal."""
    (one, its), (other, theirs) = tree_flatten(ones), tree_flatten(others)
    if its != theirs:
        return False
    return all(
        a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b) for a, b in zip(one, other, strict=True)
    )


PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Values of which equal ones are the same argument."""


def divided(result: Any, others: Any, where: str) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
    """The tensor that a module hands to the next, and what it returns beside it, None where it returns no tuple.

    Beside it stay what it was given (T5's layers hand on the bias of positions), which all of them return alike. In
    place of what is its own (Bloom's attention weights) stands None: the step of the plan reads nothing of it.
    """
    if isinstance(result, torch.Tensor):
        return result, None
    if type(result) is not tuple or not result or not isinstance(result[0], torch.Tensor):
        raise RuntimeError(f"{where}: a module returns {type(result).__name__}, not a tensor for the next one")
    given = tree_leaves(others)
    return result[0], tuple(x if any(x is each for each in given) else None for x in result[1:])


def apply(model: nn.Module, plan: Sequence[Mapping[str, Any]] | None = None) -> nn.Module:
    """Wrap the modules that the plan names, in place; returns the model. Parameters and their names stay.

    plan: by default this file's.

    Raises RuntimeError for a path that is not a module of the model, or one that is wrapped already.
    """
    offload = Offload(model)
    wrapped = set[str]()
    for entry in PLAN if plan is None else plan:
        paths = entry["modules"]
        modules = [_module(model, path, wrapped) for path in paths]
        wrapped.update(paths)
        together = Together(modules, paths) if len(modules) > 1 else None
        where = together.where if together else paths[0]
        call: Run = together.run if together else modules[0].forward
        if entry["checkpoint"]:
            call = checkpointed(call, where, entry.get("save") or {})
        if "send" in entry:
            call = offloading(call, where, offload, entry)
        if together:
            for module in modules[1:]:
                module.forward = together.passing
            call = together.entering(call)
        modules[0].forward = call
    return model


def _module(model: nn.Module, path: str, wrapped: Collection[str]) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise RuntimeError(f"{path}: is not a module of {type(model).__name__}: {error}") from None
    if "forward" in vars(module) and path not in wrapped:
        raise RuntimeError(f"{path}: is wrapped already")
    return module


PLAN: Sequence[Mapping[str, Any]] = ()
"""Per entry: `modules`, paths, called one after the other where there are several; `checkpoint`, whether they are
recomputed; `save`, what a selective checkpoint keeps: per name of an op how many a call runs, and which of those;
`send`, what is sent to the host when it is saved: the same with pairs of an op and one of its results, or "all";
`send_input`: the first argument goes, too. What is wrapped inside another comes before it."""
