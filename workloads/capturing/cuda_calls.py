"""A script written for a GPU, on a PyTorch without one: what it asks of CUDA, answered while a step is captured.

Tensors and modules that it sends to "cuda" stay where they are, and what it creates there is created in their place:
fake tensors have no data, wherever they are. Synchronisation, statistics of memory, events and ranges of profilers do
nothing. There is one stream: what a script puts on another one runs where it stands. Gradient scalers that are created
now are enabled, as they would be with a GPU.

A script that asks whether there is a GPU is told that there is one, which knows bf16; installed packages that ask are
told the truth, since they would go on to ask it for more.

Departs: copies on a stream of their own take the device's time in the trace's order.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

from workloads.capturing.places import is_installed

CUDA = re.compile(r"cuda(:\d+)?")
NOTE = "tensors sent to or created on a GPU stay fake"

NOTHING = (
    *("synchronize", "empty_cache", "ipc_collect", "set_device", "init", "reset_peak_memory_stats"),
    *("reset_max_memory_allocated", "reset_accumulated_memory_stats"),
    *("nvtx.range_push", "nvtx.range_pop", "nvtx.mark"),
)
ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device")

ASKED: dict[str, Any] = {"is_available": True, "is_bf16_supported": True, "device_count": 1, "get_device_name": "GPU"}
"""What a script is told of its GPU, and an installed package is not."""
PRESENT = "there is a GPU, which knows bf16"


def goes_to_gpu(torch: Any, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call moves a tensor to a GPU."""
    if func is torch.Tensor.cuda:
        return True
    numbered = len(args) > 1 and type(args[1]) is int
    return func is torch.Tensor.to and (numbered or any(map(_is_gpu, (*args[1:2], kwargs.get("device")))))


def _is_gpu(value: Any) -> bool:
    """Whether a value names a GPU."""
    if isinstance(value, str):
        return CUDA.fullmatch(value) is not None
    return getattr(value, "type", None) == "cuda" and type(value).__name__ == "device"


class Event:
    """A `torch.cuda.Event` that measures nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing runs."""

    wait = synchronize = record

    def query(self) -> bool:
        """All is done."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """One millisecond."""
        return 1.0


class Stream:
    """A `torch.cuda.Stream` that is the one that there is."""

    device_index = stream_id = cuda_stream = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any, **__: Any) -> None:
        """Nothing runs."""

    wait_event = synchronize = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        """An event, of which all is done."""
        return Event() if event is None else event

    def query(self) -> bool:
        """All is done."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class CUDAGraph:
    """A `torch.cuda.CUDAGraph`, which can't be captured."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("a step that replays a CUDA graph has no ops to see: capture it without the graph")


@contextmanager
def answered(device: str, assumed: Callable[[str], None]) -> Iterator[None]:
    """Answer a script's calls of CUDA while the context lasts.

    device: where tensors stand that it wants on a GPU: "cpu", or "meta" while a module is built there.
    assumed: is called with a note each time a tensor would go to a GPU.
    """
    torch: Any = import_module("torch")
    modes: Any = import_module("torch.overrides")
    tensor = torch.Tensor
    arrays = (tensor.numpy, tensor.__array__, tensor.tolist)
    stay = {tensor.cuda, tensor.pin_memory}
    here = torch.device(device)

    class Mode(modes.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is tensor.__format__ and args[0].dim() == 0:
                return format(args[0].item(), args[1])  # a fake tensor has no format
            if func in arrays and hasattr(args[0], "fake_mode"):
                array = _array(args[0])
                return array.tolist() if func is tensor.tolist else array
            if func in stay:
                assumed(NOTE)
                return args[0]
            index = func is tensor.to and len(args) > 1 and type(args[1]) is int
            wanted = kwargs.get("device")
            if index or _is_gpu(wanted) or type(wanted) is int or any(map(_is_gpu, args)):
                assumed(NOTE)
                args = tuple(here if _is_gpu(x) or (index and i == 1) else x for i, x in enumerate(args))
                if wanted is not None:
                    kwargs = {**kwargs, "device": here}
            return func(*args, **kwargs)

    module_to = torch.nn.Module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None and layout is None and (_is_gpu(device) or device == here):
            return self  # fake parameters that are watched can't be exchanged, and need not be
        return module_to(self, *args, **kwargs)

    answers: dict[str, Any] = {**dict.fromkeys(NOTHING, _nothing), **dict.fromkeys(ZERO, _zero), "Event": Event}
    answers |= {"Stream": Stream, "CUDAGraph": CUDAGraph, "current_stream": _stream, "default_stream": _stream}
    answers |= {"set_stream": _nothing, "stream": _within, "graph": CUDAGraph}
    from unittest.mock import patch  # brings asyncio with it

    with ExitStack() as stack:
        for name, answer in answers.items():
            inner, _, name = name.rpartition(".")
            stack.enter_context(
                patch.object(import_module(".".join(filter(None, ("torch.cuda", inner)))), name, answer)
            )
        for name, value in ASKED.items():
            stack.enter_context(patch.object(torch.cuda, name, _told(getattr(torch.cuda, name), value, assumed)))
        common = import_module("torch.cuda.amp.common")
        stack.enter_context(patch.object(common, "amp_definitely_not_available", lambda: False))
        stack.enter_context(patch.object(torch.nn.Module, "to", to))
        stack.enter_context(patch.object(tensor, "record_stream", _nothing))
        stack.enter_context(patch.object(torch.nn.Module, "cuda", lambda self, device=None: self))
        stack.enter_context(Mode())
        yield


def _array(tensor: Any) -> Any:
    """A tensor's values as an array, all as its first is answered."""
    numpy: Any = import_module("numpy")
    value = tensor[(0,) * tensor.dim()].item() if tensor.numel() else 0
    return numpy.full(tuple(tensor.shape), value, dtype=str(tensor.dtype).removeprefix("torch."))


def _told(plain: Callable[..., Any], value: Any, assumed: Callable[[str], None]) -> Callable[..., Any]:
    """A question whose answer depends on who asks."""

    @wraps(plain)
    def answer(*args: Any, **kwargs: Any) -> Any:
        if is_installed(sys._getframe(1).f_code.co_filename):
            return plain(*args, **kwargs)
        assumed(PRESENT)
        return value

    return answer


def _nothing(*_: Any, **__: Any) -> None:
    """No GPU has to be asked."""


def _stream(*_: Any, **__: Any) -> Stream:
    return Stream()


def _within(stream: Any) -> Stream:
    """What `torch.cuda.stream` enters, of None, too."""
    return Stream()


def _zero(*_: Any, **__: Any) -> int:
    return 0
