"""Captures any PyTorch training step as a trace, without an accelerator and without allocating the model.

The step runs under PyTorch's fake tensors, which have shapes and types but no data. A dispatch mode observes every op,
and weak references observe when PyTorch releases each storage. A replay of the trace that keeps everything therefore
has the peak that `torch.distributed._tools.mem_tracker.MemTracker` reports for the same step, to the byte.

Departs from a run on a GPU:

- Kernels are those of PyTorch's CPU path, except that dropout, attention and the default form of optimizers are CUDA's
  (see `workloads.capturing.kernels`); with `kernels="cpu"` these are the CPU's, too. Workspaces inside kernels are
  unknown.
- Where a tensor has several readers, autograd sums their gradients: in place in a real run, and under fake tensors (as
  under PyTorch's tracker) into a new tensor. Where a step is highest there, the peak is too high by that tensor: 7.6 %
  of a network of adapters beside wide layers, and then `meta["assumed"]` says so.
- Autocast for "cuda" casts what it would cast there (see `workloads.capturing.autocast`). A gradient scaler has to be
  created by the step, or by the function of a reference: without a GPU PyTorch disables one that exists before.
- A step for a GPU is captured as it is (see `workloads.capturing.cuda_calls`). Where it reads values outside the model,
  all goes well: they are finite, and no gradient overflows (see `workloads.capturing.asked`). What a model selects by
  values is of the size that `selected` says (see `workloads.capturing.selections`).
- Of a script (`capture_script`) everything lies on the GPU: what prepares a batch on the host runs there, and data that
  the script holds takes memory there. A script that makes its batch on the GPU is captured as it runs.
- Python's cycle collector is off, so that an object that only a cycle holds lives to the end of the iteration.
- Compiled functions run uncompiled, and a compiled module is refused.
- Hugging Face's models (version 5) take their batches to be without padding, unless a mask with padding is given with
  its values (see `workloads.capturing.unpadded`), and a row to be one sequence, unless `position_ids` with their values
  start again. Attention over packed sequences (`varlen_attn`) takes each to be as long as the longest may be.
- Recurrent layers over packed sequences (`pack_padded_sequence`) take the lengths that are known as values, and else
  that of the batch (see `workloads.capturing.packed`).

Needs PyTorch: pip install 'tiersim[torch]'.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from sim.arguments import explained
from sim.collecting import uncollected
from sim.errors import TiersimError, WorkloadError, closest, near
from sim.trace.chain import RECOMPUTED
from sim.trace.graph import Trace
from workloads.capturing.autocast import cuda_autocast
from workloads.capturing.building import build_trace
from workloads.capturing.cuda_calls import answered
from workloads.capturing.held import DESCRIBED, held_by, joined
from workloads.capturing.kernels import CHOICES, grouped_products, mapped_to_cuda
from workloads.capturing.making import made_fake, made_under_fake_tensors
from workloads.capturing.packed import padded_again
from workloads.capturing.places import line_of, way_out
from workloads.capturing.record import Recording
from workloads.capturing.recorder import Recorder
from workloads.capturing.reference import called, defaults, opened, sized
from workloads.capturing.seeds import seeded
from workloads.capturing.selections import Selected
from workloads.capturing.substitute import fake_like, fake_module
from workloads.capturing.sums import NOTE, sum_at_peak
from workloads.capturing.unpadded import has_padding, is_packed, unpadded
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
    "selected",
)
"""The keys that the dict of a reference given to `capture_from_reference` may have."""


@explained
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
    selected: Selected = None,
    observer: Observer | None = None,
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
    selected: for which share of its elements, from 0 to 1, a condition on values holds (a boolean mask, `nonzero`,
        `unique`, non-maximum suppression, a branch), or shares by file or line: {"rpn.py:283": 0.5, "*": 0.1}. By
        default a step that needs one is refused, but for what follows from a batch of ones (`capturing.asked`).
    observer: observes the captured iteration, too (`tiersim validate` has PyTorch's memory tracker do so).

    The trace's metadata records `device`, `kernels`, `mapped` (calls sent to other kernels), `rounding`, `layer_names`
    (per layer the path of its module; per call, if there are several), `torch` (version), `folded` (views), `on_host`
    (storages left out), and, if there are any, `recomputed` (ops that checkpoints of its own recompute), `assumed`
    (what the capture could not know, and how often it was asked) and `uncounted`: products, convolutions and attention
    whose FLOPs are unknown, so that their time is that of their bytes.

    Raises WorkloadError without PyTorch, for a step that cannot run under fake tensors, naming op and module, and for
    wrong arguments.
    """
    torch = _torch()
    _check_options(kernels, {"micro_batches": (micro_batches, 1), "warm_up": (warm_up, 0), "rounding": (rounding, 1)})
    mode, recorder = _fake_mode(), Recorder(cuda=kernels == "cuda", selected=selected)
    padded, packed = has_padding(torch, inputs), is_packed(torch, inputs)
    with _named_errors("building the step"):
        model, tuned = fake_module(torch, mode, module, optimizer)
        if observer is not None:
            observer.prepare(model)
        with mode, answered("cpu", _unnoted):
            args, kwargs = _arguments(fake_like(torch, inputs))
            target_arguments, _ = _arguments(fake_like(torch, targets))

    def iteration() -> None:
        if step is not None:
            step(model, tuned, *args, **kwargs)
            return
        for _ in range(micro_batches):
            result = model(*args, **kwargs)
            scalar = _loss(torch, result, target_arguments, loss)
            del result
            scalar.backward()
        if tuned is not None:
            tuned.step()
            tuned.zero_grad(set_to_none=True)

    def warm() -> None:
        iteration()
        if tuned is None and step is None:
            model.zero_grad(set_to_none=True)

    with _on_a_gpu(torch, mode, kernels, recorder, padded=padded, packed=packed):
        recorder.know_module(model, layers)
        for label, given in (("input", (args, kwargs)), ("target", target_arguments)):
            for i, tensor in enumerate(x for x in recorder.leaves(given) if isinstance(x, torch.Tensor)):
                recorder.know(tensor, f"{label}{i}", "input")
        optimizers = [] if tuned is None else [tuned]
        recording = _recorded(recorder, optimizers, [warm] * warm_up, _observed(observer, model, optimizers, iteration))
    facts = {"micro_batches": micro_batches, "samples": samples, "tokens": tokens}
    return _trace_of(recording, name or type(model).__name__, kernels, rounding, facts)


