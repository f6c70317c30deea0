"""The platforms on which the law is checked have every key that changes a run, or it is said why not."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from sim.conformance.random_platforms import Document, random_platforms
from tests.hardware.test_keys import CHANGES

NOT_DRAWN = {
    **dict.fromkeys(
        ("engines.efficiency", "engines.bandwidth_share", "engines.bandwidth"),
        "factors of the time of an op, which the law takes from `op_times`; its closed form is in test_cost.py",
    ),
    **dict.fromkeys(
        ("engines.cores", "engines.clock", "engines.vector", "engines.units", "engines.runs"),
        "another way to write a peak and efficiencies: test_mapping.py",
    ),
    **dict.fromkeys(("engines.power", "links.energy"), "energy changes no time and no byte"),
    "engines.image_order": "bytes of convolutions, which the law takes from `op_times`: hardware/test_image_order.py",
    "tiers.pinning": "is paid before training, and changes nothing in an iteration: analysis/test_pinning.py",
    "op_time": "the law takes the time of an op from `op_times`; the bound's closed form is in hardware/test_bound.py",
    **dict.fromkeys(
        ("networks.per_node", "networks.nodes", "networks.rate", "networks.fixed"),
        "become links of a laid-out machine: their closed form is in test_layout.py",
    ),
    **dict.fromkeys(
        ("sharers", "pools.devices"),
        "become slower pools and a smaller host: hardware/test_sharers.py simulates them all",
    ),
    **dict.fromkeys(
        ("dispatch", "dispatch_scale"),
        "an example draws them, for policies whose optimum is not one of added times: sim/conformance/examples.py",
    ),
    "links.egress": "becomes a pool of its own, and pools are drawn",
}
"""Keys that change a run and are not drawn, with the reason."""


def test_every_key_that_changes_a_run_is_drawn():
    drawn = set[str]()

    @settings(max_examples=300, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(random_platforms(devices=2, cpu=True))
    def note(document: Document) -> None:
        drawn.update(document)
        for group in ("tiers", "engines", "links", "pools"):
            drawn.update(f"{group}.{key}" for part in document[group].values() for key in part)

    note()
    assert set(CHANGES) - drawn == set(NOT_DRAWN)
