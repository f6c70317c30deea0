"""The policies: the file is the registration.

`policies/offload/vdnn.py` is the policy `vdnn` of family `offload`. Others register theirs through the
entry-point group `tiersim.policies`, or are named by file: `path/to/file.py:Class`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sim.errors import PolicyError, near
from sim.policies.base import Policy

FAMILIES = ("baseline", "recompute", "offload", "hybrid", "compression", "parallel")
ENTRY_POINTS = "tiersim.policies"


@cache
def _own() -> Mapping[str, str]:
    """Names of our policies and their families, from the folders; nothing is imported."""
    here = Path(__file__).parent
    return {
        path.stem: family
        for family in FAMILIES
        for path in sorted((here / family).glob("*.py"))
        if not path.stem.startswith("_")
    }


@cache
def _foreign() -> Mapping[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def names() -> tuple[str, ...]:
    """Names of all policies at hand."""
    return (*_own(), *(name for name in _foreign() if name not in _own()))


def family(name: str) -> str:
    """The family of a policy: its folder, or "registered" or "file"."""
    return _own().get(name, "file" if ":" in name else "registered")


def policy_class(name: str) -> type[Policy]:
    """The class of a policy given by name or as `path/to/file.py:Class`. Raises PolicyError."""
    if ":" in name:
        return _from_file(name)
    if name in _own():
        return _only_policy(importlib.import_module(f"sim.policies.{_own()[name]}.{name}"), name)
    if name in _foreign():
        found = _foreign()[name].load()
        if not (isinstance(found, type) and issubclass(found, Policy)):
            raise PolicyError(f"entry point {name!r} of {ENTRY_POINTS!r} is not a Policy")
        return found
    raise PolicyError(f"no policy is called {name!r}{near(name, names())}")


def load(name: str | Policy, **parameters: Any) -> Policy:
    """A policy with its parameters. Raises PolicyError naming an unknown parameter and the nearest one."""
    if isinstance(name, Policy):
        return dataclasses.replace(name, **parameters) if parameters else name
    found = policy_class(name)
    known = [field.name for field in dataclasses.fields(found)]
    for key in parameters:
        if key not in known:
            has = near(key, known) if known else "; it has no parameters"
            raise PolicyError(f"policy {name!r} has no parameter {key!r}{has}")
    try:
        return found(**parameters)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"policy {name!r}: {error}") from None


def _only_policy(module: Any, name: str) -> type[Policy]:
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module.__name__
    ]
    public = [value for value in own if not value.__name__.startswith("_")]
    if len(public) != 1:
        raise PolicyError(f"the file of policy {name!r} must define one policy; it defines {len(public)}")
    return public[0]


def _from_file(name: str) -> type[Policy]:
    path_text, _, class_name = name.rpartition(":")
    path = Path(path_text)
    if path.suffix != ".py" or not path.is_file():
        raise PolicyError(f"policy {name!r}: no Python file {path_text!r}")
    key = f"tiersim_policy_{abs(hash(str(path.resolve())))}"
    module = sys.modules.get(key)
    if module is None:
        spec = importlib.util.spec_from_file_location(key, path)
        if spec is None or spec.loader is None:
            raise PolicyError(f"policy {name!r}: {path_text!r} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[key]
            raise PolicyError(f"policy {name!r}: {path_text}: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        classes = [
            k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Policy) and v is not Policy
        ]
        raise PolicyError(f"policy {name!r}: {path_text} has no policy class {class_name!r}{near(class_name, classes)}")
    return found