def capture_script(
    build: Callable[[], Any],
    *,
    name: str = "",
    samples: int | None = None,
    tokens: int | None = None,
    warm_up: int = 1,
    kernels: str = "cuda",
    rounding: int = 1,
    layers: str | Sequence[str] | None = None,
    selected: Selected = None,
    observer: Observer | None = None,
) -> Trace:
    """Capture a step as a training script holds it: a function without arguments that takes everything from around it.

    build: makes model, optimizer and all the rest under fake tensors, so that nothing is allocated, and returns the
        step. The modules and optimizers that it refers to are those of the trace (see `workloads.capturing.held`).
    The other arguments are those of `capture`. What `torch.compile` would compile runs uncompiled, and
        `meta["assumed"]` says so.

    Raises WorkloadError as `capture` does, and where the step refers to no module; Described where `build` returns the
    arguments of `capture`.
    """
    torch = _torch()
    _check_options(kernels, {"warm_up": (warm_up, 0), "rounding": (rounding, 1)})
    mode, recorder = _fake_mode(), Recorder(cuda=kernels == "cuda", selected=selected)
    with _on_a_gpu(torch, mode, kernels, recorder), made_under_fake_tensors(recorder.assume) as made:
        with _named_errors("building the step"):
            step = build()
        made()
        if isinstance(step, Mapping):
            raise Described
        if isinstance(step, torch.nn.Module):
            raise WorkloadError(
                f"the function returns the module {type(step).__name__} and no training step: {DESCRIBED}"
            )
        if not callable(step):
            raise WorkloadError("the function returns no step: a function without arguments")
        modules, optimizers = held_by(step)
        model = joined(modules, optimizers)
        made_fake(mode, model)
        if observer is not None:
            observer.prepare(model)
        recorder.know_module(model, layers, apart=[] if model in modules.values() else list(modules))
        built = dict(recorder.recording.assumed)
        recording = _recorded(recorder, optimizers, [step] * warm_up, _observed(observer, model, optimizers, step))
        recording.assumed = {**built, **recording.assumed}
    facts = {"micro_batches": 1, "samples": samples, "tokens": tokens}
    return _trace_of(recording, name or type(model).__name__, kernels, rounding, facts)


