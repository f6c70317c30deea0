"""MindSpeed's swap-attention: what attention saves is out when its layer ends, and back before its own backward."""

from __future__ import annotations

import pytest

from sim.conformance import check_policy
from sim.errors import PolicyError
from sim.experiment import simulate
from sim.policies.offload.swap_attention import SwapAttention
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine
from workloads import transformer


def stack(layers: int, *, size: int = 30) -> Trace:
    """Layers of an attention op of 10 ns, which saves its result of `size` bytes, and an MLP of 40; backward 20, 50."""
    b = TraceBuilder()
    hidden, saved = b.tensor("x", 1, "input"), []
    for i in range(layers):
        for part, took, bytes in (("attn", 10, size), ("mlp", 40, 1)):
            out = b.tensor(f"h{i}.{part}.out", bytes)
            b.op(f"h{i}.{part}", reads=[hidden], writes=[out], duration=took, layer=i)
            saved.append(out)
            hidden = out
    gradient = b.tensor("g", 1, "temporary")
    b.op("loss", "loss", reads=[hidden], writes=[gradient], duration=1)
    for i in reversed(range(layers)):
        for k, (part, took) in enumerate((("mlp", 50), ("attn", 20))):
            made = b.tensor(f"h{i}.{part}.d", 1, "temporary")
            fields = {"phase": "backward", "layer": i, "duration": took}
            b.op(f"h{i}.{part}.bwd", reads=[gradient, saved[2 * i + 1 - k]], writes=[made], **fields)
            gradient = made
    return b.build()


def test_copies_run_beside_the_rest_of_their_own_layer(run) -> None:
    done = run(stack(2, size=60), "swap_attention", min_bytes=2)
    assert done.moves == [
        ("d2h", "h0.attn.out", 10, 70),
        ("d2h", "h1.attn.out", 80, 140),
        # behind the first backward op of its layer; no other op is left to hide it
        ("h2d", "h1.attn.out", 191, 251),
        ("h2d", "h0.attn.out", 321, 381),
    ]
    # the MLP hides 40 of the 60 ns; when it has ended, the device waits for the rest
    forward = ["h0.attn", "h0.mlp", "h1.attn", "h1.mlp", "loss"]
    assert done.ran(*forward) == [(0, 10), (10, 50), (70, 80), (80, 120), (140, 141)]
    backward = ["h1.mlp.bwd", "h1.attn.bwd", "h0.mlp.bwd", "h0.attn.bwd"]
    assert done.ran(*backward) == [(141, 191), (251, 271), (271, 321), (381, 401)]


def test_what_attention_saves_is_offloaded_in_every_layer_and_nothing_else(run) -> None:
    trace = transformer("gpt2", batch=1, sequence=64)
    done = run(trace, "swap_attention", min_bytes=1024)
    assert {name.partition(".")[0] for name in done.out if ".attn." in name} == {f"h{i}" for i in range(12)}
    assert not any(".mlp." in name for name in done.out)
    assert done.out == done.back
    assert not departures(done.result.plan.trace, trace)
    few = run(trace, "swap_attention", min_bytes=1024, layers=3)
    assert {name.partition(".")[0] for name in few.out if ".attn." in name} == {"h0", "h1", "h2"}
    other = run(trace, "swap_attention", min_bytes=1024, modules=("*.mlp",))
    assert any(".mlp." in name for name in other.out)
    assert not any(".attn.core" in name for name in other.out)


def test_small_tensors_stay(run) -> None:
    trace = transformer("gpt2", batch=1, sequence=64)
    every, large = (run(trace, "swap_attention", min_bytes=least).out for least in (1, 64 * 768 * 4))
    size = {t.name: t.bytes for t in trace.tensors}
    assert large.keys() == {name for name in every if size[name] >= 64 * 768 * 4}
    assert 0 < len(large) < len(every)


def test_it_keeps_the_law_where_every_module_is_named(tmp_path) -> None:
    policy = SwapAttention(modules=("*",), min_bytes=1)
    report = check_policy(policy, examples=12, folder=tmp_path, across_processes=False)
    assert not report.broken, report.as_text()


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(stack(2), machine(host=False), "swap_attention")
    with pytest.raises(PolicyError, match=r"matches modules \['\*.experts'\]; ops of layers are called 'h0.attn', "):
        simulate(stack(2), machine(), 'swap_attention(modules=["*.experts"])')
