"""A check in a process of its own, so that a policy that ends its process does not end the caller's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from sim.conformance.memory import check_outcome
from sim.conformance.suite import Broken, Report, check_policy, sentence
from sim.errors import PolicyError, PolicyFailed, TiersimError
from sim.limits import SECONDS
from sim.policies import load


def checked(
    name: str, parameters: Mapping[str, Any], *, examples: int, seed: int, time_limit_s: float = SECONDS
) -> tuple[dict[str, Any], str]:
    """The report on a policy, as JSON values and as text.

    If the process ends without a report, law 6 is broken. Raises PolicyError or PolicyFailed as `load` does.
    """
    job = {"name": name, "parameters": dict(parameters), "examples": examples, "seed": seed}
    job |= {"time_limit_s": time_limit_s}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "sim.conformance.isolation"]
    done = subprocess.run(
        command, input=json.dumps(job), env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        raise {"PolicyError": PolicyError}.get(answer["error"], PolicyFailed)(answer["text"])
    if done.returncode or not isinstance(answer, dict):
        text = f"the process that checks it ends without a report (exit status {done.returncode})"
        broken = Broken("outcome", sentence(check_outcome), 1, text)
        report = Report(name, seed, examples=0, skipped=0, refused=0, broken=(broken,))
        return report.as_dict(), report.as_text()
    return answer["record"], answer["text"]


def main() -> None:
    """Read a job from standard input and print its report."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a policy prints is not part of the answer
    job = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        policy = load(job["name"], **job.pop("parameters"))
        report = check_policy(policy, **job)
        answer = {"record": report.as_dict(), "text": report.as_text()}
    except TiersimError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    json.dump(answer, out)
    out.close()


if __name__ == "__main__":
    main()