class Observer(Protocol):
    """Observes the captured iteration beside the recorder."""

    def prepare(self, model: Any) -> None:
        """Change the model, which has fake parameters, before its first iteration."""

    def around(self, model: Any, optimizers: Sequence[Any]) -> AbstractContextManager[Any]:
        """A context in which the captured iteration runs."""


def _observed(
    observer: Observer | None, model: Any, optimizers: Sequence[Any], iteration: Callable[[], Any]
) -> Callable[[], Any]:
    if observer is None:
        return iteration

    def run() -> None:
        with observer.around(model, optimizers):
            iteration()

    return run


class Described(Exception):
    """A function describes its step by the arguments of `capture`, and does not hold it."""


def _fake_mode() -> Any:
    return import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _on_a_gpu(
    torch: Any, mode: Any, kernels: str, recorder: Recorder, *, padded: bool = False, packed: bool = False
) -> Iterator[None]:
    """Everything acts as in a training run on a GPU, without data, and the recorder observes it."""
    with ExitStack() as stack:
        for context in (
            torch.compiler.set_stance("force_eager"),
            seeded(recorder.assume),
            uncollected(),  # what a search frees, and when, would depend on everything that ran before
            mode,
            grouped_products(),
            mapped_to_cuda(recorder.count) if kernels == "cuda" else nullcontext(),
            cuda_autocast(recorder.count),
            answered("cpu", recorder.assume),
            padded_again(),
            nullcontext() if padded else unpadded(recorder.assume, packed=packed),
            recorder.watching(),
        ):
            stack.enter_context(context)
        yield


def _recorded(
    recorder: Recorder, optimizers: Sequence[Any], warming: Sequence[Callable[[], Any]], iteration: Callable[[], Any]
) -> Recording:
    """The record of an iteration after those that warm it up."""
    for tuned in optimizers if recorder.cuda else ():
        _prefer_foreach(tuned)
    with _named_errors("the step"):
        for warm in warming[:-1]:
            warm()
        for warm in warming[-1:]:
            recorder.rehearse(warm)
        gc.collect()
        recorder.begin()
        iteration()
        return recorder.finish()


def _trace_of(recording: Recording, name: str, kernels: str, rounding: int, facts: Mapping[str, Any]) -> Trace:
    if not recording.kernels:
        raise WorkloadError("the step runs no op: there is nothing to simulate")
    if size := sum_at_peak(recording):
        recording.assumed[NOTE.format(size)] = 1
    known = {key: value for key, value in facts.items() if value is not None}
    meta = {"model": name, **_facts(recording, kernels), "rounding": rounding, **known}
    return build_trace(recording, meta, rounding)


def _check_options(kernels: str, numbers: Mapping[str, tuple[Any, int]]) -> None:
    """numbers: per option its value and the least that it may be. Raises WorkloadError naming the option."""
    if kernels not in CHOICES:
        raise WorkloadError(f"kernels {kernels!r} is unknown{near(str(kernels), CHOICES)}")
    for option, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise WorkloadError(f"{option}: needs an integer of at least {least}, has {value!r}{closest(value, least)}")


