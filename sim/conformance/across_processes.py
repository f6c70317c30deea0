"""Law 7 across processes: the same examples in a second process, where examples, sets and hashes have another order."""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy

from sim.conformance.examples import Example, examples_for, for_each
from sim.conformance.replayed import Replayed
from sim.conformance.tried import tried
from sim.errors import PolicyError
from sim.limits import end_where_stuck, limited
from sim.policies import load, parameters_of
from sim.policies.base import Policy
from sim.rewrites.slots import owner, weights_of
from sim.trace.graph import Trace

TIME_LIMITED = "time limited"
MOST_SAID = 1 << 16
"""Bytes of what a second process says on standard error that are read, from the end."""


def fingerprints(
    policy: Policy, *, examples: int, seed: int, elsewhere: bool = False, time_limit_s: float | None = None
) -> list[str]:
    """The result of each example as text: a hash of what happened when, without names, and the kind of a refusal.

    `TIME_LIMITED` stands for whatever a solver finds that meets its limit on the clock.

    elsewhere: whether they run in reverse order, with other names of tensors, ops and the machine; the order of the
        results stays the same.
    """
    drawn: list[Example] = []
    for_each(examples_for(policy), drawn.append, examples, seed)

    def look(example: Example) -> str:
        named = replace(example, trace=renamed(example.trace), called="elsewhere") if elsewhere else example
        with limited(time_limit_s):
            *_, (_, run) = tried(policy, named, seed=seed)
        return TIME_LIMITED if run.met_time_limit else outcome_hash(run)

    if elsewhere:
        return [look(example) for example in reversed(drawn)][::-1]
    return [look(example) for example in drawn]


def outcome_hash(run: Replayed) -> str:
    """A hash of what happened when, without names, and the kind of a refusal."""
    rows = (run.log.intervals, run.log.changes) if run.log is not None else ()
    answer = hashlib.sha256(b"".join(table.tobytes() for table in rows)).hexdigest()
    return f"{answer} {type(run.error or run.crash).__name__}"


def renamed(trace: Trace) -> Trace:
    """The same trace; names of tensors and ops sort and hash otherwise.

    Their words stay, since they may say a role, and a weight's name is still the beginning of those of its gradient and
    its states (`sim.rewrites.slots`).
    """
    names, weights = trace.op_columns.name, weights_of(trace)
    modules = dict.fromkeys(name.partition(".")[0] for name in names)
    order = dict(zip(modules, _others(list(modules))))  # ops of a module stay together
    own = trace.tensor_columns.name
    other = dict(zip(own, _others(own)))
    for name in own:
        weight = owner(name, weights)
        other[name] = other[name] if weight is None else other[weight] + name.removeprefix(weight)
    tensors = replace(trace.tensor_columns, name=[other[name] for name in own])
    ops = replace(trace.op_columns, name=[order[module] + dot + rest for module, dot, rest in
                                          (name.partition(".") for name in names)])  # fmt: skip
    return Trace(tensors, ops, outputs=trace.outputs, carry=trace.carry, meta=trace.meta)


def _others(names: Sequence[str]) -> list[str]:
    return [f"r{len(names) - i:07d}.{name}" for i, name in enumerate(names)]


class Ended(Exception):
    """The second process ended without an answer: it failed, or a policy ended it, as `os._exit` does."""


@dataclass(frozen=True)
class Elsewhere:
    """What a second process got: the job of a policy, and per example the fingerprint of its result."""

    job: Mapping[str, Any]
    answers: Sequence[str]

    def difference(self) -> str:
        """The first example for which this process gets another result, in words; "" for none."""
        policy = load(self.job["name"], **self.job["parameters"])
        how = {key: self.job[key] for key in ("examples", "seed", "time_limit_s")}
        pairs = enumerate(zip_longest(fingerprints(policy, **how), self.answers))
        at = next((i for i, pair in pairs if pair[0] != pair[1] and TIME_LIMITED not in pair), None)
        return "" if at is None else f"{self.job['name']}: example {at} gives a different result in a second process"


