"""Captures any PyTorch training step as a trace, without an accelerator and without allocating the model.

The step runs under PyTorch's fake tensors, which have shapes and types but no data. A dispatch mode observes every op,
and weak references observe when PyTorch releases each storage. A replay of the trace that keeps everything therefore
has the peak that `torch.distributed._tools.mem_tracker.MemTracker` reports for the same step, to the byte.

Departs from a run on a GPU:

- Kernels are those of PyTorch's CPU path, except that dropout, attention and the default form of optimizers are CUDA's
  (see `workloads.capturing.kernels`); with `kernels="cpu"` these are the CPU's, too. Workspaces inside kernels are
  unknown.
- Autocast for "cuda" casts what it would cast there (see `workloads.capturing.autocast`). A gradient scaler has to be
  created by the step, or by the function of a reference: without a GPU PyTorch disables one that exists before.
- A step for a GPU is captured as it is (see `workloads.capturing.cuda_calls`). Where it reads values outside the model,
  all goes well: they are finite, and no gradient overflows (see `workloads.capturing.asked`).
- Python's cycle collector is off, so that an object that only a cycle holds lives to the end of the iteration.
- Compiled functions run uncompiled, and a compiled module is refused.
- Hugging Face's models (version 5) take their batches to be without padding, unless a mask with padding is given with
  its values (see `workloads.capturing.unpadded`).

Needs PyTorch: pip install 'tiersim[torch]'.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from sim.errors import TiersimError, WorkloadError, near
from sim.trace.graph import Trace
from workloads.capturing.autocast import cuda_autocast
from workloads.capturing.building import build_trace
from workloads.capturing.cuda_calls import answered
from workloads.capturing.kernels import CHOICES, grouped_products, mapped_to_cuda
from workloads.capturing.places import line_of
from workloads.capturing.record import Recording
from workloads.capturing.recorder import Recorder
from workloads.capturing.substitute import fake_like, fake_module
from workloads.capturing.unpadded import has_padding, unpadded
from workloads.importers.optrace import PRODUCTS, kind_of

ARGUMENTS = (
    "module",
    "inputs",
    "targets",
    "loss",
    "optimizer",
    "step",
    "name",
    "samples",
    "tokens",
    "micro_batches",
    "warm_up",
    "kernels",
    "rounding",
    "layers",
)
"""The keys that the dict of a reference given to `capture_from_reference` may have."""


def capture(
    module: Any,
    inputs: Any = (),
    *,
    targets: Any = (),
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    step: Callable[..., Any] | None = None,
    name: str = "",
    samples: int | None = None,
    tokens: int | None = None,
    micro_batches: int = 1,
    warm_up: int = 1,
    kernels: str = "cuda",
    rounding: int = 1,
    layers: str | Sequence[str] | None = None,
) -> Trace:
    """Capture one training iteration of `module` in its steady state.

    module: a function that builds a `torch.nn.Module`, called with "meta" as default device, so that nothing is
        allocated; or a module, of which a fake copy is made while the module itself is left alone.
    inputs: of the forward pass: one tensor, a tuple, a dict of keywords, or a function that creates one of these under
        fake tensors. Tensors may be on any device; only their shapes and types are used.
    targets: further arguments of `loss`, in the same forms except a dict.
    loss: maps the result and the targets to a scalar; by default the result itself, its attribute `loss` or its entry
        "loss". The result is released before backward, as in training loops that keep only the loss.
    optimizer: a function (or class) from the list of trainable parameters to a `torch.optim.Optimizer`, or an optimizer
        of `module`'s parameters; None leaves the gradients as the result.
    step: replaces all of these: called once per iteration with the fake module, the optimizer and the inputs.
    name: of the model in the trace; by default its class.
    samples, tokens: per iteration, for rates in reports.
    micro_batches: how often forward and backward run, accumulating gradients, before the optimizer does.
    warm_up: iterations before the captured one; the first one creates the optimizer's state.
    kernels: "cuda" for a CUDA GPU's dropout and attention kernels, foreach optimizers, and step counters on the host,
        which needs no GPU; "cpu" for those of PyTorch on a CPU.
    rounding: sizes are rounded up to multiples of this many bytes; PyTorch's CUDA allocator rounds to 512.
    layers: which parts of the module are its layers: names of classes (`EncoderBlock`) or paths (`encoder.layers.*`),
        or patterns of these; by default what repeats (see `workloads.capturing.layers`).

    The trace's metadata records `device`, `kernels`, `mapped` (calls sent to other kernels), `rounding`, `layer_names`
    (per layer the path of its module; per call, if there are several), `torch` (version), `folded` (views), `on_host`
    (storages left out), and, if there are any, `assumed` (what the capture could not know, and how often it was asked)
    and `uncounted`: products, convolutions and attention whose FLOPs are unknown, so that their time is that of their
    bytes.

    Raises WorkloadError without PyTorch, for a step that cannot run under fake tensors, naming op and module, and for
    wrong arguments.
    """
    torch = _torch()
    _check_options(kernels, {"micro_batches": (micro_batches, 1), "warm_up": (warm_up, 0), "rounding": (rounding, 1)})
    mode = import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)
    padded = has_padding(torch, inputs)
    with _named_errors("building the step"):
        model, tuned = fake_module(torch, mode, module, optimizer)
        with mode, answered("cpu", _unnoted):
            args, kwargs = _arguments(fake_like(torch, inputs))
            target_arguments, _ = _arguments(fake_like(torch, targets))
    recorder = Recorder(model, cuda=kernels == "cuda", layers=layers)
    if kernels == "cuda" and tuned is not None:
        _prefer_foreach(tuned)

    def iteration() -> None:
        if step is not None:
            step(model, tuned, *args, **kwargs)
            return
        for _ in range(micro_batches):
            result = model(*args, **kwargs)
            scalar = _loss(torch, result, target_arguments, loss)
            del result
            with recorder.backward():
                scalar.backward()
        if tuned is not None:
            tuned.step()
            tuned.zero_grad(set_to_none=True)

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_no_collection())
        stack.enter_context(mode)
        stack.enter_context(grouped_products())
        stack.enter_context(mapped_to_cuda(recorder.count) if kernels == "cuda" else nullcontext())
        stack.enter_context(cuda_autocast(recorder.count))
        stack.enter_context(answered("cpu", recorder.assume))
        stack.enter_context(nullcontext() if padded else unpadded(recorder.assume))
        recorder.know_module()
        for label, given in (("input", (args, kwargs)), ("target", target_arguments)):
            for i, tensor in enumerate(x for x in recorder.leaves(given) if isinstance(x, torch.Tensor)):
                recorder.know(tensor, f"{label}{i}", "input")
        stack.enter_context(recorder.watching())
        stack.enter_context(_named_errors("the step"))
        for _ in range(warm_up):
            iteration()
            if tuned is None and step is None:
                model.zero_grad(set_to_none=True)
        gc.collect()
        recorder.begin()
        iteration()
        recording = recorder.finish()
    if not recording.kernels:
        raise WorkloadError("the step runs no op: there is nothing to simulate")
    meta = {
        "model": name or type(model).__name__,
        **_facts(recording, kernels),
        "rounding": rounding,
        "micro_batches": micro_batches,
        **{key: value for key, value in (("samples", samples), ("tokens", tokens)) if value is not None},
    }
    return build_trace(recording, meta, rounding)


def _check_options(kernels: str, numbers: Mapping[str, tuple[Any, int]]) -> None:
    """numbers: per option its value and the least that it may be. Raises WorkloadError naming the option."""
    if kernels not in CHOICES:
        raise WorkloadError(f"kernels {kernels!r} is unknown{near(str(kernels), CHOICES)}")
    for option, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise WorkloadError(f"{option}: needs an integer of at least {least}, has {value!r}")


def _facts(recording: Recording, kernels: str) -> dict[str, Any]:
    """What a trace's metadata says of its capture."""
    counted = [k for k in recording.kernels if k.phase != "update" and not k.recomputed]
    uncounted = Counter(k.op for k in recording.kernels if not k.flops and kind_of(k.op, k.phase) in PRODUCTS)
    return {
        "source": "captured under fake tensors",
        "torch": recording.version,
        "device": "cpu",
        "kernels": kernels,
        "mapped": dict(recording.mapped),
        "layers": len(recording.layers),
        "layer_names": list(recording.layers),
        "parameters": recording.parameters,
        "model_flops": sum(k.flops for k in counted),
        "folded": recording.folded,
        "on_host": recording.host,
        **({"assumed": dict(recording.assumed)} if recording.assumed else {}),
        **({"uncounted": dict(sorted(uncounted.items()))} if uncounted else {}),
    }


