"""What each stage computes itself: rotary tables, masks, positions; and what it sends then, in closed form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sim.layout import lay_out
from sim.rewrites.pipeline import computed_anywhere, pipeline
from sim.rewrites.ranks import all_ranks
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.rewrites.test_schedules import FAMILIES
from workloads import transformer

BATCH, TOKENS, WIDTH, HEAD, BYTES = 8, 16, 32, 8, 2
LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2},
    {"pp": 4, "micro_batches": 4},
    {"pp": 2, "micro_batches": 4, "schedule": "zb_v"},
    {"pp": 2, "micro_batches": 4, "schedule": "interleaved"},
    {"pp": 2, "micro_batches": 2, "dp": 2, "zero": 3},
    {"pp": 2, "tp": 2, "sequence_parallel": True},
]


def step(family: str = "llama", attention: str = "flash", precision: str = "mixed_bf16") -> Trace:
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    config = {**FAMILIES[family], "model_type": family, **layers}
    return transformer(config, batch=BATCH, sequence=TOKENS, precision=precision, attention=attention, loss="fused")


def sent(trace: Trace) -> Counter[tuple[int, int]]:
    """Bytes from each stage to each other one."""
    here = {op.group: op.device for op in trace.ops if op.kind == "send"}
    found: Counter[tuple[int, int]] = Counter()
    for op in trace.ops:
        if op.kind == "recv":
            found[here[op.group], op.device] += sum(trace.tensors[t].bytes for t in op.writes)
    return found


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_stages_send_activations_to_the_next_and_gradients_back_alone(attention: str, stages: int, n: int) -> None:
    """The first sent two tables per microbatch to each of the others, and where attention is composed a mask."""
    trace = pipeline(step(attention=attention), [i * stages // 4 for i in range(4)], n)
    size = BATCH * TOKENS * WIDTH * BYTES
    pairs = {pair for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))}
    assert sent(trace) == dict.fromkeys(pairs, size)


@pytest.mark.parametrize("stages", [2, 4])
def test_each_stage_computes_tables_and_mask_once_per_microbatch(stages: int) -> None:
    """As PyTorch's module of a stage does in each pass; the tables are 2 s d numbers, the mask b s s."""
    n = 4
    trace = pipeline(step(attention="eager"), [i * stages // 4 for i in range(4)], n)
    for name, size in (("rotary", 2 * TOKENS * HEAD * BYTES), ("mask", BATCH // n * TOKENS * TOKENS * BYTES)):
        ops = [op for op in trace.ops if op.name.split(".")[0] == name]
        assert Counter(op.device for op in ops) == dict.fromkeys(range(stages), n)
        assert {sum(trace.tensors[t].bytes for t in op.writes) for op in ops} == {size}
        assert all(
            trace.ops[reader].device == op.device for op in ops for t in op.writes for reader in trace.readers(t)
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("family", "attention"), [("llama", "flash"), ("llama", "eager"), ("gpt2", "eager")])
def test_values_are_those_of_one_device(family: str, attention: str, layout: dict[str, Any]) -> None:
    base = step(family, attention)
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


def imported(constant: str = "weight", over: bool = False) -> Trace:
    """Two layers that read what is made of positions and a constant, as a captured module's rotary embedding is."""
    b = TraceBuilder({"batch": 1})
    x, ids = b.tensor("x", 64, "input"), b.tensor("ids", 16, "input")
    frequencies = b.tensor("frequencies", 8, constant)
    weights = [b.tensor(f"w{i}", 32, "weight", layer=i) for i in range(2)]
    angles, table = b.tensor("angles", 24), b.tensor("table", 40)
    b.op("multiply", "elementwise", reads=[ids, frequencies], writes=[angles])
    b.op("cos", "elementwise", reads=[angles], writes=[table])
    value = x
    for i, weight in enumerate(weights):
        out = b.tensor(f"y{i}", 64, layer=i)
        b.op(f"layer{i}", "matmul", reads=[value, weight, table], writes=[out], layer=i, flops=1)
        value = out
    if over:
        new = b.tensor("frequencies.new", 8, "weight", replaces=frequencies)
        b.op("renew", "optimizer", reads=[frequencies], writes=[new], phase="update")
    return b.build()


def test_a_constant_is_present_on_each_stage() -> None:
    base = imported()
    assert {base.op_columns.name[op] for op in computed_anywhere(base)} == {"multiply", "cos"}
    trace = pipeline(base, [0, 1], 1)
    assert sent(trace) == {(0, 1): 64}
    assert {op.name: op.device for op in trace.ops if op.kind == "elementwise"} == {
        "multiply": 0, "cos": 0, "multiply.stage1": 1, "cos.stage1": 1
    }  # fmt: skip
    assert {each.what for each in departures(trace, base)} <= {"repeated"}


@pytest.mark.parametrize("made", [imported(over=True), imported("activation")], ids=["overwritten", "neither"])
def test_what_depends_on_anything_else_is_sent(made: Trace) -> None:
    assert not computed_anywhere(made)
    assert sent(pipeline(made, [0, 1], 1)) == {(0, 1): 64 + 40}
