"""Which parts a library puts its checkpoints round, as the library itself says.

A model of diffusers has a switch for checkpoints, and decides in its code what they are put round: the residual parts
of a stage, for instance, and not the attention beside them. So the switch is on while the step runs for the first time,
with a function that notes each part and calls it without a checkpoint.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

SWITCH, FUNCTION = "enable_gradient_checkpointing", "gradient_checkpointing_func"


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

    def found(self) -> tuple[str, ...]:
        """The paths of the parts, in the order of their first calls; none where the library does not say."""
        for model in self._switched:
            model.disable_gradient_checkpointing()
        self._switched = []
        return tuple(self._noted)

    def _note(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        if path := self._names.get(id(part)):
            self._noted[path] = None
        return part(*args, **kwargs)


def _has_switch(model: Any) -> bool:
    switch = getattr(type(model), SWITCH, None)
    if switch is None or not getattr(model, "_supports_gradient_checkpointing", False):
        return False
    takes_function = FUNCTION in signature(switch).parameters
    return takes_function and not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
