"""What a rewrite made of a trace is made once, is the same, and lives no longer than the trace."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest

from sim.experiment import simulate
from sim.rewrites import fused_update
from sim.rewrites.fused_update import fuse_updates
from sim.rewrites.host_update import Split, device_updates, updated_on_host
from sim.rewrites.kept import kept
from workloads import transformer


@pytest.fixture
def trace():
    return transformer(
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 61},
        batch=1,
        sequence=32,
        precision="amp_bf16",
    )


def test_parts_and_policies_share_one_rewrite(trace, monkeypatch):
    calls = []
    fuse = fused_update.fuse
    monkeypatch.setattr(fused_update, "fuse", lambda *a, **k: calls.append(1) or fuse(*a, **k))
    for policy in ("zero_offload", "zero_offload + full_recompute", "stronghold"):
        simulate(trace, "a100_40_pcie", policy)
    assert len(calls) == 1


def test_another_trace_other_updates_or_another_place_is_another_result(trace):
    updates = device_updates(trace)
    whole, some = fuse_updates(trace, updates), fuse_updates(trace, updates[: len(updates) // 2])
    assert whole.content_hash != some.content_hash
    assert fuse_updates(trace, list(updates)) is whole
    twin = pickle.loads(pickle.dumps(trace))
    assert twin == trace
    assert fuse_updates(twin, updates) is not whole
    assert fuse_updates(twin, updates) == whole
    device, host = updated_on_host(Split(whole)), updated_on_host(Split(whole), in_place=True)
    assert device.trace.content_hash != host.trace.content_hash
    assert updated_on_host(Split(whole)) is device


def test_what_was_made_ends_with_the_trace_and_does_not_travel_with_it():
    trace = transformer("gpt2-small", batch=1, sequence=8)
    made = weakref.ref(fuse_updates(trace, device_updates(trace)))
    assert "_rewritten" not in trace.__getstate__()
    del trace
    gc.collect()
    assert made() is None


def test_the_oldest_leave_where_many_are_kept(trace, monkeypatch):
    monkeypatch.setattr("sim.rewrites.kept.MOST_OPS", 2 * len(trace.ops))
    calls = []

    def make(key):
        return lambda: (calls.append(key) or key, trace)

    assert [kept(trace, key, make(key)) for key in "abacb"] == list("abacb")
    assert calls == list("abcb")
