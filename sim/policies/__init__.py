"""The policies: the file is the registration.

`policies/offload/swap_all.py` is the policy `swap_all` of family `offload`, and so is a package of that name. Others
register theirs through the entry-point group `tiersim.policies`, or are named by file: `path/to/file.py:Class`, or
`path/to/file.py` alone where it defines one policy. Parameters follow in brackets, as after any name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sim.arguments import explained
from sim.declared import allows_tuples, declarations
from sim.deprecation import present_names
from sim.errors import PolicyError, PolicyFailed, TiersimError, near
from sim.limits import calling
from sim.policies.base import Policy, check_decided, label
from sim.policies.composition import Composition
from sim.policies.composition.ownership import Part
from sim.policies.writing import Term, parameters_in, terms
from sim.regular_files import MOST_SOURCE, read_file

__all__ = [
    "FAMILIES",
    "admit_source",
    "executed_source",
    "family",
    "is_shipped",
    "label",
    "load",
    "names",
    "parameters_of",
    "policy_class",
    "policy_file",
    "policy_files",
    "written",
]

FAMILIES = ("baseline", "recompute", "offload", "state", "hybrid", "compression", "parallel")
ENTRY_POINTS = "tiersim.policies"
CALL_OF_FILE = re.compile(r"(?P<file>.*\.py)(:\w+)?\((?P<inside>.*)\)\s*", re.DOTALL)
"""A policy of a file with parameters: `path/to/file.py:Class(share=0.9)`."""


@cache
def _own() -> Mapping[str, str]:
    """Names of our policies and their families, from the folders; nothing is imported."""
    here = Path(__file__).parent
    return {
        path.stem: family
        for family in FAMILIES
        for path in sorted((here / family).iterdir())
        if (path.suffix == ".py" or (path / "__init__.py").is_file()) and not path.stem.startswith("_")
    }


@cache
def _foreign() -> Mapping[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def names() -> tuple[str, ...]:
    """Names of all policies at hand."""
    return (*_own(), *(name for name in _foreign() if name not in _own()))


def family(name: str) -> str:
    """The family of a policy: its folder, or "registered", "file" or "composition"."""
    parts = written(name)
    if len(parts) > 1 or parts[0].selector:
        return "composition"
    name = parts[0].name
    return _own().get(name, "file" if _is_file(name) else "registered")


def is_shipped(name: str) -> bool:
    """Whether a policy, as it is written, has no code but that of this program."""
    return all(part.name in _own() for part in written(name))


def policy_file(name: str) -> Path | None:
    """The Python file that the name of one policy stands for, there or not; None for one by name."""
    if not _is_file(name):
        return None
    return Path(name if name.endswith(".py") else name.rpartition(":")[0])


def policy_files(name: str) -> dict[str, Path]:
    """The Python files that a policy as it is written stands for, by the names of its parts."""
    found = {part.name: policy_file(part.name) for part in written(name)}
    return {part: path for part, path in found.items() if path is not None}


_admitted: dict[str, bytes] = {}
_executed: dict[str, bytes] = {}


def admit_source(path: Path, source: bytes) -> None:
    """Have a policy's file be what was read of it, if it is executed after this: it may change before."""
    _admitted[_module_name(path)] = source


def executed_source(path: Path) -> bytes | None:
    """What was executed of a policy's file in this process, None where nothing was."""
    key = _module_name(path)
    return _executed.get(key) if key in sys.modules else None


def policy_class(name: str) -> type[Policy]:
    """The class of a policy given by name, as `path/to/file.py:Class` or as `path/to/file.py`. Raises PolicyError."""
    if len(parts := written(name)) == 1 and not parts[0].selector:
        name = parts[0].name
    if _is_file(name):
        return _from_file(name)
    if name in _own():
        return _only_policy(importlib.import_module(f"sim.policies.{_own()[name]}.{name}"), name)
    if name in _foreign():
        found = _foreign()[name].load()
        if not (isinstance(found, type) and issubclass(found, Policy)):
            raise PolicyError(f"entry point {name!r} of {ENTRY_POINTS!r} is not a Policy")
        return found
    several = re.findall(r"[\w.]+", name)
    if len(several) > 1 and {*several} <= {*names()}:
        combined, listed = repr(" + ".join(several)), ",".join(several)
        raise PolicyError(f"no policy is called {name!r} (combined they are {combined}, as a list {listed})")
    first, comma, parameters = name.partition(",")
    if first in names() and comma and "=" in parameters:
        raise _without_parentheses(name, first, parameters)
    raise PolicyError(f"no policy is called {name!r}{near(name, names())}")


@explained
def load(name: str | Policy | type[Policy], **parameters: Any) -> Policy:
    """A policy with its parameters: as it is written, from its class, or one there is with some of them changed.

    name: of a policy; with parameters, as in "checkmate(method=rounding)"; or of several that are combined, as in
    "zero_offload + rotor(slots=200)" and "layers 0-7: full_recompute; rest: swap_all" (`sim.policies.composition`).
    Raises PolicyError naming an unknown parameter and the nearest one, or a value that its declaration does not allow.
    """
    if isinstance(name, str):
        parts = written(name)
        if len(parts) == 1 and not parts[0].selector:
            return _loaded(parts[0].name, {**parts[0].parameters, **parameters})
        if parameters:
            key = next(iter(parameters))
            raise PolicyError(f"policy {name!r}: {key}: give it to the part that has it, as in 'rotor({key}=…)'")
        return Composition(parts=tuple(Part(_loaded(part.name, part.parameters), part.selector) for part in parts))
    if isinstance(name, Policy) and not parameters:
        return _made(label(name), lambda: name)
    if isinstance(name, Policy):
        known = _known(type(name), label(name), parameters)
        return _made(label(name), lambda: dataclasses.replace(name, **known))
    return _loaded(name, parameters)


