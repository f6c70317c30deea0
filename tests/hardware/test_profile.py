"""Profiles: what a file says becomes a platform, and what is wrong with it is said, all of it, in one line each."""

import shutil
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import ProfileError
from sim.hardware import Allocator, fit_error, load_profile, profile_names, profile_table, profile_text
from tests.clocks import cpu_s, least
from tests.hardware.machine import MACHINE

BAD = Path(__file__).parents[1] / "bad_profiles"

ONE = MACHINE.replace("devices = 2\n", "")


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(ONE, encoding="utf-8")
    return path


# ---- what a file becomes -------------------------------------------------------------------------


def test_a_file_is_read_again_only_when_its_text_or_what_is_changed_in_it_is_another(small):
    first = load_profile(small)
    assert load_profile(small) is first
    halved = load_profile(small, overrides={"tiers.hbm.capacity": "1 GB"})
    assert halved.home(0).capacity == 10**9 != first.home(0).capacity
    assert load_profile(small) is first
    small.write_text(ONE + "\n# edited\n", encoding="utf-8")
    assert load_profile(small) is not first


def test_a_file_becomes_the_platform_that_it_describes(small):
    p = load_profile(small)
    assert (p.name, p.description, p.notes, p.devices) == ("small", "made up", ("none",), 1)
    hbm, near, host, drive = p.tiers
    assert (hbm.name, hbm.capacity, hbm.nominal, hbm.bandwidth, hbm.device) == ("hbm", 15 * 10**6, 16 * 10**6, 10**9, 0)
    assert (host.name, host.capacity, host.latency, host.device) == ("host", 60 * 10**6, 0, -1)
    assert (drive.name, drive.bandwidth, drive.device) == ("drive", 5 * 10**8, -1)
    assert near.allocator == Allocator("caching", (("expandable_segments", False), ("max_split_size", 2**27)))
    assert host.allocator == Allocator()
    gpu, vector, cpu = p.engines
    assert (gpu.device, gpu.home, gpu.reaches, gpu.launch, gpu.main) == (0, "hbm", ("hbm",), 5000, True)
    assert gpu.peak == {"fp16": 10**11, "fp32": 10**10}
    assert gpu.efficiency == {"matmul": 0.8, "": 0.5}
    assert gpu.bandwidth_share == {"norm": 0.5}
    assert (vector.device, vector.home, vector.peak) == (0, "hbm", {"fp32": 5 * 125 * 10**6 * 4 * 2})
    assert (cpu.device, cpu.home, cpu.reaches, cpu.main) == (-1, "host", ("host", "hbm"), False)
    assert cpu.bandwidth_share == {"": 0.25, "optimizer": 0.125}  # of 1 GB/s: it draws a quarter alone
    assert [(x.name, x.source, x.target, x.rate, x.fixed, x.copy_engines) for x in p.links] == [
        ("d2h", "hbm", "host", 10**9, 10_000, 1),
        ("h2d", "host", "hbm", 2 * 10**9, 8000, 1),
        ("side", "hbm", "near", 4 * 10**9, 2000, 1),
        ("back", "near", "hbm", 4 * 10**9, 2000, 1),
        ("fetch", "drive", "host", 10**9, 2000, 1),
        ("store", "host", "drive", 10**9, 2000, 1),
    ]
    dram, pcie = p.pools
    assert dram.rate == 3 * 10**9
    assert [(m.name, m.charge, m.factor) for m in dram.members] == [
        ("d2h", 1, 1), ("h2d", Fraction(3, 2), 1), ("cpu", 1, 1),
    ]  # fmt: skip
    assert pcie.rate is None
    assert [(m.name, m.factor) for m in pcie.members] == [("d2h", Fraction(95, 100)), ("h2d", Fraction(47, 100))]
    assert p.energy.items() >= {"gpu": 300.0, "vector": 100.0, "cpu": 50.0, "d2h": 60e-12}.items()
    assert p.host == host


def test_a_figure_takes_source_and_standing_from_itself_then_its_table_then_its_part(small):
    facts = {path: (text, source, standing) for path, text, source, standing in profile_table(load_profile(small))}
    assert facts["tiers.hbm.bandwidth"] == ("1 GB/s", "sheet", "vendor")
    assert facts["tiers.hbm.capacity"] == ("15 MB", "a run", "measured")
    assert facts["engines.gpu.peak.fp16"] == ("100 GFLOP/s", "sheet", "vendor")
    assert facts["engines.gpu.efficiency.matmul"] == ("0.8", "a fit", "estimate")
    assert facts["engines.gpu.bandwidth_share.norm"] == ("0.5", "a run", "measured")
    assert facts["pools.dram.charges.h2d"] == ("1.5", "a run", "measured")
    assert facts["fit.transfer_time"] == ("no measurement", "a run", "measured")


