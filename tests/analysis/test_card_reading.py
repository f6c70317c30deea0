"""What a card shows: closed forms from the sources of PyTorch and NCCL, on traces of one device and of layouts."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sim.analysis
from sim import load_profile, simulate
from sim.analysis import card_reading
from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.hardware.platform import Link, rank_link
from sim.layout import lay_out
from sim.plan import Plan
from sim.trace import TraceBuilder
from sim.trace.op import Ring
from workloads import transformer

MIB = 2**20
SMALL = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 4, "n_head": 2}
CACHING = {"tiers.hbm.allocator": "caching"}
USED = ("communicator", "receive", "send")


def laid_out(layout, profile="a100_80_sxm", batch=8):
    trace = transformer(SMALL, batch=batch, sequence=16, precision="mixed_bf16", attention="eager")
    return simulate(*lay_out(trace, load_profile(profile, overrides={"devices": "8", **CACHING}), layout)).log


def test_buffers_are_those_of_nccls_protocols():
    """LL 8 lines x 512 threads x 8 steps x 16 B, LL128 120 x 640 x 8 x 8 B, Simple 4 MiB, in pages of 2 MiB.

    On A100 over NVLink Simple is the sender's, with 4 KiB or so of its own; on H100 all three are the receiver's. There
    are 24 channels for collectives and 32 to a peer; a rank has one neighbour of two, and two within a chain.
    """
    cards = tomllib.loads(Path(sim.analysis.__file__).with_name("card_reading.toml").read_text(encoding="utf-8"))
    a100, h100 = ({k: v for k, v in card.items() if k in USED} for card in cards["cards"][:2])
    lines, simple = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8, 4 * MIB

    def pages(of):
        return -(-of // (2 * MIB)) * 2

    assert (a100["receive"], a100["send"]) == (f"{32 * pages(lines)} MiB", f"{32 * pages(simple + 4096)} MiB")
    measured = (4340 - 1060) / 7  # MB of each peer: more than its 32 channels
    assert measured / (32 * pages(lines + simple + 2 * MIB) * MIB / 1e6) == pytest.approx(1.16, abs=0.01)
    assert (h100["receive"], h100["send"]) == (f"{measured * 10 / 12:.0f} MB", f"{measured * 2 / 12:.0f} MB")
    assert h100["communicator"] == [f"{24 * near * pages(lines + simple + 2 * MIB)} MiB" for near in (1, 2)]
    two, more = (int(each.removesuffix(" MiB")) for each in a100["communicator"])
    assert more - two == 24 * pages(lines)


@pytest.mark.parametrize(("profile", "workspace"), [("a100_80_sxm", 4096 * 2 * 1024 + 16 * 8 * 1024), ("h100", 2**25)])
def test_one_device_has_a_context_and_a_workspace_per_thread(profile, workspace):
    """Backward has a thread, and so a handle of cuBLAS, of its own; without it there is one."""
    platform = load_profile(profile, overrides=CACHING)
    trace = transformer(SMALL, batch=1, sequence=16)
    log = simulate(trace, platform).log
    (found,) = card_reading(log)
    reserved = int(log.reserved[log.reserved[:, 1] == 0, 2].cumsum().max())
    assert (found.tensors, found.context, found.workspaces) == (reserved, 400 * 10**6, 2 * workspace)
    assert found.communicators == 0
    assert found.bytes == reserved + 400 * 10**6 + 2 * workspace
    b = TraceBuilder()
    b.op("product", "matmul", reads=[b.tensor("x", 64, "input")], writes=[b.tensor("y", 64)], flops=64)
    (forward,) = card_reading(simulate(b.build(), platform).log)
    assert forward.workspaces == workspace
    (all_kernels,) = card_reading(log, lazy_kernels=False)
    assert all_kernels.bytes - found.bytes == all_kernels.context - found.context == 1343 * MIB - 400 * 10**6


def test_a_communicator_of_eight_is_that_of_four_which_was_measured():
    (found,) = card_reading(laid_out({"dp": 8}))
    assert found.communicators == 688 * MIB
    (hopper,) = card_reading(laid_out({"dp": 8}, profile="h100"))
    assert hopper.communicators == 24 * 2 * 12 * MIB


def test_each_axis_has_a_communicator_and_two_ranks_have_a_smaller_one():
    (found,) = card_reading(laid_out({"dp": 4, "tp": 2}))
    assert found.communicators == (688 + 544) * MIB


def test_stages_receive_from_and_send_to_their_neighbours():
    """The first sends activations and receives gradients, the second the other way round: 32 channels of 6 + 6 MiB.

    The two that have a tied weight are a communicator, too.
    """
    found = card_reading(laid_out({"pp": 2, "micro_batches": 4}))
    assert [stage.communicators for stage in found] == 2 * [(32 * 12 + 544) * MIB]


def communicators_by_hand(ops, profile="h100", devices=3):
    """Bytes of communicators per device after some exchanges: of each the name, kind, device, and group or ring."""
    b = TraceBuilder()
    x = [b.tensor(f"x{i}", 64, "input") for i in range(devices)]
    for name, kind, device, among in ops:
        reads = [] if kind == "recv" else [x[device]]
        writes = [] if kind == "send" else [b.tensor(f"{name}.out", 64)]
        b.op(name, kind, reads=reads, writes=writes, device=device, bytes=64, duration=10, **among)
    for i in range(devices):
        b.op(f"last{i}", "other", reads=[x[i]], device=i)
    platform = load_profile(profile, overrides={"devices": str(devices), **CACHING})
    platform = replace(platform, links=(*platform.links, Link(rank_link("data", 0), "hbm@0", "hbm@0", 10**9)))
    return [each.communicators for each in card_reading(replay(Plan(b.build()), platform))]


def test_who_only_sends_has_buffers_to_send_and_who_only_receives_to_receive():
    """On H100 a connection takes 78 MB of the sender and 390 of the receiver."""
    pair = {"group": "pair"}
    assert communicators_by_hand([("send", "send", 0, pair), ("recv", "recv", 1, pair)]) == [78 * 10**6, 390 * 10**6, 0]


def test_a_device_has_the_communicators_of_which_it_is_a_member():
    two = {"group": "two"}
    found = communicators_by_hand([("sum0", "collective", 0, two), ("sum1", "collective", 1, two)], "a100_80_sxm")
    assert found == [544 * MIB, 544 * MIB, 0]


@pytest.mark.parametrize("ranks", [(2, 8), (8, 2)], ids=str)
def test_an_axis_has_one_communicator_with_all_the_ranks_that_its_ops_name(ranks):
    ops = [(f"sum{n}", "collective", 0, {"ring": Ring("data", n, 2)}) for n in ranks]
    assert communicators_by_hand(ops, "a100_80_sxm") == [688 * MIB, 0, 0]


def test_communicators_that_no_op_uses_are_named_by_their_ranks():
    """As PaddlePaddle has them, with stages: of all ranks, of the stages, and of the norm of all gradients."""
    log = laid_out({"dp": 4, "tp": 2})
    (plain,), (more,) = card_reading(log), card_reading(log, communicators=[8, 4, 2, 1])
    assert more.bytes - plain.bytes == more.communicators - plain.communicators == (688 + 688 + 544) * MIB
    (known,) = card_reading(laid_out({"dp": 2}, profile="v100_32"), communicators=[2])
    assert known.communicators is None
    assert card_reading(log, communicators=[np.int64(8), 4, 2]) == card_reading(log, communicators=[8, 4, 2])
    for wrong in (8, None):
        with pytest.raises(TiersimError, match="communicators"):
            card_reading(log, communicators=wrong)
    with pytest.raises(TiersimError, match="pytorch: needs a version, has 'junk'"):
        card_reading(simulate(transformer(SMALL, batch=1, sequence=16), load_profile("p100")).log, "junk")
    for wrong in ([0], [-2], [1.5], [True], ["8"]):
        with pytest.raises(TiersimError, match=r"communicators: each needs a number of ranks .* nearest: 1"):
            card_reading(log, communicators=wrong)


def test_an_all_to_all_exchanges_with_each_other_rank_and_a_ring_of_attention_with_the_next():
    """Beside their communicators: of experts, as was measured; of a ring, that of the ranks of a context."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    mixture = {"model_type": "mixtral", "vocab_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, **sizes}
    trace = transformer(mixture, batch=8, sequence=16, precision="mixed_bf16", attention="eager")
    for profile, of_eight, peer in (("a100_80_sxm", 688 * MIB, 384 * MIB), ("h100", 576 * MIB, 468 * 10**6)):
        machine = load_profile(profile, overrides={"devices": "8", **CACHING})
        (found,) = card_reading(simulate(*lay_out(trace, machine, {"dp": 8, "ep": 8})).log)
        assert found.communicators == 2 * of_eight + 7 * peer
    machine = load_profile("a100_80_sxm", overrides={"devices": "8", **CACHING})
    trace = transformer(SMALL, batch=1, sequence=32, precision="mixed_bf16", attention="flash")
    (ring,) = card_reading(simulate(*lay_out(trace, machine, {"cp": 4, "ring_attention": True})).log)
    (plain,) = card_reading(simulate(*lay_out(trace, machine, {"cp": 4})).log)
    assert ring.communicators == plain.communicators + 384 * MIB


