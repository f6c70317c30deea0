"""The laws for every policy, as a suite that checks any policy.

    from sim.conformance import check_policy

    report = check_policy(MyPolicy(), examples=100)
    print(report.as_text())

An example is one trace, one platform and one budget, drawn at random so that they meet the policy's declared
needs; the policy plans once and the plan is replayed once. Each law is a function `check_*(run)` that reads
that log with code of its own and raises `LawBroken`. Only laws 7, 8 and 10 need further runs.
"""

from sim.conformance.causality import check_online
from sim.conformance.costs import check_costs
from sim.conformance.examples import Example, random_examples
from sim.conformance.memory import check_capacity, check_carried, check_outcome
from sim.conformance.optimality import check_optimal
from sim.conformance.order import check_ops, check_order, check_tiling
from sim.conformance.repeatability import check_repeats
from sim.conformance.replayed import LawBroken, Replayed, replayed, run_policy
from sim.conformance.suite import CHECKS, Report, check_policy
from sim.conformance.values import check_values

__all__ = [
    "CHECKS",
    "Example",
    "LawBroken",
    "Replayed",
    "Report",
    "check_capacity",
    "check_carried",
    "check_costs",
    "check_online",
    "check_ops",
    "check_optimal",
    "check_order",
    "check_outcome",
    "check_policy",
    "check_repeats",
    "check_tiling",
    "check_values",
    "random_examples",
    "replayed",
    "run_policy",
]
