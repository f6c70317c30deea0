"""What must hold for every policy that offloads or compresses, and how they compare: the acceptance of the family."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from scripts.offload_page.bound import bound
from scripts.offload_page.rules import rule_of
from sim import load_profile, simulate
from sim.errors import Deadlock, OutOfMemory, TiersimError
from sim.experiment import Result
from sim.hardware.platform import Platform
from sim.log import CAUSE, WHY, EventLog
from sim.policies import family, names, policy_class
from sim.trace import Trace
from sim.trace.tensor import ROLE_CODE
from workloads import cnn, transformer

QUICKER = {"swapadvisor": "swapadvisor(population=4, generations=1)"}
FAMILY = [name for name in names() if family(name) in ("offload", "compression")]
ROOMY = 1 << 60
SMALL = {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 1024}
EXPERTS = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
EXPERTS |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 256}
EXPERTS |= {"num_local_experts": 4, "num_experts_per_tok": 1, "experts_implementation": "loop"}
CARDS = {
    "flashneuron": "a100_80_gds",
    "pooled_memory": "cloudmatrix384_die",
    "slc_cache": "mt3000_survey_slc",
    "moe_tiering": "mt3000_survey",
}
"""Machines of policies that need a part which others lack."""

SHARES = (0.7, 0.8, 0.9, 0.95)
FIXED = {
    "moe_tiering": "experts begin on the host",
    "swap_all": "it offloads whatever the memory",
    "save_on_cpu": "PyTorch's hooks do not look at free memory",
    "offload_activations": "nor do torchtune's",
    "swap_attention": "nor do MindSpeed's",
    "zero_offload": "states live on the host",
    "zero_infinity": "all states live on the host or the drive",
    "stronghold": "layers pass through a window",
}
"""Policies whose traffic does not depend on the memory that there is, and why."""

AT_ONCE = {"cdma": "cdma(codec=1000000 TB/s)", "uvm": "uvm(fault=0)"}
"""Policies whose codec, or fault, takes time whatever the link does: here neither does."""

NOTHING_LEAVES = {
    "gist": "what it encodes stays on the device",
    "smartpool": "it gives addresses",
}
"""Policies that copy nothing, which here need nearly all of the memory, and why."""

AMPLE = 1000.0


@cache
def job(name: str = "") -> Trace:
    """Two layers in mixed precision, on which policies for activations and for states both have something to do.

    For a policy of inference a prompt and two tokens, in two parts; for one of experts, some; for the integer program
    of `autotm` one layer.
    """
    needs = policy_class(name).needs if name else ()
    if "inference" in needs:
        return transformer(SMALL, batch=16, sequence=240, generate=2, precision="fp16", micro_batches=2)
    if "experts" in needs:
        return transformer(EXPERTS, batch=4, sequence=256, precision="mixed_fp16", optimizer="adamw_fused")
    if name == "autotm":
        return transformer({**SMALL, "n_layer": 1, "vocab_size": 64}, batch=8, sequence=256, optimizer="sgd")
    return transformer(SMALL, batch=8, sequence=256, precision="mixed_fp16", optimizer="adamw_fused")


@cache
def machine(rate: str = "25 GB/s", fixed: str = "0 us", of: str = "") -> Platform:
    """A card whose links are the only thing that differs; for a policy of `CARDS` its own."""
    name = CARDS.get(of, "a100_40_pcie")
    changes = {}
    for link in load_profile(name).links:
        if link.source != link.target and not link.name.startswith("p2p"):
            changes |= {f"links.{link.name}.rate": rate, f"links.{link.name}.fixed": fixed}
    return load_profile(name, overrides=changes)


@cache
def infinite(of: str = "") -> Platform:
    """The same card with links that take no time, and host memory that keeps up."""
    return replace(machine("1000000 TB/s", of=of), pools=())


@cache
def whole(name: str = "") -> Result:
    return simulate(job(name), machine(of=name), "keep_all", budget=ROOMY)


def tight(name: str) -> Result | None:
    """The run with the least of `SHARES` that fits; None for those of which nothing leaves the device."""
    fits = (result for share in SHARES if (result := run(name, share)) is not None)
    result = next(fits, None)
    assert result is not None or name in NOTHING_LEAVES, f"{name} fits nowhere: its own job or machine belongs here"
    return result


def moved(result: Result, *, out: bool) -> dict[int, int]:
    """Bytes by tensor that left the device, or that came."""
    log, home = result.log, result.log.platform.home(0).name
    found: dict[int, int] = {}
    for row in log.intervals[log.interval("why") == WHY["move"]].tolist():
        link = log.platform.links[row[3] - len(log.platform.engines)]
        if (link.source if out else link.target) == home:
            found[row[6]] = found.get(row[6], 0) + row[8]
    return found


@cache
def run(name: str, share: float, platform: Platform | None = None, of: str = "") -> Result | None:
    """A run with a share of the whole job's memory; None where it does not fit, or is not planned for.

    of: the policy whose job it is, by default the one that runs.
    """
    budget = int(share * whole(of or name).summary()["peak_bytes"])
    try:
        return simulate(job(of or name), platform or machine(of=of or name), QUICKER.get(name, name), budget=budget)
    except (TiersimError, Deadlock):
        return None


@pytest.mark.parametrize("name", FAMILY)
def test_with_ample_memory_a_policy_is_the_plain_run_unless_its_traffic_is_fixed(name: str) -> None:
    result = run(name, AMPLE)
    assert result is not None
    copies = sum(moved(result, out=True).values()) + sum(moved(result, out=False).values())
    if name in FIXED:
        assert result.log.end >= whole(name).log.end
    else:
        assert (copies, result.log.end) == (0, whole(name).log.end)


def test_policies_of_fixed_traffic_do_move_something() -> None:
    moves = {name: run(name, AMPLE) for name in FIXED}
    idle = [name for name, result in moves.items() if result is None or not moved(result, out=False)]
    assert not idle, f"strike these from FIXED: {idle}"


def least_share(name: str) -> float:
    """The least share of the memory with which it fits, in 32nds, over the link that is not infinite; by bisection."""
    fails, fits = 0, 33
    while fits - fails > 1:
        middle = (fails + fits) // 2
        fails, fits = (fails, middle) if run(name, middle / 32) is not None else (middle, fits)
    return fits / 32


@pytest.mark.parametrize("name", FAMILY)
def test_over_an_infinite_link_it_fits_the_same_memory_and_nothing_is_waited_for(name: str) -> None:
    """Copies then cost no time, so that the least memory is had in the time of the ops; and no link is too fast."""
    result = run(name, least_share(name), infinite(name))
    assert result is not None
    if name in AT_ONCE:
        result = simulate(job(name), infinite(name), AT_ONCE[name], budget=result.log.platform.home(0).capacity)
    stalled = result.summary()["stall_ns"]
    # a nanosecond a copy, since times are rounded up
    copies = int((result.log.interval("why") == WHY["move"]).sum())
    assert sum(ns for cause, ns in stalled.items() if cause != "engine") <= 4 * copies


@pytest.mark.parametrize("name", FAMILY)
def test_over_a_link_that_carries_nothing_no_memory_is_overrun(name: str) -> None:
    slow = machine("1 kB/s", of=name)
    share, result = next(((s, r) for s in SHARES if (r := run(name, s, slow)) is not None), (0, None))
    if result is None:
        return  # refused: it never overran it
    assert result.summary()["peak_bytes"] <= share * whole(name).summary()["peak_bytes"]
    crossed = sum(moved(result, out=True).values()) + sum(moved(result, out=False).values())
    assert crossed == 0 or result.log.end > 100 * whole(name).log.end


def on_device(trace: Trace, tensor: int) -> list[int]:
    """The readers of a tensor that do not run on the host's CPU."""
    return [op for op in trace.readers(tensor) if op not in trace.op_columns.engine]