def test_where_nobody_says_how_large_it_is_there_is_none():
    assert card_reading(simulate(transformer(SMALL, batch=1, sequence=16), load_profile("cambricon_mlu370")).log) == ()


def test_a_communicator_of_ascend_has_a_pair_of_buffers_and_its_card_is_never_empty():
    trace = transformer(SMALL, batch=8, sequence=16, precision="mixed_bf16", attention="eager")
    machine = load_profile("ascend_910b", overrides={"devices": "8", **CACHING})
    for layout, communicators in (({"dp": 4, "tp": 2}, 2), ({"pp": 2, "micro_batches": 4}, 2)):
        found = card_reading(simulate(*lay_out(trace, machine, layout)).log)[0]
        assert (found.communicators, found.context) == (communicators * 400 * MIB, 3382 * MIB)
        assert found.bytes == found.tensors + found.context + found.communicators


def test_communicators_of_cards_that_nobody_measured_are_not_guessed():
    """Over PCIe: no figure; alone, a card has no communicator."""
    alone = card_reading(simulate(transformer(SMALL, batch=1, sequence=16), load_profile("a100_40_pcie")).log)
    assert [reading.communicators for reading in alone] == [0]
    (one,) = card_reading(laid_out({"dp": 2}, profile="v100_32"))
    assert one.communicators is None
    assert one.bytes == one.tensors + one.context + one.workspaces