def written(name: str) -> list[Term]:
    """The parts of a policy as it is written; one for a file, whatever its path looks like. Raises PolicyError."""
    call = CALL_OF_FILE.fullmatch(name)
    if call and os.path.isfile(call["file"]):
        return [Term("", name[: call.start("inside") - 1], parameters_in(call["inside"], name))]
    file = policy_file(name)
    is_whole = (
        file is not None and os.path.isfile(file) and (name.endswith(".py") or "(" not in name.rpartition(":")[2])
    )
    return [Term("", name, {})] if is_whole else terms(name)


def _loaded(name: str | type[Policy], parameters: Mapping[str, Any]) -> Policy:
    if isinstance(name, type):
        found, called = name, name.__name__
        if not issubclass(found, Policy):
            raise PolicyError(f"{called!r} is not a Policy")
    else:
        found, called = policy_class(name), name
    given = _known(found, called, parameters)
    return _made(called, lambda: found(**given))


def _made(called: str, make: Callable[[], Policy]) -> Policy:
    """A policy as its class makes it, with all of its traits. Raises PolicyError, whatever its code raises."""
    try:
        with calling(called):
            policy = make()
            check_decided(policy)
            return policy
    except (TypeError, ValueError) as error:
        raise PolicyError(f"policy {called!r}: {error}") from None
    except TiersimError:
        raise
    except BaseException as error:  # `sys.exit()` in a policy ends no program
        if type(error) is KeyboardInterrupt:  # a person's
            raise
        raise PolicyError(f"policy {called!r}: {_line(error)}") from error


def parameters_of(policy: Policy) -> dict[str, Any]:
    """What `load` takes beside a policy's name: nothing for a composition, whose parts have theirs in its text."""
    if isinstance(policy, Composition):
        return {}
    return {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}


def _known(found: type[Policy], name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a policy, all known; lists, which is what files and command lines have, as the tuples meant."""
    known, declared = [field.name for field in dataclasses.fields(found)], declarations(found)
    given = {}
    for key, value in present_names(f"policy {name!r}: parameter", parameters, dataclasses.fields(found)).items():
        if key not in known:
            has = near(key, known) if known else "; it has no parameters"
            raise PolicyError(f"policy {name!r} has no parameter {key!r}{has}")
        given[key] = tuple(value) if isinstance(value, list) and allows_tuples(declared[key]) else value
    return given


def _policies_of(module: Any) -> list[type[Policy]]:
    """The policies that a file defines and offers."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Policy)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
    ]


def _only_policy(module: Any, name: str) -> type[Policy]:
    public = _policies_of(module)
    if len(public) != 1:
        raise PolicyError(f"the file of policy {name!r} must define one policy; it defines {len(public)}")
    return public[0]


def _is_file(name: str) -> bool:
    return ":" in name or name.endswith(".py")


def _module_name(path: Path) -> str:
    """The same in every process, so that what a policy pickles can be read in another."""
    return f"tiersim_policy_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _without_parentheses(name: str, policy: str, parameters: str) -> PolicyError:
    return PolicyError(f"policy {name!r}: parameters go in parentheses: '{policy}({parameters.strip()})'")


def _from_file(name: str) -> type[Policy]:
    path_text, _, class_name = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    path = Path(path_text)
    if path.suffix != ".py" or not os.path.isfile(path):
        if path_text in names() and "=" in class_name:
            raise _without_parentheses(name, path_text, class_name)
        raise PolicyError(f"policy {name!r}: no Python file {path_text!r}")
    key = _module_name(path)
    module = sys.modules.get(key)
    if module is None:
        spec = importlib.util.spec_from_file_location(key, path)
        if spec is None or spec.loader is None:
            raise PolicyError(f"policy {name!r}: {path_text!r} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        try:
            # read once, and not by the loader, which would take a compiled file that lies beside it instead
            source = _executed[key] = _admitted[key] if key in _admitted else read_file(path, MOST_SOURCE)
            with calling(name):
                exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            del sys.modules[key]
            if type(error) in (KeyboardInterrupt, PolicyFailed):  # a person's, or of a limit
                raise
            raise PolicyError(f"policy {name!r}: {path_text}: {_line(error)}") from error
    if not class_name:
        public = _policies_of(module)
        if not public:
            raise PolicyError(f"policy {name!r}: the file defines no subclass of Policy")
        if len(public) > 1:
            raise PolicyError(
                f"policy {name!r}: the file defines {len(public)} policies; name the class: "
                f"{path_text}:{public[0].__name__}"
            )
        return public[0]
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        classes = [
            k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Policy) and v is not Policy
        ]
        raise PolicyError(f"policy {name!r}: {path_text} has no policy class {class_name!r}{near(class_name, classes)}")
    return found
