"""Law 7 across processes: the same examples in a second process, where examples, sets and hashes have another order."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NoReturn

from sim.conformance.examples import Example, examples_for, for_each
from sim.conformance.tried import tried
from sim.errors import PolicyError
from sim.limits import limited
from sim.policies import load, parameters_of
from sim.policies.base import Policy
from sim.trace.graph import Trace

TIME_LIMITED = "time limited"


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
        if run.met_time_limit:
            return TIME_LIMITED
        rows = (run.log.intervals, run.log.changes) if run.log is not None else ()
        answer = hashlib.sha256(b"".join(table.tobytes() for table in rows)).hexdigest()
        return f"{answer} {type(run.error or run.crash).__name__}"

    if elsewhere:
        return [look(example) for example in reversed(drawn)][::-1]
    return [look(example) for example in drawn]


def renamed(trace: Trace) -> Trace:
    """The same trace; names of tensors and ops sort and hash otherwise; their words stay, since they may say a role."""
    names = trace.op_columns.name
    modules = dict.fromkeys(name.partition(".")[0] for name in names)
    order = dict(zip(modules, _others(list(modules))))  # ops of a module stay together
    tensors = replace(trace.tensor_columns, name=_others(trace.tensor_columns.name))
    ops = replace(trace.op_columns, name=[order[module] + dot + rest for module, dot, rest in
                                          (name.partition(".") for name in names)])  # fmt: skip
    return Trace(tensors, ops, outputs=trace.outputs, carry=trace.carry, meta=trace.meta)


def _others(names: Sequence[str]) -> list[str]:
    return [f"r{len(names) - i:07d}.{name}" for i, name in enumerate(names)]


class Ended(Exception):
    """The second process ended without an answer: it failed, or a policy ended it, as `os._exit` does."""


def differences(
    policies: Sequence[tuple[str, Policy]], *, examples: int, seed: int, time_limit_s: float | None = None
) -> list[str]:
    """The policies, given with their names, for which a second process gets different results.

    It runs the examples in reverse order, which also reveals what a policy remembers of earlier ones, at another time
    of another day, in another folder, and with other names of tensors, ops and the machine. A policy that cannot be
    loaded there by its name and parameters is left out. The second process runs first, so that a policy that
    ends its process does not end this one. Raises Ended if that happened.
    """
    jobs = []
    for name, policy in policies:
        parameters = parameters_of(policy)
        try:
            known = load(name, **json.loads(json.dumps(parameters))) == policy
        except (PolicyError, TypeError, ValueError):
            known = False
        if known:
            how = {"examples": examples, "seed": seed, "time_limit_s": time_limit_s}
            jobs.append({"name": name, "parameters": parameters, **how})
    if not jobs:
        return []
    hashes = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "sim.conformance.across_processes"]
    done = subprocess.run(command, input=json.dumps(jobs), env=environment, capture_output=True, text=True, check=False)
    try:
        answers = json.loads(done.stdout)
    except ValueError:
        answers = None
    if done.returncode or not isinstance(answers, list):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Ended(f"a process that runs it ends without an answer (exit status {done.returncode}): {last}")
    found = []
    for job, there in zip(jobs, answers, strict=True):
        policy = load(job["name"], **job["parameters"])  # type: ignore[arg-type]
        here = fingerprints(policy, examples=examples, seed=seed, time_limit_s=time_limit_s)
        pairs = enumerate(zip_longest(here, there))
        at = next((i for i, pair in pairs if pair[0] != pair[1] and TIME_LIMITED not in pair), None)
        if at is not None:
            found.append(f"{job['name']}: example {at} gives a different result in a second process")
    return found


SHIFT_S = 400 * 86_400 + 12_345
"""Seconds by which the clocks of the second process are ahead: another year, month, day, hour and minute."""


def _shift_clocks() -> None:
    """Let every clock of `time` tell another time; what elapses stays the same."""
    for name in ("time", "monotonic", "perf_counter"):
        clock, in_ns = getattr(time, name), getattr(time, f"{name}_ns")
        setattr(time, name, lambda clock=clock: clock() + SHIFT_S)
        setattr(time, f"{name}_ns", lambda clock=in_ns: clock() + SHIFT_S * 10**9)


def main() -> None:
    """Read jobs from standard input and print their results."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a policy prints is not part of the answer
    _shift_clocks()
    jobs = json.load(sys.stdin)
    policies = [load(job.pop("name"), **job.pop("parameters")) for job in jobs]
    with tempfile.TemporaryDirectory(prefix="another-working-directory-") as folder:  # of another length, too
        os.chdir(folder)
        answers = [fingerprints(policy, **job, elsewhere=True) for policy, job in zip(policies, jobs, strict=True)]
        os.chdir(os.sep)
    json.dump(answers, out)
    out.close()


def alone(job: Callable[[], None]) -> NoReturn:
    """Do all that this process is for, and end it whatever threads a policy has left behind."""
    try:
        job()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    alone(main)
