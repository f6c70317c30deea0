"""Steps of captured models, simulated and under PyTorch's memory tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sim.errors import WorkloadError
from sim.trace.graph import Trace
from workloads.capture import capture, capture_from_reference
from workloads.capturing.selections import Selected
from workloads.models import read_values
from workloads.steps import is_reference, training_step

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class CapturedStep:
    """A step of a model of any size.

    simulated: the trace that `tiersim run` simulates, at these sizes (`batch`, `sequence`).
    observed: captures the step at these sizes with an observer (see `workloads.capture.Observer`).
    """

    simulated: Callable[[Sizes], Trace]
    observed: Callable[[Sizes, Any], Any]


def captured_step(model: Any, precision: str, attention: str, selected: Selected = None) -> CapturedStep:
    """The step of a function (`FILE.py:FUNCTION`), or of a model that `transformers` builds from its configuration.

    Raises WorkloadError for options that a function does not have.
    """
    if not is_reference(model):
        axes: dict[str, Any] = {"precision": precision, "attention": attention, "selected": selected}
        return CapturedStep(lambda sizes: training_step(model, **axes, **sizes), _of_library(model, axes))
    for option, value, default in (("precision", precision, "fp32"), ("attention", attention, "sdpa")):
        if value != default:
            raise WorkloadError(f"{option}: {model!r} is a function, which has its own; give no {option}")
    changes = {} if selected is None else {"selected": selected}
    return CapturedStep(
        lambda sizes: training_step(model, selected=selected, **sizes),
        lambda sizes, observer: capture_from_reference(model, sizes, observer=observer, **changes),
    )


def _of_library(model: Any, axes: Mapping[str, Any]) -> Callable[[Sizes, Any], Any]:
    def observed(sizes: Sizes, observer: Any) -> Any:
        from workloads.hugging_face import default_step

        values, name, where = read_values(model)
        taken: dict[str, Any] = {**axes, **sizes}
        arguments, _ = default_step(values, name, where, **taken)
        return capture(**arguments, observer=observer)

    return observed