def test_every_number_of_the_file_is_a_fact(small):
    """Counted apart from the schema: all leaves of the TOML but names, flags and lists, and but the peer link's."""
    plain = {"kind", "per_device", "main", "home", "from", "to", "peer", "source", "standing", "name", "duplex",
             "allocator", "expandable_segments", "max_split_size", "description", "per_node"}  # fmt: skip

    def leaves(table, path=()):
        for key, value in table.items():
            if isinstance(value, dict) and "value" not in value:
                yield from leaves(value, (*path, key))
            elif key not in plain and not isinstance(value, list):
                yield ".".join((*path, key))

    expected = {path for path in leaves(tomllib.loads(ONE)) if ".peer." not in path}
    assert {fact.path for fact in load_profile(small).facts} == expected


def test_assumed_figures_are_listed(small):
    assert {fact.path for fact in load_profile(small).assumed} == {
        "engines.cpu.launch", "engines.cpu.bandwidth", "engines.cpu.power", "engines.cpu.peak.fp32",
        "engines.cpu.bandwidth_share.optimizer",
    }  # fmt: skip


def test_the_error_of_the_time_model_is_a_number_or_none(small):
    assert fit_error(load_profile(small)) == 0.07
    assert fit_error(load_profile(small), "transfer_time") is None


# ---- several devices -----------------------------------------------------------------------------


def test_parts_of_a_device_are_repeated_and_shared_ones_are_not(small):
    p = load_profile(small, overrides={"devices": "3"})
    assert p.devices == 3
    own = [(f"{tier}@{i}", i) for tier in ("hbm", "near") for i in range(3)]
    assert [(t.name, t.device) for t in p.tiers] == [*own, ("host", -1), ("drive", -1)]
    engines = [(f"{engine}@{i}", i, f"hbm@{i}") for engine in ("gpu", "vector") for i in range(3)]
    assert [(e.name, e.device, e.home) for e in p.engines] == [*engines, ("cpu", -1, "host")]
    assert p.engines[6].reaches == ("host", "hbm@0", "hbm@1", "hbm@2")
    assert p.engines[1].reaches == ("hbm@1",)
    copies = [(x.name, x.source, x.target) for x in p.links[:6]]
    assert copies == [(f"d2h@{i}", f"hbm@{i}", "host") for i in range(3)] + [
        (f"h2d@{i}", "host", f"hbm@{i}") for i in range(3)
    ]
    assert [x.name for x in p.links if "-" in x.name] == [f"peer@{i}-{j}" for i in range(3) for j in range(3) if i != j]
    assert [p.energy[f"gpu@{i}"] for i in range(3)] == [300.0] * 3
    assert [p.energy[f"d2h@{i}"] for i in range(3)] == [60e-12] * 3


def test_devices_share_the_host_pool_and_each_has_its_own_pcie(small):
    pools = {
        pool.name: [m.name for m in pool.members] for pool in load_profile(small, overrides={"devices": "2"}).pools
    }
    assert pools == {
        "dram": ["d2h@0", "d2h@1", "h2d@0", "h2d@1", "cpu"],
        "pcie@0": ["d2h@0", "h2d@0"],
        "pcie@1": ["d2h@1", "h2d@1"],
        "peer_out@0": ["peer@0-1"],
        "peer_in@0": ["peer@1-0"],
        "peer_out@1": ["peer@1-0"],
        "peer_in@1": ["peer@0-1"],
    }


def test_peer_links_are_the_shortest_route_between_devices(small):
    p = load_profile(small, overrides={"devices": "4"})
    (direct,) = p.route("hbm@0", "hbm@3")
    assert p.links[direct].name == "peer@0-3"
    assert [p.links[i].name for i in p.route("hbm@2", "host")] == ["d2h@2"]
    assert p.move_ns(10**9, "hbm@0", "hbm@3") == 2000 + 5 * 10**8


def test_figures_of_peer_links_count_only_where_there_are_peers(small):
    def peers(devices):
        facts = load_profile(small, overrides={"devices": devices}).facts
        return [fact.path for fact in facts if fact.path.startswith("links.peer.")]

    assert peers("1") == []
    assert peers("2") == [f"links.peer.{key}" for key in ("rate", "fixed", "egress", "energy")]


# ---- duplex --------------------------------------------------------------------------------------


def test_half_duplex_lets_one_direction_run_at_a_time(small):
    p = load_profile(small, overrides={"pools.pcie.duplex": "half"})
    pcie = p.pools[1]
    assert pcie.rate == 2 * 10**9
    # either alone reaches its own rate; both together share the time of one
    assert {m.name: pcie.rate / m.charge for m in pcie.members} == {"d2h": 10**9, "h2d": 2 * 10**9}
    assert all(m.factor == 1 for m in pcie.members)


