"""A training step by whatever names its model: a shipped name, any `config.json`, or a function that describes one.

Captures take seconds. So they are kept, by the content of all that they depend on, in `captures` under
`$TIERSIM_CACHE`, by default in the user's folder of caches; the folder can be deleted at any time. Those that were not
used for longest are deleted where all take more than `LARGEST_FOLDER`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sim.arguments import explained
from sim.cache import cache_folder
from sim.errors import TiersimError, WorkloadError, closest_divisor
from sim.trace.graph import Trace
from sim.trace.io import load, save
from workloads.capturing.selections import Selected, Selections
from workloads.models import read_config, read_values
from workloads.other_models import NotBuiltIn
from workloads.stacks import as_workload
from workloads.transformer import transformer

TAKEN = ("batch", "sequence", "precision", "attention", "optimizer", "dropout", "micro_batches", "frozen", "selected")
"""The axes of a model that the library builds; with others the model has to be one of the families."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "loss": ("torch",),
    "routing_skew": (0,),
    "routing_seed": (0,),
    "lora_dropout": (0,),
}
"""Values of the other axes that leave a step as it is, beside None."""

LARGEST_FOLDER = 1 << 30
"""Bytes of all kept captures together."""

FORMAT = 1
"""Of the kept files; raised when a capture changes what it records."""


@explained
def training_step(model: Any, *, selected: Selected = None, **axes: Any) -> Trace:
    """One training iteration of a model.

    model: what `workloads.transformer` takes, or any `config.json` where `transformers` is installed, or a function
        that describes a step (`FILE.py:FUNCTION`, see `workloads.capture_from_reference`), which is captured each time.
    selected: what conditions on values keep, of a model that is captured, as for `workloads.capture`.
    axes: arguments of `workloads.transformer`. A function gets those that are given, by name, except `stack`, which is
        applied to its trace.

    Raises WorkloadError where neither the families nor the library have the model, naming what is missing.
    """
    Selections(selected)
    changes = {} if selected is None else {"selected": selected}
    if is_reference(model):
        from workloads.capture import capture_from_reference

        sizes = {axis: value for axis, value in axes.items() if axis != "stack" and value is not None}
        stack = axes.get("stack")
        return as_workload(capture_from_reference(model, sizes, **changes), "eager" if stack is None else stack)
    try:
        trace = transformer(model, **axes)
    except NotBuiltIn as error:
        return _of_library(model, {**axes, **changes}, error)
    if selected is not None:
        raise WorkloadError(f"selected: {trace.meta['model']} is built in and selects nothing by values; leave it out")
    return trace


def is_reference(model: Any) -> bool:
    """Whether a model is named by a function that describes its step: `FILE.py:FUNCTION` or `MODULE:FUNCTION`."""
    where, colon, function = model.rpartition(":") if isinstance(model, str) else ("", "", "")
    parts = where.split(".") if not where.endswith(".py") else ["file"]
    return bool(colon) and all(part.isidentifier() for part in (*parts, function))


def reference_file(model: str) -> Path:
    """The file of a model that a function describes, found without importing anything; the name where there is none."""
    where = model.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    *packages, last = where.split(".")
    places: list[str] | None = [os.getcwd(), *sys.path]
    for package in packages:
        spec = PathFinder.find_spec(package, places)
        places = list(spec.submodule_search_locations or ()) if spec else []
    spec = PathFinder.find_spec(last, places)
    return Path(spec.origin if spec and spec.origin else where)


def config_identity(model: Any) -> Any:
    """What identifies a model's content, as attributes.

    Raises WorkloadError where it can't be read, or the library that has to build it is missing, or it is a function:
    what that reads is not known.
    """
    if is_reference(model):
        raise WorkloadError(
            f"{model!r} is a function, and what it reads is not known; capture its trace: "
            f"tiersim trace capture {model} -o FILE.jsonl.gz"
        )
    try:
        return read_config(model)
    except NotBuiltIn as error:
        values = json.dumps(dict(read_values(model)[0]), sort_keys=True, default=str)
        return SimpleNamespace(values=values, libraries=_libraries(error))


def _libraries(refused: NotBuiltIn) -> tuple[str, str]:
    from workloads.hugging_face import library_versions

    found = library_versions()
    if not all(found):
        raise WorkloadError(f"{refused}; where transformers is installed it is: pip install 'tiersim[huggingface]'")
    return found


def _of_library(model: Any, axes: Mapping[str, Any], refused: NotBuiltIn) -> Trace:
    from workloads.hugging_face import hugging_face

    values, name, where = read_values(model)
    for axis, value in axes.items():
        if axis not in (*TAKEN, "stack") and value is not None and value not in NEUTRAL.get(axis, ()):
            raise WorkloadError(f"{axis}: only models that are built in have it; {refused}")
    libraries = _libraries(refused)
    taken = {axis: axes[axis] for axis in TAKEN if axes.get(axis) is not None}
    frozen = taken.get("frozen") or ()
    taken["frozen"] = tuple(frozen.split(",")) if isinstance(frozen, str) else tuple(frozen)
    batch, parts = taken.get("batch", 1), taken.get("micro_batches", 1)
    if batch % parts:
        raise WorkloadError(f"micro_batches: {parts} does not divide batch {batch}{closest_divisor(parts, batch)}")
    facts = [FORMAT, dict(values), name, taken, libraries]
    try:
        trace = kept(facts, lambda: hugging_face(values, name, where, **taken))
    except WorkloadError as error:
        raise WorkloadError(f"{refused}; and by transformers: {error}") from error
    return as_workload(trace, axes.get("stack") or "eager")


def kept(facts: Any, make: Callable[[], Trace]) -> Trace:
    """The trace that `make` captures, read from the folder of captures if these facts have been captured before."""
    path = captures() / f"{_hash(facts)}.jsonl.gz"
    if path.exists():
        with suppress(TiersimError, OSError):  # damaged: captured again
            trace = load(path)
            with suppress(OSError):
                os.utime(path)
            return trace
    trace = make()
    with suppress(OSError):  # a folder that can't be written costs time alone
        save(trace, path)
        _clean(path)
    return trace


def _clean(newest: Path) -> None:
    """Delete the captures that were not used for longest, as far as there are too many; never the newest."""
    files = [(path.stat(), path) for path in newest.parent.glob("*.jsonl.gz")]
    size = sum(found.st_size for found, _ in files)
    for found, path in sorted(files, key=lambda each: each[0].st_mtime_ns):
        if size <= LARGEST_FOLDER:
            return
        if path != newest:
            path.unlink(missing_ok=True)
            size -= found.st_size


def captures() -> Path:
    """The folder of captures."""
    return cache_folder("captures")


def _hash(facts: Any) -> str:
    """Of the facts, and of the sources that capture."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    here = Path(__file__).parent
    for file in sorted([here / "capture.py", here / "hugging_face.py", *(here / "capturing").glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
