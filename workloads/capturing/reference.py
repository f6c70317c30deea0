"""A function of a Python file or module that describes a training step, or holds one: found, and called."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from sim.errors import TiersimError, WorkloadError, near
from sim.regular_files import MOST_SOURCE, read_file
from workloads.capturing.held import DESCRIBED
from workloads.capturing.places import line_of, way_out

NAME = "captured_reference"
ALSO = {
    "batch": ("batch_size", "bs"),
    "sequence": ("seq", "seq_len", "seq_length", "sequence_length", "max_length", "block_size", "context_length"),
}
"""Other names that scripts give to a size."""


class Unsized(WorkloadError):
    """A function has no parameter for a size."""


@contextmanager
def opened(reference: str) -> Iterator[Callable[[], Callable[..., Any]]]:
    """A function that loads the reference's file and returns the function that it names; each call loads it.

    While the context lasts it is as in `python file.py`: the file's folder is searched for modules, and there are no
    arguments. What it prints goes to standard error. What it imports is imported at once, before it is loaded, so that
    it stays as it is whatever the file is loaded under.

    reference: "file.py:function" or "module:function"; the current folder is searched for modules, too.

    Raises WorkloadError naming what is missing.
    """
    where, _, function = reference.partition(":")
    if not where or not function:
        raise WorkloadError(f"{reference!r}: expected 'module:function'")
    before = list(sys.path), list(sys.argv), sys.modules.get(NAME)
    is_file = where.endswith(".py") and os.path.isfile(where)  # what is none is refused below
    sys.path[:0] = [os.path.dirname(os.path.realpath(where)) if is_file else os.getcwd()]
    sys.argv[:] = [where]
    try:
        with redirect_stdout(sys.stderr):
            with _refused(reference, where):
                spec = _found(where)
                _import_ahead(spec.origin)
            yield lambda: _load(spec, reference, function)
    finally:
        sys.path[:], sys.argv[:] = before[:2]
        sys.modules.pop(NAME, None)
        if before[2] is not None:
            sys.modules[NAME] = before[2]


def called(function: Callable[..., Any], reference: str, sizes: Mapping[str, Any]) -> Any:
    """What a reference's function returns at these sizes.

    Raises Unsized for a size that it does not take, and WorkloadError for a parameter that nobody gives it.
    """
    parameters = signature(function).parameters
    sizes = sized(function, reference, sizes)
    missing = [
        name
        for name, each in parameters.items()
        if each.default is Parameter.empty
        and each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        and name not in sizes
    ]
    if missing:
        raise WorkloadError(
            f"{reference!r}: nobody gives the function its {', '.join(missing)}: let it make its batch itself, under a "
            f"size with a default, as in def {getattr(function, '__name__', 'step')}(batch=8)"
        )
    return function(**sizes)


def sized(function: Callable[..., Any], reference: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes as the function's keyword arguments, by their own names or by one of `ALSO`.

    Raises Unsized for a size that it does not take.
    """
    parameters = signature(function).parameters
    given = {}
    for size, value in sizes.items():
        name = next((each for each in (size, *ALSO.get(size, ())) if each in parameters), None)
        if name is None and not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
            takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
            also = f" (or {', '.join(ALSO[size])})" if size in ALSO else ""
            raise Unsized(f"{reference!r}: {size}: the function needs a parameter of this name{also}, and {takes}")
        given[name or size] = value
    return given


def defaults(function: Callable[..., Any]) -> dict[str, int]:
    """The sizes that a function has where nobody gives it others: whole numbers, by the names of `ALSO`."""
    parameters = signature(function).parameters
    size_of = {name: size for size, others in ALSO.items() for name in (size, *others)}
    own = {size_of[name]: each.default for name, each in parameters.items() if name in size_of}
    return {size: value for size, value in own.items() if type(value) is int and value > 0}


@contextmanager
def _refused(reference: str, where: str) -> Iterator[None]:
    try:
        yield
    except TiersimError:
        raise
    except (Exception, SystemExit) as error:
        is_unread = isinstance(error, OSError) and os.path.basename(str(error.filename)) == os.path.basename(where)
        line = f" at {place}" if not is_unread and (place := line_of(error.__traceback__)) else ""
        raise WorkloadError(
            f"{reference!r}: {where} cannot be imported{line}: {type(error).__name__}: {error}{way_out(error)}"
        ) from error


def _found(where: str) -> Any:
    util = import_module("importlib.util")
    if where.endswith(".py"):
        if os.path.exists(where) and not os.path.isfile(where):
            raise OSError("it is not a regular file")
        return util.spec_from_file_location(NAME, where)
    spec = util.find_spec(where)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {where!r}")
    return spec if spec.origin is None else util.spec_from_file_location(NAME, spec.origin)


def _import_ahead(file: str | None) -> None:
    """Import what a file imports, anywhere in it. What fails, fails when the file is run."""
    if file is None or not file.endswith(".py") or not os.path.isfile(file):
        return
    for node in ast.walk(ast.parse(read_file(Path(file), MOST_SOURCE))):
        if isinstance(node, ast.Import):
            for name in node.names:
                with suppress(Exception):
                    import_module(name.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            with suppress(Exception):
                module = import_module(node.module)
                for name in node.names:
                    getattr(module, name.name, None)  # of a package that imports its parts when they are asked for


def _load(spec: Any, reference: str, name: str) -> Callable[..., Any]:
    where = reference.partition(":")[0]
    with _refused(reference, where):
        source = import_module("importlib.util").module_from_spec(spec)
        sys.modules[spec.name] = source  # dataclasses look for their module there
        _execute(spec, source)
    function: Callable[..., Any] | None = getattr(source, name, None)
    if function is None or not callable(function):
        own = [key for key, each in vars(source).items() if key[0] != "_" and _is_own(each, spec.name)]
        hint = near(name, own) if own else f"; there is none in {where}"
        raise WorkloadError(f"{reference!r}: no function {name!r}{hint}")
    if hasattr(function, "named_parameters") and not isinstance(function, type):
        raise WorkloadError(
            f"{reference!r}: this is the module {type(function).__name__} and no training step: {DESCRIBED}"
        )
    return function


def _execute(spec: Any, module: Any) -> None:
    """Execute a module: of a source its text, not the compiled file beside it that its loader would take instead."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        spec.loader.exec_module(module)
        return
    text = read_file(Path(spec.origin), MOST_SOURCE)
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)


def _is_own(value: Any, module: str) -> bool:
    """Whether a file defines this function or class itself."""
    return callable(value) and getattr(value, "__module__", None) == module and hasattr(value, "__qualname__")