def capture_from_reference(reference: str, sizes: Mapping[str, Any] | None = None, **changes: Any) -> Trace:
    """Capture the step that a function describes.

    reference: "module:function" or "file.py:function"; the current folder is searched for modules, too. The function
        returns a dict of `capture`'s arguments (`ARGUMENTS`), at least `module`.
    sizes: arguments of the function by name, such as `batch` and `sequence`; it needs parameters of these names. Where
        the dict says nothing else, `batch` is the number of samples, and `batch` times `sequence` that of tokens.
    changes: replace entries of that dict.

    Raises WorkloadError naming what is missing, unknown or failed.
    """
    where, _, function_name = reference.partition(":")
    if not where or not function_name:
        raise WorkloadError(f"{reference!r}: expected 'module:function'")
    _torch()
    try:
        if where.endswith(".py"):
            util = import_module("importlib.util")
            spec = util.spec_from_file_location("captured_reference", where)
            source = util.module_from_spec(spec)
            spec.loader.exec_module(source)
        else:
            sys.path.insert(0, os.getcwd())
            try:
                source = import_module(where)
            finally:
                sys.path.remove(os.getcwd())
    except TiersimError:
        raise
    except Exception as error:
        raise WorkloadError(f"{reference!r}: {where} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(source, function_name, None)
    if not callable(function):
        hint = near(function_name, (name for name in vars(source) if name[0] != "_"))
        raise WorkloadError(f"{reference!r}: no function {function_name!r}{hint}")
    sizes = dict(sizes or {})
    parameters = signature(function).parameters
    for size in sizes:
        if size not in parameters and not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
            takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
            raise WorkloadError(f"{reference!r}: {size}: the function needs a parameter of this name, and {takes}")
    with _named_errors(f"{reference!r}"), answered("cpu", _unnoted):
        given = function(**sizes)
    if not isinstance(given, Mapping) or "module" not in given:
        raise WorkloadError(f"{reference!r}: must return a dict with at least 'module'")
    for key in given:
        if key not in ARGUMENTS:
            raise WorkloadError(f"{reference!r}: {key!r} is unknown{near(str(key), ARGUMENTS)}")
    rates = {"samples": sizes["batch"]} if "batch" in sizes else {}
    if len(sizes.keys() & {"batch", "sequence"}) == 2:
        rates["tokens"] = sizes["batch"] * sizes["sequence"]
    return with_facts(capture(**{**rates, **given, **changes}), **sizes)


def with_facts(trace: Trace, **facts: Any) -> Trace:
    """The same trace, whose metadata has these facts, too."""
    meta = {**trace.meta, **facts}
    return Trace(trace.tensor_columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=meta)


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError:
        raise WorkloadError("capturing a step needs PyTorch: pip install 'tiersim[torch]'") from None


def _arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, Mapping):
        return (), {str(key): x for key, x in value.items()}
    return (tuple(value), {}) if isinstance(value, (list, tuple)) else ((value,), {})


def _loss(torch: Any, result: Any, targets: tuple[Any, ...], loss: Callable[..., Any] | None) -> Any:
    if loss is not None:
        result = loss(result, *targets)
    elif isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    elif not isinstance(result, torch.Tensor) and hasattr(result, "loss"):
        result = result.loss
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise WorkloadError("loss: the step has no scalar to differentiate; give a function of the module's result")
    return result


def _prefer_foreach(optimizer: Any) -> None:
    """Select the foreach form, which is the default of optimizers for parameters on a GPU."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn Python's cycle collector off: what it frees, and when, would depend on everything that ran before."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _named_errors(doing: str) -> Iterator[None]:
    """Report errors of foreign code in one line."""
    try:
        yield
    except TiersimError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        line = f" at {place}" if (place := line_of(error.__traceback__)) else ""
        raise WorkloadError(f"{doing} failed{line}: {type(error).__name__}: {first}") from error


def _unnoted(_: str) -> None:
    """Where the tensors of a step come from makes no difference."""