def test_half_duplex_follows_an_overridden_rate(small):
    p = load_profile(small, overrides={"pools.pcie.duplex": "half", "links.d2h.rate": "4 GB/s"})
    assert p.pools[1].rate == 4 * 10**9
    assert {m.name: m.charge for m in p.pools[1].members} == {"d2h": 1, "h2d": 2}


def test_full_duplex_needs_no_pool(small):
    p = load_profile(small, overrides={"pools.pcie.duplex": "full"})
    assert [pool.name for pool in p.pools] == ["dram"]
    assert not [fact for fact in p.facts if fact.path.startswith("pools.pcie")]


# ---- overrides -----------------------------------------------------------------------------------


def test_an_override_changes_one_figure_and_says_who_set_it(small):
    before, after = load_profile(small), load_profile(small, overrides={"tiers.hbm.bandwidth": "300 GB/s"})
    assert after.tier("hbm").bandwidth == 300 * 10**9
    changed = set(after.facts) - set(before.facts)
    assert [(f.path, f.text, f.source, f.standing) for f in changed] == [
        ("tiers.hbm.bandwidth", "300 GB/s", "set by the user", "assumed")
    ]
    assert after.content_hash != before.content_hash
    assert (after.links, after.engines, after.pools) == (before.links, before.engines, before.pools)


@pytest.mark.parametrize(
    ("path", "text", "read", "value"),
    [
        ("engines.gpu.efficiency.matmul", "0.6", lambda p: p.engines[0].efficiency["matmul"], 0.6),
        ("engines.gpu.efficiency.conv", "0.25", lambda p: p.engines[0].efficiency["conv"], 0.25),
        ("engines.gpu.launch", "20 us", lambda p: p.engines[0].launch, 20_000),
        ("links.h2d.copy_engines", "4", lambda p: p.links[1].copy_engines, 4),
        ("pools.dram.charges.d2h", "3", lambda p: p.pools[0].members[0].charge, 3),
        ("pools.pcie.factors.h2d", "1.0", lambda p: p.pools[1].members[1].factor, 1),
        ("tiers.hbm.allocator", "planned", lambda p: p.tiers[0].allocator, Allocator("planned")),
        ("tiers.near.allocator.max_split_size", "2 MiB", lambda p: p.tiers[1].allocator.options[1][1], 2**21),
        ("tiers.near.allocator.expandable_segments", "true", lambda p: p.tiers[1].allocator.options[0][1], True),
        ("tiers.host.allocator", "pool", lambda p: p.tiers[2].allocator, Allocator("pool")),
        ("tiers.hbm.latency", "1 us", lambda p: p.tiers[0].latency, 1000),
        ("fit.op_time", "0.2", fit_error, 0.2),
        ("description", "another", lambda p: p.description, "another"),
    ],
)  # fmt: skip
def test_every_kind_of_key_can_be_set(small, path, text, read, value):
    assert read(load_profile(small, overrides={path: text})) == value


def test_an_allocator_given_by_name_takes_options_by_path(small):
    two = {"tiers.host.allocator": "pool", "tiers.host.allocator.fit": "best"}
    assert load_profile(small, overrides=two).tiers[2].allocator == Allocator("pool", (("fit", "best"),))


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("tiers.hmb.bandwidth", "1 GB/s", "there is no tier 'hmb' (did you mean 'hbm'?)"),
        ("tiers.hbm.bandwith", "1 GB/s", "there is no key 'bandwith' (did you mean 'bandwidth'?)"),
        ("teirs.hbm.bandwidth", "1 GB/s", "there is no key 'teirs' (did you mean 'tiers'?)"),
        ("tiers", "1 GB/s", "names a whole table; name a figure, such as 'tiers.hbm.nominal'"),
        ("links.h2d", "1", "names a whole part; name one of its figures: rate, fixed, copy_engines, egress, energy"),
        ("links.h2d.rate.value", "1", "'rate' has no keys of its own"),
        ("engines.gpu.peak", "1", "'peak' is a table: name one entry (valid: 'fp16', 'fp32')"),
        ("engines.gpu.efficiency.matmull", "0.5", "key 'matmull': expected one of "),
        ("devices.x", "4", "'devices' has no keys of its own"),
        ("", "4", "there is no key ''"),
        ("tiers.hbm.bandwidth", "300", "value 300: expected a rate such as '25 GB/s', a string with a unit: "),
        ("tiers.hbm.bandwidth", "300 GB", "value '300 GB': expected a rate such as '25 GB/s' (did you mean 'GB/s'?)"),
        ("devices", "0", "value 0: expected at least 1"),
        ("devices", "2.5", "value 2.5: expected a whole number"),
        ("devices", "4\nnotes = []", "value '4\\nnotes = []': expected a whole number"),
        ("links.h2d.from", "hots", "value 'hots': there is no tier of that name (did you mean 'host'?)"),
    ],
)
def test_a_wrong_override_is_refused_with_its_path_and_the_nearest(small, path, text, problem):
    with pytest.raises(ProfileError) as refused:
        load_profile(small, overrides={path: text})
    assert str(refused.value).startswith(f"{small}: {path}: {problem}")
    assert len(refused.value.problems) == 1


