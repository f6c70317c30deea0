"""What a card shows: closed forms from the sources of PyTorch and NCCL, on traces of one device and of layouts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import sim.analysis
from sim import load_profile, simulate
from sim.analysis import card_reading
from sim.layout import lay_out
from sim.trace import TraceBuilder
from workloads import transformer

MIB = 2**20
SMALL = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 4, "n_head": 2}
CACHING = {"tiers.hbm.allocator": "caching"}


def laid_out(layout, profile="a100_80_sxm", batch=8):
    trace = transformer(SMALL, batch=batch, sequence=16, precision="mixed_bf16", attention="eager")
    return simulate(*lay_out(trace, load_profile(profile, overrides={"devices": "8", **CACHING}), layout)).log


def test_buffers_of_a_connection_are_those_of_nccls_protocols():
    """LL 8 lines x 512 threads x 8 steps x 16 B, LL128 120 x 640 x 8 x 8 B, Simple 4 MiB, in pages of 2 MiB."""
    figures = tomllib.loads(Path(sim.analysis.__file__).with_name("card_reading.toml").read_text(encoding="utf-8"))
    protocols = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * MIB
    assert figures["connection"]["receive"] == f"{-(-protocols // (2 * MIB)) * 2} MiB"


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


def test_a_communicator_of_eight_has_a_ring_and_a_chain_on_each_channel():
    """24 channels, on each one neighbour of the ring and two of the chain, 12 MiB each: 864 MiB."""
    (found,) = card_reading(laid_out({"dp": 8}))
    assert found.communicators == 24 * (1 + 2) * 12 * MIB == 864 * MIB


def test_each_axis_has_a_communicator_and_two_ranks_have_one_neighbour_in_the_chain():
    (found,) = card_reading(laid_out({"dp": 4, "tp": 2}))
    assert found.communicators == (24 * 3 + 24 * 2) * 12 * MIB


def test_stages_receive_from_and_send_to_their_neighbours():
    """The first sends activations and receives gradients, the second the other way round: 32 channels of 10 + 2 MiB.

    The two that have a tied weight are a communicator, too: 24 channels for each way of a ring of two.
    """
    found = card_reading(laid_out({"pp": 2, "micro_batches": 4}))
    assert [stage.communicators for stage in found] == 2 * [(32 + 24 * 2) * 12 * MIB]


def test_where_nobody_says_how_large_it_is_there_is_none():
    assert card_reading(simulate(transformer(SMALL, batch=1, sequence=16), load_profile("cambricon_mlu370")).log) == ()


def test_a_communicator_of_ascend_has_a_pair_of_buffers_and_its_card_is_never_empty():
    trace = transformer(SMALL, batch=8, sequence=16, precision="mixed_bf16", attention="eager")
    machine = load_profile("ascend_910b", overrides={"devices": "8", **CACHING})
    for layout, communicators in (({"dp": 4, "tp": 2}, 2), ({"pp": 2, "micro_batches": 4}, 2)):
        found = card_reading(simulate(*lay_out(trace, machine, layout)).log)[0]
        assert (found.communicators, found.context) == (communicators * 400 * MIB, 3382 * MIB)
        assert found.bytes == found.tensors + found.context + found.communicators


def test_channels_that_no_log_names_are_not_guessed():
    """Over PCIe: no figure; alone, a card has no communicator."""
    alone = card_reading(simulate(transformer(SMALL, batch=1, sequence=16), load_profile("a100_40_pcie")).log)
    assert [reading.communicators for reading in alone] == [0]
    (one,) = card_reading(laid_out({"dp": 2}, profile="v100_32"))
    assert one.communicators is None
    assert one.bytes == one.tensors + one.context + one.workspaces