@pytest.mark.parametrize("name", FAMILY)
def test_what_leaves_and_is_read_again_comes_back_and_nothing_else_does(name: str) -> None:
    result = tight(name)
    if result is None:
        return
    log, back = result.log, moved(result, out=False)
    trace, home, activation = log.trace, log.platform.tier_ids[log.platform.home(0).name], ROLE_CODE["activation"]
    released: dict[int, int] = {}  # a copy that is wanted back before it is out leaves its tensor where it is
    for time, tier, delta, tensor, _, cause in log.changes.tolist():
        if tier == home and delta < 0 and tensor >= 0 and cause in (CAUSE["moved out"], CAUSE["dropped"]):
            released[tensor] = time
    ends = {row[5]: row[1] for row in log.intervals[log.interval("why") == WHY["run"]].tolist()}
    out = moved(result, out=True)
    for t, time in released.items():
        if trace.tensor_columns.role[t] == activation and any(ends[op] > time for op in on_device(trace, t)):
            assert t in back, f"{trace.tensor_columns.name[t]} left, is read again, and never came"
            assert back[t] == out[t], f"of {trace.tensor_columns.name[t]} {out[t]} bytes left and {back[t]} came"
    for t in out:  # what nothing overwrites, and began elsewhere, still has its copy there
        clean = trace.producer[t] < 0 and trace.replaced_by[t] < 0
        assert not (clean and result.plan.place.get(t, log.platform.home(0).name) != log.platform.home(0).name)
    for t in back:  # states may begin on the host
        if trace.tensor_columns.role[t] == activation and trace.producer[t] not in trace.op_columns.engine:
            assert t in out, f"{trace.tensor_columns.name[t]} came, but never left"


