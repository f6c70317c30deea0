"""One row of the zoo: a step captured, and the same step under PyTorch's own tracker, counter and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from scripts.zoo_page.cases import Case
from sim import simulate
from sim.analysis.peak_memory import home_peak
from sim.errors import PolicyError, TiersimError, TraceError
from sim.hardware.platform import Engine, Platform, Tier
from sim.trace.chain import chain
from sim.trace.graph import Trace
from workloads.capture import capture
from workloads.capturing.cuda_calls import answered
from workloads.capturing.kernels import grouped_products, mapped_to_cuda
from workloads.capturing.substitute import fake_like, fake_module
from workloads.capturing.unpadded import unpadded

ROOM = 1 << 46


def machine() -> Platform:
    """A device in which all steps fit; peaks do not depend on its rates."""
    return Platform(
        "roomy",
        (Tier("hbm", ROOM, ROOM, 10**12, device=0),),
        (Engine("gpu", 0, "hbm", ("hbm",), {"fp32": 10**13, "bf16": 10**14, "fp16": 10**14}, launch=1000),),
        (),
    )


def row(name: str, case: Case) -> dict[str, Any]:
    """The figures of a step. A capture that fails says why in `error`; nothing else is known of it then."""
    try:
        step, assumed = case.build()
        began = time.process_time()
        trace = capture(**step)
        seconds = time.process_time() - began
    except TiersimError as error:
        return {"model": name, "library": case.library, "blocks": case.blocks, "error": str(error)}
    counted: list[int] = []
    tracker = tracked(step, counted=counted)
    own, whose = tracked_with_checkpoints(step, case.library, list(trace.meta["layer_names"]))
    return {
        "model": name,
        "library": case.library,
        "error": "",
        "ops": len(trace.ops),
        "parameters": trace.meta["parameters"],
        "capture_s": round(seconds, 1),
        "blocks": case.blocks,
        "layers": trace.meta["layers"],
        "stages": stages(trace),
        "peak": home_peak(simulate(trace, machine()).log),
        "tracker": tracker,
        "flops": trace.meta["model_flops"],
        "counter": counted[0],
        "uncounted": trace.meta.get("uncounted", {}),
        "recompute": recomputed(trace),
        "checkpointed": own,
        "checkpoints": whose,
        "assumed": sorted({*trace.meta.get("assumed", {}), *assumed}),
        "known": dict(case.known),
    }


def stages(trace: Trace) -> int:
    """The stages of the trace as a chain, 0 where it is none."""
    try:
        return len(chain(trace, [1] * len(trace.ops)))
    except TraceError:
        return 0


def recomputed(trace: Trace) -> int | None:
    """The peak of full recomputation; None without layers."""
    try:
        return home_peak(simulate(trace, machine(), "full_recompute").log)
    except PolicyError:
        return None


# ---- the same step under PyTorch's own tools -----------------------------------------------------


@contextmanager
def _as_captured(mode: Any) -> Iterator[None]:
    """Fake tensors of that mode, and the kernels and answers that a capture chooses."""
    torch = import_module("torch")
    from workloads.capturing.autocast import cuda_autocast

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in (
            mode,
            grouped_products(),
            mapped_to_cuda(_unnoted),
            cuda_autocast(_unnoted),
            answered("cpu", _unnoted),
            unpadded(_unnoted),
        ):
            stack.enter_context(context)
        yield


def _unnoted(_: str) -> None:
    """What was assumed the captured trace says."""


def tracked(step: dict[str, Any], change: Callable[[Any], None] | None = None, counted: list[int] | None = None) -> int:
    """The peak of PyTorch's tracker in bytes, sizes not rounded.

    step: arguments of `capture`, without an optimizer.
    change: what is done to the module first.
    counted: gets the FLOPs of PyTorch's counter, of a step before.
    """
    from sim.measure.tracked import PhaseTracker

    torch = import_module("torch")
    counters = import_module("torch.utils.flop_counter")
    mode = import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_module(torch, mode, step["module"], None)[0]
    if change is not None:
        change(model)
    with _as_captured(mode):
        given = fake_like(torch, step["inputs"])
        args, kwargs = ((), given) if isinstance(given, dict) else (given if isinstance(given, tuple) else (given,), {})
        targets = fake_like(torch, step.get("targets", ()))
        targets = targets if isinstance(targets, tuple) else (targets,)

        def run() -> None:
            result = model(*args, **kwargs)
            if "loss" in step:
                result = step["loss"](result, *targets)
            elif not isinstance(result, torch.Tensor):
                result = result.loss
            result.backward()

        aten = torch.ops.aten
        missing = {aten.convolution_backward: _gradients_of_convolution, aten._grouped_mm: _grouped_product}
        counter = counters.FlopCounterMode(display=False, custom_mapping=missing)
        if counted is not None:
            with counter:
                run()
            counted.append(counter.get_total_flops())
            model.zero_grad(set_to_none=True)
        tracker = PhaseTracker()
        leaves = [x for x in (*args, *kwargs.values(), *targets) if isinstance(x, torch.Tensor)]
        tracker.track_external(model, *leaves)
        with tracker.tracking():
            run()
    return max(tracker.highest.values())


def _gradients_of_convolution(
    gradient: Sequence[int], x: Sequence[int], w: Sequence[int], *args: Any, out_shape: Any = None
) -> int:
    """Each gradient takes what forward takes.

    PyTorch's own formula (2.13) multiplies that of the weight by the number of groups. The last argument says which
    gradients are asked for, the third before it whether the convolution is transposed.
    """
    *_, transposed, _, _, asked = args
    forward = import_module("torch.utils.flop_counter").conv_flop_count(x, w, gradient, transposed=transposed)
    return int(forward * sum(asked[:2]))


def _grouped_product(a: Sequence[int], b: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """PyTorch's counter (2.13) has none: each row is multiplied by the matrix of its group."""
    return int(2 * a[-2] * a[-1] * b[-1])


def tracked_with_checkpoints(step: dict[str, Any], library: str, layers: list[str]) -> tuple[int | None, str]:
    """The tracker's peak under the library's own checkpointing, or PyTorch's round each layer; and whose it is."""
    own = OWN.get(library)
    for change, whose in ((own, library), (partial(_round_layers, layers), "torch")):
        if change is None or (change is not own and not layers):
            continue
        try:
            return tracked(step, change), whose
        except (ValueError, AttributeError, NotImplementedError, RuntimeError):  # this model has none that runs
            continue
    return None, ""


def _of_transformers(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _of_timm(model: Any) -> None:
    model.set_grad_checkpointing()


def _of_diffusers(model: Any) -> None:
    model.enable_gradient_checkpointing()


OWN: dict[str, Callable[[Any], None]] = {
    "transformers": _of_transformers,
    "timm": _of_timm,
    "diffusers": _of_diffusers,
}


def _round_layers(layers: list[str], model: Any) -> None:
    checkpoint = import_module("torch.utils.checkpoint").checkpoint
    for path in dict.fromkeys(layers):
        module = model.get_submodule(path)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
