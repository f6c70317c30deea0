"""Law 7 across processes: the same examples in a second process, where examples, sets and hashes have another order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from sim.conformance.examples import Example, examples_for, for_each
from sim.conformance.replayed import run_policy
from sim.errors import PolicyError
from sim.policies import load, parameters_of
from sim.policies.base import Policy


def fingerprints(policy: Policy, *, examples: int, seed: int, last_first: bool = False) -> list[str]:
    """The result of each example as text: the hash of the log, or the refusal.

    last_first: whether they run in reverse order; the order of the results stays the same.
    """
    drawn: list[Example] = []
    for_each(examples_for(policy), drawn.append, examples, seed)

    def look(example: Example) -> str:
        run = run_policy(policy, example.trace, example.platform, seed=seed)
        answer = run.log.content_hash if run.log is not None else ""
        return f"{answer} {type(run.error or run.crash).__name__}: {run.error or run.crash}"

    if last_first:
        return [look(example) for example in reversed(drawn)][::-1]
    return [look(example) for example in drawn]


class Ended(Exception):
    """The second process ended without an answer: it failed, or a policy ended it, as `os._exit` does."""


def differences(policies: Sequence[tuple[str, Policy]], *, examples: int, seed: int) -> list[str]:
    """The policies, given with their names, for which a second process gets different results.

    It runs the examples in reverse order, which also reveals what a policy remembers of earlier ones. A policy that
    cannot be loaded there by its name and parameters is left out. The second process runs first, so that a policy that
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
            jobs.append({"name": name, "parameters": parameters, "examples": examples, "seed": seed})
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
        here = fingerprints(load(job["name"], **job["parameters"]), examples=examples, seed=seed)  # type: ignore[arg-type]
        if here != there:
            at = next((i for i, pair in enumerate(zip(here, there)) if pair[0] != pair[1]), min(len(here), len(there)))
            found.append(f"{job['name']}: example {at} gives a different result in a second process")
    return found


def main() -> None:
    """Read jobs from standard input and print their results."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a policy prints is not part of the answer
    answers = []
    for job in json.load(sys.stdin):
        policy = load(job["name"], **job["parameters"])
        answers.append(fingerprints(policy, examples=job["examples"], seed=job["seed"], last_first=True))
    json.dump(answers, out)
    out.close()


if __name__ == "__main__":
    main()
