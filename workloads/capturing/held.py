"""What a function that holds a training step refers to: its models and optimizers, by the names that it has for them.

Followed are variables of enclosing functions, globals, attributes and the contents of containers, from the function
through the objects and functions of its script, not through those of installed packages' functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from sim.errors import WorkloadError
from workloads.capturing.places import is_installed

MOST = 20_000
"""Objects that are looked at before the search ends."""
DESCRIBED = (
    "name a function that is one step of the loop, with model and optimizer made outside it, at the file's top level; "
    "or one that builds all and returns such a step, as in `return step`, or a dict with `module`, `inputs` and `loss`"
)
"""What a function must be to be captured, in the words of an error."""
PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, BuiltinFunctionType)


def held_by(step: Any) -> tuple[dict[str, Any], list[Any]]:
    """The outermost modules with parameters, by name, and the optimizers that a step refers to, in order."""
    torch: Any = import_module("torch")
    modules: dict[str, Any] = {}
    optimizers: list[Any] = []
    seen: set[int] = set()
    queue: list[tuple[str, Any]] = [("model", step)]
    for name, value in queue:  # grows while it is walked
        if isinstance(value, (*PLAIN, torch.Tensor)) or id(value) in seen or len(seen) > MOST:
            continue
        seen.add(id(value))
        if isinstance(value, torch.optim.Optimizer):
            optimizers.append(value)
        elif isinstance(value, torch.nn.Module):
            modules[_free(name.replace(".", "_"), modules)] = value
            queue += ((key, each) for key, each in vars(value).items() if not key.startswith("_"))
        else:
            queue += _inside(name, value)
    return _outermost(modules), optimizers


def joined(modules: dict[str, Any], optimizers: list[Any]) -> Any:
    """One module that has all of them as parts, and what else the optimizers train; a single module is itself.

    Raises WorkloadError where there is nothing.
    """
    torch: Any = import_module("torch")
    known = {id(p) for module in modules.values() for p in module.parameters()}
    trained = [p for tuned in optimizers for group in tuned.param_groups for p in group["params"]]
    others = list({id(p): p for p in trained if id(p) not in known}.values())
    if not modules and not others:
        raise WorkloadError(
            f"the function trains no module that was made before its call, so that there is no step: {DESCRIBED}"
        )
    if len(modules) == 1 and not others:
        return next(iter(modules.values()))
    name = " and ".join(type(module).__name__ for module in modules.values())
    whole = type(name or "Module", (torch.nn.Module,), {})()
    for name, module in modules.items():
        whole.add_module(name, module)
    if others:
        whole.add_module("trained", torch.nn.ParameterList(others))
    return whole


def _free(name: str, taken: dict[str, Any]) -> str:
    return name if name not in taken else next(f"{name}{i}" for i in range(2, MOST) if f"{name}{i}" not in taken)


def _outermost(modules: dict[str, Any]) -> dict[str, Any]:
    """Those with parameters that are no part of another."""
    parts = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    return {
        name: module
        for name, module in modules.items()
        if id(module) not in parts and next(module.parameters(), None) is not None
    }


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, with names."""
    if isinstance(value, MethodType):
        yield name, value.__self__
        yield name, value.__func__
    elif isinstance(value, partial):
        yield name, value.func
        yield from ((name, each) for each in value.args)
        yield from value.keywords.items()
    elif isinstance(value, FunctionType):
        if is_installed(value.__code__.co_filename):
            return
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield variable, cell.cell_contents
            except ValueError:  # not yet assigned
                continue
        names = _names(value.__code__)
        yield from ((each, value.__globals__[each]) for each in names if each in value.__globals__)
        yield from ((name, each) for each in value.__defaults__ or ())
    elif isinstance(value, dict):
        yield from ((key if isinstance(key, str) else name, each) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((name, each) for each in list(value))
    else:
        yield from list(getattr(value, "__dict__", {}).items())
        if not is_installed(getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""):
            yield from ((name, each) for each in vars(type(value)).values() if isinstance(each, FunctionType))


def _names(code: CodeType) -> dict[str, None]:
    """The global names in a function and in those inside it, in order."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(_names(constant))
    return found