@pytest.mark.parametrize("name", FAMILY)
def test_no_run_is_faster_than_the_bound(name: str) -> None:
    for share in SHARES:
        result, budget = run(name, share), int(share * whole(name).summary()["peak_bytes"])
        if result is None:
            continue
        log, rows = result.log, result.log.interval("why") == WHY["move"]
        sizes, copied = log.trace.tensor_columns.bytes[log.interval("tensor")[rows]], log.interval("bytes")[rows]
        ratio = float((copied[sizes > 0] / sizes[sizes > 0]).min(initial=1.0))
        assert log.end >= bound(log.trace, log.platform, budget, ratio=ratio).ns


WITHOUT_ITS_FREEDOM = {
    name: "it moves nothing" if "activations" in policy_class(name).manages else "activations are not its own"
    for name in FAMILY
    if not ("activations" in policy_class(name).manages and policy_class(name).moves and name not in NOTHING_LEAVES)
}
NEVER_BESIDE = {
    "flexgen": "a prompt has no backward: `swap_all` offloads nothing, and fits nowhere",
    "autotm": "its integer program is solved here for a layer, which `swap_all` needs whole; docs/offload.md has both",
}


@pytest.mark.parametrize("name", sorted({*FAMILY} - {*WITHOUT_ITS_FREEDOM, "swap_all"}))
def test_none_is_slower_than_swap_all_but_by_a_stated_rule(name: str) -> None:
    compared = 0
    for share in (*SHARES, AMPLE):
        result, other = run(name, share), run("swap_all", share, of=name)
        compared += share != AMPLE and result is not None and other is not None
        if result is not None and other is not None and result.log.end > 1.0005 * other.log.end:
            assert rule_of(name), f"{name}: mend it, or say in its docstring where and why it is slower than `swap_all`"
    assert compared or name in NEVER_BESIDE, f"{name} was compared nowhere: its own job or machine belongs here"


@pytest.mark.parametrize("name", NEVER_BESIDE)
def test_where_a_policy_is_not_compared_swap_all_does_not_fit(name: str) -> None:
    assert all(run("swap_all", share, of=name) is None for share in SHARES)


# ---- how they compare ------------------------------------------------------------------------------


@cache
def vgg() -> tuple[Trace, Platform]:
    """VGG-16 on a card with a slow link: bound by its copies."""
    return cnn("vgg-16", 32, zeros="cdma", optimizer="sgd", kernels="cudnn"), load_profile("p100")


def time_on_vgg(policy: str, budget: int = ROOMY) -> int:
    trace, card = vgg()
    return simulate(trace, card, policy, budget=budget).log.end


def test_the_order_on_a_copy_bound_net_is_as_published() -> None:
    every = time_on_vgg("vdnn(variant=all, algorithm=m)")
    conv = time_on_vgg("vdnn(variant=conv, algorithm=p)")
    assert time_on_vgg("save_on_cpu(weights=False)") >= every >= conv >= time_on_vgg("vdnn")
    assert time_on_vgg("vdnn_pp(variant=all, algorithm=m)") <= every
    assert time_on_vgg("cdma(variant=all, algorithm=m)") <= every


@pytest.mark.parametrize("offloads", ["variant=all, algorithm=m", "variant=all, algorithm=p", "variant=conv"])
def test_whatever_vdnn_offloads_neither_vdnn_pp_nor_a_codec_makes_it_slower(offloads: str) -> None:
    plain = time_on_vgg(f"vdnn({offloads})")
    assert time_on_vgg(f"vdnn_pp({offloads})") < plain
    assert time_on_vgg(f"cdma({offloads})") < plain
    every, chosen = (time_on_vgg(f"cswap({offloads}, choose={choose})") for choose in ("always", "model"))
    assert chosen < min(plain, every)


def test_where_the_fastest_algorithms_do_not_fit_vdnn_s_trials_find_more_than_the_slowest_pass() -> None:
    budget = int(0.9 * simulate(*vgg(), "keep_all", budget=ROOMY).summary()["peak_bytes"])
    with pytest.raises(OutOfMemory):
        time_on_vgg("vdnn(variant=conv, algorithm=p)", budget)
    dyn = time_on_vgg("vdnn", budget)
    assert time_on_vgg("vdnn_pp", budget) < dyn < time_on_vgg("vdnn(variant=all, algorithm=m)", budget)


