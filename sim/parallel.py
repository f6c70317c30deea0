"""Rows of a comparison computed in processes: inputs and answers are pickled, one file each, and equal serial ones.

What an answer shares with its inputs (trace, platform, policy) is pickled as a reference to them, so that it refers to
the caller's own objects. A policy that cannot be pickled, or that another process cannot load, has no answer here.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sim.collecting import Seldom, uncollected
from sim.experiment import reference_for
from sim.least_time import LowerBound, lower_bound
from sim.limits import usually_limited
from sim.policies import admit_source, executed_source, is_shipped, load, policy_files
from sim.policies.base import Policy
from sim.rows import Answer, Setting, answer, failed

if TYPE_CHECKING:
    from sim.sweeps.pool import Local

BENCH = "sim.parallel:Bench"
"""What runs requests in each process, see `sim.sweeps.process.Worker`."""
BOUND = "bound"
"""The task of the least time that any plan takes."""
PROGRAMS = ("lp", "milp", "milp+dp")
"""Solvers of the library that the bound needs, too, and that takes long to import: so one process has them first."""


@dataclass(frozen=True)
class Request:
    """A policy to run.

    given: its name, or itself.
    parameters: of one given by name.
    policy: the loaded policy.
    """

    label: str
    given: str | Policy
    parameters: Mapping[str, Any]
    policy: Policy

    @property
    def may_stick(self) -> bool:
        """Whether its code is not of this program, so that it may never end, and another process can load it."""
        return isinstance(self.given, str) and not is_shipped(self.given)


def answers(
    requests: Sequence[Request], setting: Setting, workers: Local, *, bound: bool = False
) -> Iterator[tuple[int, Answer | LowerBound | None, str]]:
    """Positions of requests with their answers as they come; without an answer, why there is none.

    workers: processes that run `BENCH`.
    bound: whether the least time that any plan takes is asked for, too; it comes as if it were the answer to the
        request after the last, or not at all where a process cannot compute it.

    Closing the iterator stops all processes.
    """
    from sim.sweeps.execute import Job, stopping

    with tempfile.TemporaryDirectory(prefix="tiersim-") as name:
        folder = Path(name)
        (folder / "setting").write_bytes(_dumped(setting))
        tasks = [Job({"id": BOUND, "folder": name}, group=BOUND)] if bound else []
        for i, request in enumerate(requests):
            task = {"id": str(i), "folder": name}
            try:
                (folder / f"request-{i}").write_bytes(_dumped(_portable(request)))
            except Exception as error:  # whatever the objects of a user's policy raise
                yield i, None, _line(error)
                continue
            tasks.append(Job(task, group=BOUND if request.policy.solver in PROGRAMS else str(i)))
        with stopping(workers.run(tasks)) as outcomes:
            for id, outcome in outcomes:
                if id == BOUND:
                    if outcome.get("why") == "":
                        yield len(requests), _read((folder / "answer-bound").read_bytes(), _names(setting)), ""
                    continue
                i = int(id)
                if why := outcome.get("why"):
                    yield i, None, why
                elif "row" in outcome:  # its process died each time
                    yield i, failed(requests[i].label, requests[i].policy, outcome["row"]["error"]), ""
                else:
                    path = folder / f"answer-{i}"
                    yield i, _unpacked(path.read_bytes(), setting, requests[i].policy), ""
                    path.unlink()


class Bench(Seldom):
    """Runs requests one after another in this process; see `sim.sweeps.worker`."""

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[str, Setting] = {}

    def run(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Write the answer to a file. `why`: what keeps this process from answering, "" for nothing."""
        outcome = self._run(task)
        self.collect_if_due()
        return outcome

    def _run(self, task: Mapping[str, Any]) -> dict[str, Any]:
        folder, i = Path(task["folder"]), task["id"]
        try:
            if task["folder"] not in self._settings:
                self._settings[task["folder"]] = pickle.loads((folder / "setting").read_bytes())
            setting = self._settings[task["folder"]]
            self.count(len(setting.trace.op_columns.name))
            if i == BOUND:
                least = lower_bound(setting.trace, setting.limited)
                (folder / f"answer-{i}").write_bytes(_dumped(least, _names(setting)))
                return {"why": ""}
            label, given, parameters, sources = pickle.loads((folder / f"request-{i}").read_bytes())
            for path, source in sources.items():
                admit_source(Path(path), source)
            with usually_limited(setting.time_limit_s):
                policy = load(given, **parameters)
        except Exception as error:
            return {"why": _line(error)}
        found = answer(label, policy, setting)
        try:
            if setting.views:
                found = _with_view(found, label)
            data = _packed(found, setting, policy)
        except Exception as error:
            return {"why": _line(error)}
        (folder / f"answer-{i}").write_bytes(data)
        return {"why": ""}


def _with_view(found: Answer, label: str) -> Answer:
    """The answer with the saved view of what ran."""
    from sim.views import packed_view

    ran = found.result or found.attempt
    return found if ran is None else replace(found, view=packed_view(ran, title=label))


def _portable(request: Request) -> tuple[str, str | Policy, Mapping[str, Any], Mapping[str, bytes]]:
    """What another process needs to load the same policy: sources of files as they were executed here."""
    sources = {}
    if isinstance(request.given, str):
        for path in policy_files(request.given).values():
            source = executed_source(path)
            if source is not None:
                sources[os.path.abspath(path)] = source
    elif type(request.given).__module__ == "__main__":
        raise pickle.PicklingError(f"{type(request.given).__name__} is defined in the program itself")
    return request.label, request.given, dict(request.parameters), sources


# ---- pickles -----------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Writes shared objects by name, and read-only mappings as such."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.names = names

    def reducer_override(self, thing: Any) -> Any:  # not `persistent_id`, which is asked about every number, too
        if (name := self.names.get(id(thing))) is not None:
            return _shared, (name,)
        return (MappingProxyType, (dict(thing),)) if isinstance(thing, MappingProxyType) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Mapping[str, Any]) -> None:
        super().__init__(file)
        self.shared = shared

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_shared.__module__, _shared.__name__):
            return self.shared.__getitem__
        return super().find_class(module, name)


def _shared(name: str) -> Any:
    """Stands in a pickle for the object that goes by this name where it is read."""
    raise pickle.UnpicklingError(f"{name}: known to nobody here")


def _names(setting: Setting, policy: Policy | None = None) -> list[tuple[str, Any]]:
    shared = [("trace", setting.trace), ("platform", setting.platform)]
    return shared if policy is None else [*shared, ("policy", policy)]


def _dumped(thing: Any, shared: Iterable[tuple[str, Any]] = ()) -> bytes:
    """A pickle in which these objects stand by name."""
    out = io.BytesIO()
    _Pickler(out, {id(each): name for name, each in shared}).dump(thing)
    return out.getvalue()


def _read(data: bytes, shared: Iterable[tuple[str, Any]]) -> Any:
    with uncollected():  # all of it stays
        return _Unpickler(io.BytesIO(data), dict(shared)).load()


def _packed(found: Answer, setting: Setting, policy: Policy) -> bytes:
    result = found.result
    bare = None if result is None else result.referring(None)  # a function of this process cannot travel
    return _dumped(replace(found, result=bare), _names(setting, policy))


def _unpacked(data: bytes, setting: Setting, policy: Policy) -> Answer:
    found: Answer = _read(data, _names(setting, policy))
    if found.result is None:
        return found
    traces = [setting.trace] * (len(found.result.warm_up) + 1)
    return replace(found, result=found.result.referring(lambda: reference_for(policy, traces, setting.platform)))


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
