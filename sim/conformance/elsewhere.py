"""Law 7 across processes: the same examples in another one, where they, sets and hashes come in another order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from sim.conformance.replayed import run_policy
from sim.conformance.situations import Example, for_each, situations_for
from sim.errors import PolicyError
from sim.policies import load, parameters_of
from sim.policies.base import Policy


def fingerprints(policy: Policy, *, examples: int, seed: int, last_first: bool = False) -> list[str]:
    """What came of each example, as text: the hash of the log, or the refusal.

    last_first: run them in the other order; the answers come in the same one.
    """
    drawn: list[Example] = []
    for_each(situations_for(policy), drawn.append, examples, seed)

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
    """In which of these policies, given with their names, a second process comes to something else.

    It runs the examples in the other order, so that what a policy remembers of earlier ones shows, too.
    A policy that its name and parameters cannot bring to the other process is left out. The other process is asked
    first: a policy that ends the process that it runs in does not end this one. Raises Ended where that happened.
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
    command = [sys.executable, "-m", "sim.conformance.elsewhere"]
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
            found.append(f"{job['name']}: in a second process example {at} comes out differently")
    return found


def main() -> None:
    """Read jobs from standard input and print what came of each."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a policy prints is no answer
    answers = []
    for job in json.load(sys.stdin):
        policy = load(job["name"], **job["parameters"])
        answers.append(fingerprints(policy, examples=job["examples"], seed=job["seed"], last_first=True))
    json.dump(answers, out)
    out.close()


if __name__ == "__main__":
    main()
