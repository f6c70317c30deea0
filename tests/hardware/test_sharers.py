"""Devices that share a host: one that stands for all has its share, as if all were simulated."""

from __future__ import annotations

import pytest

from sim import load_profile, simulate
from sim.errors import ProfileError
from sim.trace import Trace, TraceBuilder

MB = 1_000_000


def copies(devices: int, layers: int = 6) -> Trace:
    """The same net on each device, without any exchange; each layer saves 100 MB, and computes for 4 ms."""
    b = TraceBuilder()
    for device in range(devices):
        x = [b.tensor(f"{device}.x", MB, "input")]
        for i in range(layers):
            x.append(b.tensor(f"{device}.a{i}", 100 * MB))
            b.op(f"{device}.f{i}", reads=x[-2:-1], writes=x[-1:], layer=i, device=device, duration=4_000_000)
        gradient = b.tensor(f"{device}.g", MB, "temporary")
        b.op(f"{device}.loss", "loss", reads=x[-1:], writes=[gradient], device=device, duration=1000)
        for i in reversed(range(layers)):
            made = b.tensor(f"{device}.d{i}", MB, "temporary")
            fields = {"phase": "backward", "layer": i, "device": device, "duration": 8_000_000}
            b.op(f"{device}.f{i}.bwd", reads=[gradient, x[i + 1]], writes=[made], **fields)
            gradient = made
    return b.build()


@pytest.mark.parametrize("policy", ["swap_all", "offload_activations", "save_on_cpu", "vdnn"])
@pytest.mark.parametrize("number", [2, 4, 8])
def test_one_that_shares_takes_as_long_as_each_of_all(number: int, policy: str) -> None:
    alone = simulate(copies(1), load_profile("a100_80_sxm"), policy).log.end
    one = simulate(copies(1), load_profile("a100_80_sxm", overrides={"sharers": str(number)}), policy).log.end
    every = simulate(copies(number), load_profile("a100_80_sxm", overrides={"devices": str(number)}), policy).log.end
    assert one == pytest.approx(every, rel=1e-6)
    assert one >= alone
    if number == 8 and policy in ("save_on_cpu", "offload_activations"):
        assert one > 1.05 * alone


def test_shared_parts_are_divided_and_a_devices_own_are_not() -> None:
    whole, one = load_profile("a100_80_sxm"), load_profile("a100_80_sxm", overrides={"sharers": "8"})
    for tier in whole.tiers:
        part = 1 if tier.device >= 0 else 8
        assert one.tier(tier.name).capacity == tier.capacity // part
        assert one.tier(tier.name).bandwidth == tier.bandwidth // part
    rates = {link.name: link.rate for link in one.links}
    assert rates["d2h"] == 25 * 10**9
    assert rates["nvme_read"] == 10 * 10**9 // 8
    pools = {pool.name: pool.rate for pool in one.pools}
    assert pools["host_dram"] == 15 * 10**9
    assert pools["switch_up"] == pools["switch_down"] == 13 * 10**9
    assert "8 devices" in one.notes[-1]
    cpu = one.engines[one.engine_for(0, "cpu")]
    assert cpu.peak["fp32"] == 2.5e12 // 8


def test_a_shared_tier_that_writes_slowly_is_divided_in_both_rates() -> None:
    """Of Optane at 39.4 GB/s read and 13.9 GB/s written; 0 stays 0, which says that it writes as it reads."""
    one = load_profile("xeon_optane", overrides={"sharers": "4"})
    pmm = one.tier("pmm")
    assert (pmm.bandwidth, pmm.write_bandwidth) == (9_850_000_000, 3_475_000_000)
    assert one.tier("dram").write_bandwidth == 0
    assert load_profile("a100_80_sxm", overrides={"sharers": "8"}).tier("host").write_bandwidth == 0


def test_two_cards_behind_a_switch_share_it_and_a_third_does_not() -> None:
    pools = load_profile("a100_80_sxm", overrides={"devices": "4"}).pools
    switches = {pool.name: [member.name for member in pool.members] for pool in pools if "switch_up" in pool.name}
    assert switches == {"switch_up@0": ["d2h@0", "d2h@1"], "switch_up@1": ["d2h@2", "d2h@3"]}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ProfileError, match="sharers: value 8: 2 devices are simulated themselves"):
        load_profile("a100_80_sxm", overrides={"sharers": "8", "devices": "2"})
    with pytest.raises(ProfileError, match="sharers"):
        load_profile("a100_80_sxm", overrides={"sharers": "0"})
    with pytest.raises(ProfileError, match="has no `devices`"):
        load_profile("a100_80_sxm", overrides={"pools.pcie.devices": "2"})
