"""Which parts a library puts its checkpoints round, as the library itself says.

A model of diffusers has a switch for checkpoints, and decides in its code what they are put round: the residual parts
of a stage, for instance, and not the attention beside them. So the switch is on while the step runs for the first time,
with a function that notes each part and calls it without a checkpoint. A model of timm has a switch, too, and calls
functions of timm's by name, which are exchanged meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from itertools import chain
from typing import Any

SWITCH, FUNCTION = "enable_gradient_checkpointing", "gradient_checkpointing_func"
TIMM_SWITCH, TIMM = "set_grad_checkpointing", "timm.models._manipulate"
TIMM_FUNCTIONS = ("checkpoint", "checkpoint_seq")


class WrappedParts:
    """Notes the parts of a module that its library would checkpoint, from now until `found` is asked.

    root: the module. Models in it whose checkpoints are on already are left as they are.
    """

    def __init__(self, root: Any) -> None:
        self._names = {id(part): path for path, part in root.named_modules()}
        self._noted: dict[str, None] = {}
        self._switched = [part for part in root.modules() if _has_switch(part)]
        for model in self._switched:
            model.enable_gradient_checkpointing(self._note)
        from unittest.mock import patch  # brings asyncio with it

        self._patches: list[Any] = []
        self._switched_of_timm = [part for part in root.modules() if _has_switch_of_timm(part)]
        for model in self._switched_of_timm:
            model.set_grad_checkpointing(True)
        answers: dict[str, Callable[..., Any]] = {"checkpoint": self._note, "checkpoint_seq": self._note_each}
        for file in {type(part).__module__ for part in root.modules()} if self._switched_of_timm else ():
            for name in TIMM_FUNCTIONS:
                if _is_of_timm(getattr(sys.modules[file], name, None)):
                    self._patches.append(patch.object(sys.modules[file], name, answers[name]))
                    self._patches[-1].start()

    def found(self) -> tuple[str, ...]:
        """The paths of the parts, in the order of their first calls; none where the library does not say."""
        self.close()
        return tuple(self._noted)

    def close(self) -> None:
        """Leave the library as it was."""
        for model in self._switched:
            model.disable_gradient_checkpointing()
        for model in self._switched_of_timm:
            model.set_grad_checkpointing(False)
        for each in self._patches:
            each.stop()
        self._switched, self._switched_of_timm, self._patches = [], [], []

    def _note_each(self, parts: Any, x: Any, *_: Any, flatten: bool = False, **__: Any) -> Any:
        """A sequence of parts, each checkpointed."""
        parts = parts.children() if hasattr(parts, "children") else parts
        for part in chain.from_iterable(parts) if flatten else parts:
            x = self._note(part, x)
        return x

    def _note(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        if path := self._names.get(id(part)):
            self._noted[path] = None
        return part(*args, **kwargs)


def _has_switch_of_timm(model: Any) -> bool:
    """Whether it is a model of timm's, whose checkpoints are off."""
    file = sys.modules.get(type(model).__module__)
    if not hasattr(type(model), TIMM_SWITCH) or not any(
        _is_of_timm(getattr(file, name, None)) for name in TIMM_FUNCTIONS
    ):
        return False
    return not any(getattr(part, "grad_checkpointing", False) for part in model.modules())


def _is_of_timm(function: Any) -> bool:
    return getattr(function, "__module__", "") == TIMM


def _has_switch(model: Any) -> bool:
    switch = getattr(type(model), SWITCH, None)
    if switch is None or not getattr(model, "_supports_gradient_checkpointing", False):
        return False
    takes_function = FUNCTION in signature(switch).parameters
    return takes_function and not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