def test_all_wrong_overrides_are_named_at_once(small):
    with pytest.raises(ProfileError) as refused:
        load_profile(small, overrides={"tiers.hmb.bandwidth": "1 GB/s", "links.d2h.rat": "1 GB/s"})
    assert len(refused.value.problems) == 2


def test_overrides_do_not_stay(small):
    load_profile(small, overrides={"tiers.hbm.bandwidth": "300 GB/s"})
    assert load_profile(small).tier("hbm").bandwidth == 10**9


def test_a_file_may_begin_as_editors_of_windows_begin_it(small):
    same = small.with_name("marked.toml")
    same.write_text(small.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert load_profile(same).tier("hbm") == load_profile(small).tier("hbm")


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(BAD.glob("*.toml")), ids=lambda path: path.stem)
def test_a_bad_profile_raises_exactly_the_messages_it_documents(path, monkeypatch):
    monkeypatch.chdir(BAD)
    lines = path.read_text(encoding="utf-8").splitlines()
    expected = [line.removeprefix("# expect: ") for line in lines if line.startswith("# expect: ")]
    assert expected
    with pytest.raises(ProfileError) as refused:
        load_profile(path.name)

    def known(line):
        """The parser's own words differ between Python versions; file, line and column do not."""
        before, mark, _ = line.partition("not TOML: ")
        return before + mark

    assert [known(line) for line in refused.value.problems] == [known(line) for line in expected]
    assert str(refused.value) == "\n".join(refused.value.problems)


def test_all_mistakes_of_a_file_are_named_at_once():
    with pytest.raises(ProfileError) as refused:
        load_profile(BAD / "many_at_once.toml")
    assert len(refused.value.problems) == 8


def test_an_unknown_name_comes_with_the_nearest():
    with pytest.raises(
        ProfileError, match=r"^no hardware profile is called 'a100_80_smx' \(did you mean 'a100_80_sxm'\?\)$"
    ):
        load_profile("a100_80_smx")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"nowhere\.toml: no such file$"):
        load_profile(tmp_path / "nowhere.toml")
    with pytest.raises(ProfileError, match=r"a folder, not a TOML file$"):
        load_profile(tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "raw.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"raw\.toml: cannot be read: "):
        load_profile(tmp_path / "raw.toml")


JUNK = st.sampled_from(
    ["", "1", "-1", "0", "nan", "-inf", "true", '"x"', '"1 GB"', '"1 GB/s"', "[]", "[[1]]", '["hbm"]', "{}",
     "{ value = 1 }", '{ value = "1 GB", source = 3, standing = "x" }', "1979-05-27", "0.5", '""', "{ a = { b = 1 } }",
     '{ name = [] }', "1e400", "99999999999999999999999"]
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_file_it_loads_or_is_refused_in_lines_that_name_it(small, data):
    lines = ONE.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[at].partition(" = ")
        if equals:
            lines[at] = f"{key} = {data.draw(JUNK)}"
        elif data.draw(st.booleans()):
            lines[at] = data.draw(st.sampled_from(["", "[tiers]", "[links.d2h]", "[x]", 'tiers = "x"', "links = 3"]))
    path = small.parent / "junk.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        load_profile(path)
    except ProfileError as refused:
        for problem in refused.problems:
            assert problem.startswith(f"{path}: ")
            assert len(problem.splitlines()) == 1


# ---- names, text, speed --------------------------------------------------------------------------


def test_the_text_of_a_shipped_profile_is_the_file(tmp_path):
    text = profile_text("mt3000_survey")
    (tmp_path / "mt3000_survey.toml").write_text(text, encoding="utf-8")
    copied = load_profile(tmp_path / "mt3000_survey.toml")
    assert copied.content_hash == load_profile("mt3000_survey").content_hash
    with pytest.raises(ProfileError, match="did you mean"):
        profile_text("mt3000_survy")


def test_a_file_is_found_by_a_string_with_a_separator_or_suffix(small, monkeypatch):
    monkeypatch.chdir(small.parent)
    shutil.copy(small, small.parent / "plain")
    assert load_profile("small.toml").name == load_profile("./plain").name.replace("plain", "small") == "small"


@pytest.mark.alone
@pytest.mark.parametrize("name", profile_names())
def test_a_profile_loads_in_thirty_milliseconds(name):
    load_profile(name)
    assert least(0.030, lambda: cpu_s(load_profile, name)) < 0.030
