"""Which parts of a module are its layers: what repeats.

- As asked for: classes, or paths, by name or by pattern.
- What a model of diffusers or timm puts its checkpoints round (see `workloads.capturing.wrapped`).
- As the model says itself: Hugging Face's `_no_split_modules` and the `_repeated_blocks` of diffusers, as far as they
  stand in a list.
- Else what repeats, of the parts that have parts themselves: what stands in a list or a sequence, the outermost of it;
  in a sequence its class has to occur twice. A class of the model's own for a sequence of like blocks is one, too.
  Beside them, simple parts of lists are layers, too. A module that has three parts of one class as its attributes is a
  list (networks of inception modules; an encoder and a decoder are not one), and so is one with two where there is no
  list.
- A module of simple parts only (a sequence of convolutions) has a layer for each of its numbered parts.
- Where the tree shows nothing, the outermost parts that a step calls repeatedly are layers (a recurrent cell).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from sim.errors import WorkloadError, near

SAYS = ("_no_split_modules", "_repeated_blocks")


def layer_paths(root: Any, wanted: str | Sequence[str] | None = None, apart: Sequence[str] = ()) -> tuple[str, ...]:
    """The paths of a module's layers, in the order of the model.

    wanted: classes or paths, by name or by pattern (`*`, `?`, `[0-5]`); None to find what repeats.
    apart: parts of the root that are models of their own: two of one class (a policy and its target) are no layers.

    Raises WorkloadError where something wanted is not a part of the module, naming the nearest that is.
    """
    if wanted is not None:
        return outermost(_asked_for(root, [wanted] if isinstance(wanted, str) else list(wanted)))
    listed = {path: part for path, part, _ in _listed(root, "") if _has_parts(part)}
    names = {str(name) for part in root.modules() for key in SAYS for name in getattr(part, key, None) or ()}
    said = [path for path, part in listed.items() if type(part).__name__ in names]
    found = outermost(said or _repeated(root, bool(apart)))
    if found:
        return found
    return tuple(dict.fromkeys(prefix for path, _ in root.named_modules() if (prefix := numbered(path))))


def called_repeatedly(root: Any, calls: Mapping[str, int]) -> tuple[str, ...]:
    """The paths of the outermost modules with parameters that a step called more than once.

    calls: how often it called each module, by path.
    """
    paths = [
        path
        for path, part in root.named_modules()
        if path and calls.get(path, 0) > 1 and next(part.parameters(), None) is not None
    ]
    return outermost(paths)


def numbered(path: str) -> str:
    """The part of a module's path up to its first number, "" without one."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return ""


def _asked_for(root: Any, wanted: list[str]) -> list[str]:
    modules = [(path, type(part).__name__) for path, part in root.named_modules() if path]
    known = dict.fromkeys(name for pair in modules for name in reversed(pair))
    for name in wanted:
        if not isinstance(name, str) or not any(_fits(pair, name) for pair in modules):
            raise WorkloadError(
                f"layers: {name!r} is neither a class nor a path of a part of the module{near(str(name), known)}"
            )
    return [pair[0] for pair in modules if any(_fits(pair, name) for name in wanted)]


def _fits(module: tuple[str, str], name: str) -> bool:
    return any(fnmatchcase(each, name) for each in module)


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Those paths that are no part of another, which comes before them."""
    kept: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        if not any(".".join(parts[:i]) in kept for i in range(1, len(parts))):
            kept[path] = None
    return tuple(kept)


def _repeated(root: Any, joined: bool) -> list[str]:
    """What repeats: three twins outside lists, whatever they consist of, else what stands in lists, else two twins.

    joined: whether the root only joins models.
    """
    listed = list(_listed(root, ""))
    if triplets := _twins(root, {path for path, _, _ in listed}, 3, joined):
        return triplets
    count = Counter(type(part) for _, part, _ in listed)
    found = {path for path, part, in_list in listed if _has_parts(part) and (in_list or count[type(part)] > 1)}
    if not found:
        return _twins(root, set(), 2, joined)
    return [path for path, part, _ in listed if path in found or not _has_parts(part)]


def _twins(root: Any, listed: set[str], least: int, joined: bool) -> list[str]:
    """All parts that have parts of the first module, outside lists, that has so many of one class."""
    nn = import_module("torch.nn")
    for path, module in root.named_modules():
        steps = path.split(".")
        if (
            (joined and not path)
            or _is_container(nn, module)
            or any(".".join(steps[:i]) in listed for i in range(1, len(steps) + 1))
        ):
            continue
        children = [(name, part) for name, part in module.named_children() if not _is_container(nn, part)]
        parts = [(name, part) for name, part in children if _has_parts(part)]
        if any(n >= least for n in Counter(type(part) for _, part in parts).values()):
            return [f"{path}.{name}" if path else name for name, _ in parts]
    return []


def _is_container(nn: Any, module: Any) -> bool:
    return type(module) in (nn.ModuleList, nn.ModuleDict) or _is_sequence(nn, module)


def _listed(module: Any, path: str) -> Iterator[tuple[str, Any, bool]]:
    """Parts in lists and sequences: path, part, and whether that is a list. Simple ones count in lists alone."""
    nn = import_module("torch.nn")
    sequence = _is_sequence(nn, module)
    in_list = type(module) in (nn.ModuleList, nn.ModuleDict)
    for name, part in module.named_children():
        if name == "parametrizations":  # how a weight is computed
            continue
        inner = f"{path}.{name}" if path else name
        nested = type(part) in (nn.ModuleList, nn.ModuleDict) or (_is_sequence(nn, part) and not in_list)
        if not nested and (sequence or in_list) and (_has_parts(part) or type(module) is nn.ModuleList):
            yield inner, part, in_list
        yield from _listed(part, inner)


def _is_sequence(nn: Any, module: Any) -> bool:
    """Whether a module only runs its parts in turn: a sequence, or a class for a stage of like blocks (RegNet's)."""
    if type(module) is nn.Sequential or not isinstance(module, nn.Sequential):
        return type(module) is nn.Sequential
    parts = list(module.children())
    alike = len({type(part) for part in parts}) == 1 and _has_parts(parts[0])
    return alike and type(module).forward is nn.Sequential.forward


def _has_parts(module: Any) -> bool:
    return next(module.children(), None) is not None