def differences(
    policies: Sequence[tuple[str, Policy]], *, examples: int, seed: int, time_limit_s: float | None = None
) -> list[str]:
    """The policies, given with their names, for which a second process gets different results, in words."""
    there = elsewhere(policies, examples=examples, seed=seed, time_limit_s=time_limit_s)
    return [text for answer in there if (text := answer.difference())]


def elsewhere(
    policies: Sequence[tuple[str, Policy]], *, examples: int, seed: int, time_limit_s: float | None = None
) -> list[Elsewhere]:
    """What a second process gets for policies, given with their names.

    It runs the examples in reverse order, which also reveals what a policy remembers of earlier ones, at another time
    of another day, on a machine of another name with other numbers of processors and threads, for another user with
    another home and folder of temporary files, another language, terminal and time zone, in another folder, and with
    other names of tensors, ops and platform.
    A policy that cannot be loaded there by its name and parameters is left out. Ask the second process first, so that a
    policy that ends its process does not end this one. Raises Ended if that happened.
    """
    jobs = []
    for name, policy in policies:
        parameters = parameters_of(policy)
        try:
            with limited(time_limit_s):
                known = bool(load(name, **json.loads(json.dumps(parameters))) == policy)
        except (PolicyError, TypeError, ValueError):
            known = False
        if known:
            how = {"examples": examples, "seed": seed, "time_limit_s": time_limit_s}
            jobs.append({"name": name, "parameters": parameters, **how})
    if not jobs:
        return []
    hashes = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-m", "sim.conformance.across_processes", str(os.getpid())]
    with tempfile.TemporaryDirectory(prefix="another-working-directory-") as folder:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hashes,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **_another_user(Path(folder)),
        }
        code, said, complaints = _ran(command, json.dumps(jobs), environment)
    try:
        answers = json.loads(said)
    except ValueError:
        answers = None
    if code or not isinstance(answers, list):
        last = (complaints.strip().splitlines() or ["no message"])[-1]
        raise Ended(f"a process that runs it ends without an answer (exit status {code}): {last}")
    return [Elsewhere(job, there) for job, there in zip(jobs, answers, strict=True)]