@cache
def large(policy: str) -> Result:
    """GPT-3 2.7B, whose states alone exceed the card that runs it."""
    trace = transformer(
        "gpt3-2.7b", batch=4, sequence=1024, precision="mixed_fp16", attention="flash", optimizer="adamw_fused"
    )
    return simulate(trace, load_profile("v100_32"), policy)


def test_a_large_transformer_needs_the_host_and_chunks_move_no_more_than_all_of_it_placed_there() -> None:
    with pytest.raises(OutOfMemory):
        large("keep_all")
    fixed, chunks = large("zero_infinity(states=host, weights=host)"), large("patrickstar")
    for result in (fixed, chunks):
        assert result.summary()["peak_bytes"] <= load_profile("v100_32").home().capacity
    for out in (True, False):
        assert sum(moved(chunks, out=out).values()) < sum(moved(fixed, out=out).values())
    gemini = large("patrickstar(prefetch=2, share=0.9, warm_up_share=0.8)")
    assert gemini.log.end < chunks.log.end
    assert sum(moved(gemini, out=False).values()) < sum(moved(chunks, out=False).values())
    assert large("zero_offload(delayed=True)").log.end < large("zero_offload").log.end


def test_patrickstar_moves_no_more_than_a_fixed_placement_and_both_fit_where_the_device_alone_does_not() -> None:
    share = next(share for share in (0.7, 0.8, 0.9, 0.95) if run("patrickstar", share) is not None)
    assert run("keep_all", share) is None
    chunks, fixed = run("patrickstar", share), run("zero_infinity", share)
    assert chunks is not None
    assert fixed is not None
    for out in (True, False):
        assert sum(moved(chunks, out=out).values()) <= sum(moved(fixed, out=out).values())


def test_a_delayed_update_is_not_slower() -> None:
    card = load_profile("a100_40_pcie")
    late, plain = (simulate(job(), card, f"zero_offload(delayed={late})").log.end for late in (True, False))
    assert late <= plain


def test_busy_host_memory_slows_what_crosses_it_and_a_codec_on_the_device_not_at_all() -> None:
    trace, _ = vgg()
    slower = {}
    for name in ("vdnn(variant=all)", "cdma(variant=all)", "gist"):
        idle, busy = (
            simulate(trace, load_profile("p100", overrides={"pools.host_dram.rate": rate}), name, budget=ROOMY).log.end
            for rate in ("80 GB/s", "4 GB/s")
        )
        slower[name] = busy / idle
    assert slower["gist"] == 1
    assert 1 < slower["cdma(variant=all)"] < slower["vdnn(variant=all)"]
    states = [
        simulate(job(), load_profile("a100_40_pcie", overrides={"pools.host_dram.rate": rate}), "zero_offload").log
        for rate in ("120 GB/s", "30 GB/s", "10 GB/s")
    ]
    assert states[0].end < states[1].end < states[2].end
    assert ns_on(states[1], "cpu") > 1.2 * ns_on(states[0], "cpu"), "the update, and not its copies alone"


def test_a_codec_on_the_cpu_is_slower_beside_a_busy_host_and_a_drive_past_the_host_is_not() -> None:
    trace, _ = vgg()
    times = {
        (name, rate): simulate(trace, load_profile(card, overrides={**limit, "pools.host_dram.rate": rate}), name).log
        for name, card, limit in (
            ("vdnn_pp(variant=all, compress=True)", "p100", {}),
            ("vdnn_pp(variant=all)", "p100", {}),
            ("flashneuron", "a100_80_gds", {"tiers.hbm.capacity": "2600 MB"}),
        )
        for rate in ("80 GB/s", "20 GB/s")
    }
    on_cpu, plain, drive = (
        [times[name, rate].end for rate in ("80 GB/s", "20 GB/s")]
        for name in ("vdnn_pp(variant=all, compress=True)", "vdnn_pp(variant=all)", "flashneuron")
    )
    assert on_cpu[1] > 1.1 * on_cpu[0], "copies and the CPU's passes share the host's memory"
    assert plain[1] == plain[0], "the copies alone do not fill it"
    assert drive[1] == drive[0]
    assert any(link.startswith("gds") for link in lanes(times["flashneuron", "20 GB/s"]))


def ns_on(log: EventLog, lane: str) -> int:
    """The time of an engine's ops."""
    rows = log.intervals[log.interval("lane") == log.platform.lanes.index(lane)]
    return int((rows[:, 1] - rows[:, 0]).sum())


def lanes(log: EventLog) -> set[str]:
    """The links over which something was moved."""
    rows = log.intervals[log.interval("why") == WHY["move"]].tolist()
    return {log.platform.links[row[3] - len(log.platform.engines)].name for row in rows}
