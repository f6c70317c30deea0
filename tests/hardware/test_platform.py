"""A platform finds its parts by name, refuses names that lead nowhere, and takes the shortest route."""

from dataclasses import replace

import pytest

from sim.errors import ProfileError
from sim.hardware import Engine, Link, Member, Platform, Pool, Tier

GB = 10**9


def tier(name, device=-1):
    return Tier(name, GB, GB, GB, device=device)


def square(*links):
    """Four tiers a, b, c, d and an engine at a."""
    return Platform(
        "square",
        (tier("a", 0), tier("b"), tier("c"), tier("d")),
        (Engine("e", 0, "a", ("a",), {"fp32": GB}),),
        tuple(Link(f"{s}{t}", s, t, rate, fixed) for s, t, rate, fixed in links),
    )


def names(platform, source, target):
    return [platform.links[i].name for i in platform.route(source, target)]


def test_a_direct_link_is_taken_even_if_it_is_slow():
    p = square(("a", "d", 1, 10**9), ("a", "b", GB, 0), ("b", "d", GB, 0))
    assert names(p, "a", "d") == ["ad"]


def test_among_routes_of_equal_length_the_least_fixed_time_wins():
    p = square(("a", "b", GB, 5), ("b", "d", GB, 5), ("a", "c", GB, 1), ("c", "d", GB, 8))
    assert names(p, "a", "d") == ["ac", "cd"]


def test_links_have_one_direction():
    p = square(("a", "b", GB, 0))
    assert names(p, "b", "a") == []
    with pytest.raises(ProfileError, match="no route from 'b' to 'a'"):
        p.move_ns(1, "b", "a")


def test_a_move_takes_the_fixed_times_and_the_slowest_link():
    p = square(("a", "b", GB, 10), ("b", "c", 2 * GB, 7))
    assert p.move_ns(1000, "a", "c") == 17 + 1000
    assert p.move_ns(1, "a", "c") == 17 + 1
    assert p.move_ns(5, "a", "a") == 0


def test_a_move_rounds_up_to_the_nanosecond():
    assert square(("a", "b", 3 * GB, 0)).move_ns(4, "a", "b") == 2


def test_a_route_has_the_fixed_times_of_its_links_and_the_rate_of_the_slowest():
    p = square(("a", "b", GB, 10), ("b", "c", 2 * GB, 7))
    assert p.pace(p.route("a", "c")) == (17, GB)
    assert p.pace(p.route("b", "c")) == (7, 2 * GB)


def test_the_host_is_the_first_shared_tier_that_can_be_reached_both_ways():
    assert square(("a", "b", GB, 0), ("a", "c", GB, 0), ("c", "a", GB, 0)).host.name == "c"
    assert square(("a", "b", GB, 0)).host is None


def test_behind_a_tier_comes_the_fastest_one_that_it_exchanges_bytes_with():
    both = [(*ends, GB, 0) for one in "cd" for ends in (("b", one), (one, "b"))]
    for fast in "cd":
        p = square(*both)
        tiers = tuple(replace(t, bandwidth=2 * GB) if t.name == fast else t for t in p.tiers)
        assert replace(p, tiers=tiers).cascade("b") == ("b", fast)
    assert square(("b", "c", GB, 0)).cascade("b") == ("b",)


def test_a_drive_of_the_device_is_one_that_it_reaches_past_the_host():
    behind = [("a", "b", GB, 0), ("b", "a", GB, 0), ("b", "d", GB, 0), ("d", "b", GB, 0)]
    for links, found in ((behind, None), ([*behind, ("a", "d", GB, 0)], None),
                         ([*behind, ("a", "d", GB, 0), ("d", "a", GB, 0)], "d")):  # fmt: skip
        p = square(*links)
        p = replace(p, tiers=tuple(replace(t, kind="nvme") if t.name == "d" else t for t in p.tiers))
        assert (p.drive and p.drive.name) == found


def test_names_that_lead_nowhere_are_all_refused_at_once():
    with pytest.raises(ProfileError) as refused:
        Platform(
            "wrong",
            (tier("hbm", 0), tier("hbm", 0)),
            (Engine("gpu", 0, "hmb", ("hbm", "host"), {"fp32": GB}, main=False),),
            (Link("d2h", "hbm", "host", GB),),
            (Pool("p", (Member("d2hh"),)),),
        )
    assert refused.value.problems == (
        "wrong: two parts are called 'hbm'",
        "wrong: engine 'gpu': no tier 'hmb' (did you mean 'hbm'?)",
        "wrong: engine 'gpu': no tier 'host' (valid: 'hbm')",
        "wrong: link 'd2h': no tier 'host' (valid: 'hbm')",
        "wrong: pool 'p': no link or engine 'd2hh' (did you mean 'd2h'?)",
        "wrong: no device has a main engine",
    )


def test_an_engine_is_found_by_its_plain_name_on_its_device():
    p = Platform(
        "two",
        (tier("hbm@0", 0), tier("hbm@1", 1), tier("host")),
        (
            Engine("gpu@0", 0, "hbm@0", ("hbm@0",), {"fp32": GB}),
            Engine("gpu@1", 1, "hbm@1", ("hbm@1",), {"fp32": GB}),
            Engine("cpu", -1, "host", ("host",), {"fp32": GB}, main=False),
        ),
    )
    assert [p.engine_for(1), p.engine_for(1, "gpu"), p.engine_for(0, "gpu"), p.engine_for(1, "cpu")] == [1, 1, 0, 2]
    assert p.devices == 2
    assert p.home(1).name == "hbm@1"
    with pytest.raises(ProfileError, match=r"device 0 has no engine 'gpuu' \(did you mean 'gpu'\?\)"):
        p.engine_for(0, "gpuu")
    with pytest.raises(ProfileError, match="no device 2; it has 2"):
        p.main_engine(2)


def test_a_budget_replaces_the_capacity_of_every_home_tier_and_no_other():
    p = square(("a", "b", GB, 0)).with_budget(123)
    assert [t.capacity for t in p.tiers] == [123, GB, GB, GB]
    assert (p.tier("a").nominal, p.budget) == (GB, 123)
