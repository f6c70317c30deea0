"""What tests of speed and of work measure with; a test that reads a clock is marked `alone`."""

import time
from dataclasses import replace


def least(limit, figure, tries=7):
    """The least of some measurements, for other work on the machine only adds to one; no more than it takes."""
    found = []
    while len(found) < tries and min(found, default=limit) >= limit:
        found.append(figure())
    return min(found)


def cpu_s(call, *arguments):
    """Seconds of this process's CPU that a call takes."""
    began = time.process_time()
    call(*arguments)
    return time.process_time() - began


def count_replays(monkeypatch, policy_class):
    """A list that grows by one with each replay of its planner: work that is the same on every machine."""
    made, plan = [], policy_class.plan

    def counted(policy, problem):
        def evaluate(draft, budget=None):
            made.append(draft)
            return problem.evaluate(draft, budget)

        return plan(policy, replace(problem, evaluate=evaluate))

    monkeypatch.setattr(policy_class, "plan", counted)
    return made