def _facts(recording: Recording, kernels: str) -> dict[str, Any]:
    """What a trace's metadata says of its capture."""
    counted = [k for k in recording.kernels if k.phase != "update" and not k.recomputed]
    orders = recording.convolutions
    again = sum(k.recomputed for k in recording.kernels)
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
        **({RECOMPUTED: again} if again else {}),
        **({"channels_last": True} if orders.get(True, 0) > orders.get(False, 0) else {}),
        **({"assumed": dict(recording.assumed)} if recording.assumed else {}),
        **({"uncounted": dict(sorted(uncounted.items()))} if uncounted else {}),
    }


@explained
def capture_from_reference(reference: str, sizes: Mapping[str, Any] | None = None, **changes: Any) -> Trace:
    """Capture the step that a function describes.

    reference: "module:function" or "file.py:function"; the current folder is searched for modules, too. The function
        is the step of a training script, or returns it, a function without arguments (see `capture_script`); or it
        returns a dict of `capture`'s arguments (`ARGUMENTS`), at least `module`.
    sizes: arguments of the function by name, such as `batch` and `sequence`; it needs parameters of these names, or of
        others that are usual for them (`batch_size`, `seq_len`: `workloads.capturing.reference.ALSO`). Where the dict
        says nothing else, `batch` is the number of samples, and `batch` times `sequence` that of tokens; a whole number
        that is a parameter's default is such a size, too.
    changes: replace entries of that dict.

    Raises WorkloadError naming what is missing, unknown or failed.
    """
    _torch()
    chosen, usual = dict(sizes or {}), dict[str, Any]()
    with opened(reference) as loaded, cuda_autocast(_unnoted), seeded(_unnoted):

        def build() -> Any:
            function = loaded()
            usual.update(defaults(function))
            found = called(function, reference, chosen)
            if callable(found) or (isinstance(found, Mapping) and not _are_results(found)):
                return found
            return partial(function, **sized(function, reference, chosen))

        try:
            trace = capture_script(build, **{**_rates(chosen), **changes})
        except Described:
            given = _described(loaded, reference, chosen)
            trace = capture(**{**_rates(chosen), **given, **changes})
    known = {**usual, **chosen}
    return with_facts(trace, **{**_rates(known), **trace.meta, **known})


def _rates(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Samples and tokens of an iteration, as far as its sizes tell."""
    rates = {"samples": sizes["batch"]} if "batch" in sizes else {}
    if len(sizes.keys() & {"batch", "sequence"}) == 2:
        rates["tokens"] = sizes["batch"] * sizes["sequence"]
    return rates


def _are_results(found: Mapping[Any, Any]) -> bool:
    """Whether a dict has what a step returns (its loss, its accuracy) and does not describe one."""
    tensor = _torch().Tensor
    return "module" not in found and all(isinstance(x, (int, float, str, tensor)) for x in found.values())


def _described(loaded: Callable[[], Callable[..., Any]], reference: str, sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of `capture` that a reference returns, with tensors that have their values."""
    with _named_errors(f"{reference!r}"), answered("cpu", _unnoted):
        given = called(loaded(), reference, sizes)
    if not isinstance(given, Mapping) or "module" not in given:
        raise WorkloadError(
            f"{reference!r}: must return a dict with at least 'module', or the step; or be the step, which returns "
            "nothing, or numbers and tensors"
        )
    for key in given:
        if key not in ARGUMENTS:
            raise WorkloadError(f"{reference!r}: {key!r} is unknown{near(str(key), ARGUMENTS)}")
    return given


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
def _named_errors(doing: str) -> Iterator[None]:
    """Report errors of foreign code in one line."""
    try:
        yield
    except (TiersimError, Described):
        raise
    except (Exception, SystemExit) as error:
        first = (str(error).splitlines() or [""])[0]
        line = f" at {place}" if (place := line_of(error.__traceback__)) else ""
        raise WorkloadError(f"{doing} failed{line}: {type(error).__name__}: {first}{way_out(error)}") from error


def _unnoted(_: str) -> None:
    """Where the tensors of a step come from makes no difference."""