def _ran(command: Sequence[str], given: str, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a command; returns its exit status, its output, and the end of what it says on standard error.

    Pipes would end only with the last process that the command has started.
    """
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as complaints:
        asked.write(given.encode())
        asked.seek(0)
        done = subprocess.run(command, stdin=asked, stdout=out, stderr=complaints, env=environment, check=False)
        out.seek(0)
        complaints.seek(max(0, complaints.seek(0, os.SEEK_END) - MOST_SAID))
        return done.returncode, out.read().decode("utf-8", "replace"), complaints.read().decode("utf-8", "replace")


def _another_user(folder: Path) -> dict[str, str]:
    """Environment variables that belong to a user: another one's, with folders below this one."""
    found = {name: f"another-{name.lower()}" for name in ("USER", "LOGNAME", "USERNAME")}
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        (folder / name.lower()).mkdir()
        found[name] = str(folder / name.lower())
    found |= {name: f"/another-{name.lower()}" for name in ("SHELL", "EDITOR", "PWD", "OLDPWD")} | {"HOSTNAME": HOST}
    for names, values in OTHERWISE.items():
        value = next(value for value in values if os.environ.get(names[0]) != value)
        found |= dict.fromkeys(names, value)
    return found


OTHERWISE = {
    ("TZ",): ("EAST-7", "WEST-5"),
    ("LC_ALL", "LANG", "LANGUAGE"): ("C", "C.UTF-8"),
    ("COLUMNS", "LINES"): ("57", "58"),
    ("TERM",): ("another-terminal", "dumb"),
}
"""Environment variables of a user's place, language and terminal, and two values, of which another user has one."""

HOST = "another-machine"
"""The name of the second process's machine."""

SHIFT_S = 400 * 86_400 + 12_345
"""Seconds by which the clocks of the second process are ahead: another year, month, day, hour and minute."""


def _shift_clocks() -> None:
    """Let every clock of Python, NumPy and pandas tell another time; what elapses stays the same."""
    import pandas  # before `datetime` changes: it is compiled against it, and would crash with a class of ours

    for name in ("time", "monotonic", "perf_counter"):
        clock, in_ns = getattr(time, name), getattr(time, f"{name}_ns")
        setattr(time, name, lambda clock=clock: clock() + SHIFT_S)
        setattr(time, f"{name}_ns", lambda clock=in_ns: clock() + SHIFT_S * 10**9)
    if hasattr(time, "clock_gettime"):
        of_clock, of_clock_in_ns = time.clock_gettime, time.clock_gettime_ns
        time.clock_gettime = lambda clk_id: of_clock(clk_id) + SHIFT_S
        time.clock_gettime_ns = lambda clk_id: of_clock_in_ns(clk_id) + SHIFT_S * 10**9
    for name in ("localtime", "gmtime"):
        of_time = getattr(time, name)
        setattr(time, name, lambda secs=None, of_time=of_time: of_time(time.time() if secs is None else secs))
    for name, place in (("ctime", 0), ("asctime", 0), ("strftime", 1)):
        as_text = getattr(time, name)
        default = time.time if name == "ctime" else time.localtime
        setattr(time, name, lambda *given, as_text=as_text, default=default, place=place:
                as_text(*given, *(() if len(given) > place else (default(),))))  # fmt: skip
    stamp: Any = pandas.Timestamp
    for name in ("now", "today"):
        setattr(stamp, name, classmethod(lambda cls, tz=None: cls.fromtimestamp(time.time(), tz)))
    stamp.utcnow = classmethod(lambda cls: cls.now("UTC"))
    numpy.datetime64 = _LaterTime  # type: ignore[misc]
    datetime.datetime = _Later  # type: ignore[misc]


class _LikePlain(type):
    """The type of a class that takes everything of its base for its own."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__bases__[0])

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.__bases__[0])


_plain_datetime = datetime.datetime
_plain_time = numpy.datetime64


class _LaterTime(_plain_time, metaclass=_LikePlain):
    """A `numpy.datetime64` of the shifted clock; what it makes is plain."""

    def __new__(cls, *given: Any) -> Any:
        if given[:1] in (("now",), ("today",)):
            plain = _plain_time(*given)
            unit = numpy.datetime_data(plain.dtype)[0]
            return (plain.astype("M8[s]") + numpy.timedelta64(SHIFT_S, "s")).astype(f"M8[{unit}]")
        return _plain_time(*given)


class _Later(_plain_datetime, metaclass=_LikePlain):
    """A `datetime` of the shifted clock; `date.today` reads `time.time` as it is."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Self:
        return cls.now(datetime.UTC).replace(tzinfo=None)


def _change_machine() -> None:
    """Let this process have another machine's name, and other numbers of processors and threads."""
    socket.gethostname = platform.node = lambda: HOST
    if hasattr(os, "uname"):
        known = os.uname()
        os.uname = lambda: type(known)((known[0], HOST, *known[2:]))
    platform._uname_cache = None  # type: ignore[attr-defined]
    address = uuid.getnode()
    uuid.getnode = lambda: address ^ 1
    os.umask(0o077 if os.umask(0o022) != 0o077 else 0o022)
    count = os.cpu_count() or 1
    for module, name in ((os, "cpu_count"), (os, "process_cpu_count"), (multiprocessing, "cpu_count")):
        if hasattr(module, name):
            setattr(module, name, lambda: count + 1)
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        os.sched_getaffinity = lambda pid: usable | {max(usable) + 1}
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def main() -> None:
    """Read jobs from standard input and print their results."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a policy prints is not part of the answer
    _shift_clocks()
    _change_machine()
    jobs = json.load(sys.stdin)
    policies = [load(job.pop("name"), **job.pop("parameters")) for job in jobs]
    os.chdir(os.environ["HOME"])
    answers = [fingerprints(policy, **job, elsewhere=True) for policy, job in zip(policies, jobs, strict=True)]
    os.chdir(os.sep)
    json.dump(answers, out)
    out.close()


def alone(job: Callable[[], None]) -> NoReturn:
    """Do all that this process is for, and end it: whatever threads a policy has left behind, or where that sticks.

    Its first argument is the number of the process that started it, with which it ends.
    """
    end_where_stuck(int(sys.argv[1]))
    try:
        job()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    alone(main)
