"""Identities of cells: hashes of all that an answer depends on, so that resuming a sweep never shows a stale answer.

A part of the program is hashed together with everything that it imports of the program, read from the sources,
so that an edited helper changes the identities that depend on it and no others.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sim.policies.base import Policy
from sim.policies.composition import Composition
from sim.sweeps.probes import engine_results, solver_results

PACKAGES = ("sim", "workloads")
ENGINE = (
    *("sim.sweeps.cell", "sim.sweeps.plans", "sim.sweeps.asked", "sim.sweeps.job", "sim.sweeps.kept"),
    *("sim.experiment", "sim.analysis.summary"),
)
"""The modules that turn a trace, a platform and a policy into figures; `sim.sweeps.cell` runs a cell."""

APART = ("sim.report", "sim.pages", "sim.commands", "sim.sweeps")
"""Modules that show figures or distribute cells but compute none; followed only if named in `ENGINE`."""

WORKLOADS = ("workloads.steps", "sim.trace.io")
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where a statement has others; expressions have none."""

LIBRARIES = ("simpy", "numpy")
SOLVER_LIBRARIES = ("scipy", "ortools")


def digest(value: Any) -> str:
    """SHA-256 of a value as canonical JSON, in hexadecimal; a value that JSON lacks is represented by its `repr`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def engine_version() -> str:
    """Hash of the sources of the engine and all it imports, and of the libraries under it.

    Of a library its release counts, and what it gives for a probe; a patch that changes no result changes no id.
    """
    return digest([source_hash(ENGINE), _releases(LIBRARIES), engine_results()])


@cache
def workload_version() -> str:
    """Hash of the sources that build and read traces."""
    return source_hash(WORKLOADS)


_class_sources: dict[type[Policy], str] = {}


def policy_identity(policy: Policy) -> str:
    """Hash of a policy's parameters and of the sources of its class, its bases and what they import.

    The hash of a composition combines those of its parts. Files that a user's own policy imports from its folder are
    not included.
    """
    parameters = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    if isinstance(policy, Composition):
        parameters = {"parts": [(part.selector, policy_identity(part.policy)) for part in policy.parts]}
    libraries = [_releases(SOLVER_LIBRARIES), solver_results()] if policy.solver else {}
    return digest([type(policy).__qualname__, parameters, _class_source(type(policy)), libraries])


def _class_source(found: type[Policy]) -> str:
    if found in _class_sources:
        return _class_sources[found]
    modules = [sys.modules.get(kind.__module__) for kind in found.__mro__ if kind is not object]
    files = sorted({str(getattr(module, "__file__", None) or "") for module in modules} - {""})
    texts = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
    imports = sorted({name for file in files for name in _imports(Path(file))})
    _class_sources[found] = digest([texts, source_hash(tuple(imports))])
    return _class_sources[found]


@cache
def source_hash(modules: tuple[str, ...]) -> str:
    """Hash of the sources of modules of this program and of all of it that they import, directly or not."""
    return digest({name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files_of(modules).items()})


def files_of(modules: tuple[str, ...]) -> dict[str, Path]:
    """The files of modules of this program and of all of it that they import and that may count."""
    found: dict[str, Path] = {}
    queue = [name for module in modules for name in _with_parents(module)]
    while queue:
        name = queue.pop()
        path = _file_of(name)
        is_apart = any(name == each or name.startswith(f"{each}.") for each in APART)
        if name in found or path is None or (is_apart and name not in modules):
            continue
        found[name] = path
        queue += [each for imported in _imports(path) for each in _with_parents(imported)]
    return found


def sources_stamp() -> str:
    """Hash of all present sources and of the libraries that they use, for processes that must agree."""
    files = {
        f"{package}/{path.relative_to(root).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()
        for package in PACKAGES
        if (root := _root(package))
        for path in sorted(root.rglob("*.py"))
    }
    return digest([files, _versions((*LIBRARIES, *SOLVER_LIBRARIES))])


def _with_parents(module: str) -> Iterator[str]:
    words = module.split(".")
    for i in range(1, len(words) + 1):
        yield ".".join(words[:i])


@cache
def _file_of(module: str) -> Path | None:
    """The file of a module of this program, None for any other module."""
    package, *rest = module.split(".")
    root = _root(package) if package in PACKAGES else None
    if root is None:
        return None
    base = root.joinpath(*rest)
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


@cache
def _root(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Names that a file imports of this program: those inside functions included, those for types only excluded."""
    names: set[str] = set()
    for node in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return tuple(sorted(name for name in names if name.partition(".")[0] in PACKAGES))


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements, those inside others included, but for those that only type checkers read."""
    for node in body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        for inside in BODIES:
            yield from _statements(getattr(node, inside, ()))


def _releases(libraries: tuple[str, ...]) -> Mapping[str, str]:
    """Versions of libraries without their patches."""
    return {name: ".".join(version.split(".")[:2]) for name, version in _versions(libraries).items()}


@cache
def _versions(libraries: tuple[str, ...]) -> Mapping[str, str]:
    found = {}
    for name in libraries:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found
