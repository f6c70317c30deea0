"""Parts of layers that ranks of tensor parallelism divide by tokens: closed forms, all ranks, faults the law finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import simulate
from sim.errors import LayoutError
from sim.layout import Layout, lay_out, to_layout
from sim.layout_search import divisions, search_layouts
from sim.rewrites.layer_parts import LayerPart, layer_parts
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers
from sim.rewrites.values import departures
from sim.trace import Trace
from sim.trace.phases import saved_tensors
from tests.rewrites.test_replicas import line, named, op_named, peaks, reading
from tests.rewrites.test_schedules import FAMILIES
from tests.rewrites.test_tensor_parallel import GPT, among, traffic
from workloads import transformer

SETS = [
    *("mlp", "attention", "vocabulary", "mlp, vocabulary", "mlp, attention", "attention, vocabulary"),
    *("attention 0, mlp 1", "attention 0, vocabulary"),
]
B, S, H = 4, 16, 32


@cache
def step(family: str = "gpt2", precision: str = "mixed_bf16") -> Trace:
    config = GPT if family == "gpt2" else {**FAMILIES[family], "model_type": family}
    attention = "sdpa" if precision == "fp32" else "flash"
    return transformer(config, batch=B, sequence=S, precision=precision, attention=attention, loss="fused")


def divided(said: str, ranks: int = 2, family: str = "gpt2", precision: str = "mixed_bf16") -> Trace:
    return divide_layers(step(family, precision), ranks, True, by_tokens=layer_parts(said, "by_tokens"))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(SETS),
    st.sampled_from(("bf16", "amp_bf16", "mixed_bf16", "megatron_bf16")),
    st.sampled_from(("torch", "fused", "vocab_parallel")),
    st.fixed_dictionaries(
        {
            "dp": st.sampled_from((1, 2)),
            "pp": st.sampled_from((1, 2)),
            "zero": st.integers(0, 3),
            "micro_batches": st.sampled_from((1, 2)),
            "async_sums": st.booleans(),
        }
    ),
)
def test_any_parts_in_any_layout_compute_the_same(
    family: str, said: str, precision: str, loss: str, layout: dict
) -> None:
    config = {**FAMILIES[family], "model_type": family}
    base = transformer(config, batch=4, sequence=16, precision=precision, loss=loss, attention="flash")
    trace, _ = lay_out(base, "a100_80_sxm", {"tp": 2, "sequence_parallel": True, "by_tokens": said, **layout})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize("said", SETS)
@pytest.mark.parametrize("more", [{}, {"dp": 2, "zero": 1, "micro_batches": 2}], ids=str)
def test_one_rank_stands_for_all(said: str, more: dict) -> None:
    layout = {"tp": 2, "sequence_parallel": True, "by_tokens": said, **more}
    trace, _ = lay_out(step(), "a100_80_sxm", layout)
    one = peaks(trace, among(1, more.get("dp", 1), 2))
    time, held = peaks(all_ranks(trace), line(2 * more.get("dp", 1)))
    assert one[0] == time
    assert {*one[1]} == {*held}


# ---- closed forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("said", SETS)
def test_products_and_attention_are_divided_among_the_ranks(family: str, said: str) -> None:
    work = {op.name: op.flops for op in step(family).ops}
    for op in divided(said, family=family).ops:
        if op.kind in ("matmul", "attention") and op.flops:
            assert 2 * op.flops == work[op.name], op.name


@pytest.mark.parametrize("t", [2, 4])
def test_an_mlp_by_tokens_sends_the_gradients_of_its_weights_and_nothing_else(t: int) -> None:
    """Attention keeps its two exchanges of forward and three of backward; 8 h^2 + 5 h gradients, twice (t - 1) / t."""
    trace, one = divided("mlp", t), 2 * B * S * H * (t - 1) // t
    assert traffic(trace, 0) == [("forward", 1, one)] * 2 + [("backward", 1, one)] * 3
    sums = [op for op in trace.ops if op.ring is not None and op.phase == "update" and op.layer == 0]
    gradients = 8 * H * H + 5 * H + H  # of the MLP; of attention's bias after its rows; 4 H of two norms
    assert sum(op.bytes or 0 for op in sums) == 2 * 2 * (gradients + 4 * H) * (t - 1) // t


@pytest.mark.parametrize("t", [2, 4])
def test_attention_by_tokens_gathers_keys_and_values(t: int) -> None:
    """In GPT-2 with the queries, 3 s b h, in forward and in backward, where terms of their gradients are summed."""
    trace, one = divided("attention", t), 2 * B * S * H * (t - 1) // t
    of_mlp = [("forward", one)] * 2 + [("backward", one)] * 3
    of_attention = [("forward", 3 * one), ("backward", 3 * one), ("backward", one), ("backward", one)]
    assert sorted((phase, size) for phase, _, size in traffic(trace, 0)) == sorted(of_mlp + of_attention)


@pytest.mark.parametrize("said", SETS)
def test_a_rank_saves_its_tokens_of_what_every_layer_begins_with(said: str) -> None:
    """s b h / t (34) of each layer, whichever parts are divided by tokens, but for keys and values of all tokens."""
    base = transformer({**GPT, "n_layer": 2}, batch=B, sequence=S, precision="bf16", attention="flash", dropout=0)
    plain, own = (divide_layers(base, 2, True, by_tokens=layer_parts(parts, "by_tokens")) for parts in ("", said))

    def saved(trace: Trace) -> int:
        kept = (trace.tensors[t] for t in saved_tensors(trace).tolist())
        return sum(t.bytes for t in kept if t.layer == 0 and not t.name.endswith((".mean", ".rstd")))

    assert saved(own) == saved(plain)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize(("said", "numbers"), [("mlp", 8 * H * H + 4 * H), ("attention", 4 * H * H + 3 * H)])
def test_a_rank_keeps_all_weights_of_what_is_divided_by_tokens(t: int, said: str, numbers: int) -> None:
    """Per layer the weights and the bias of columns: 1 - 1 / t of them more than where columns are divided."""

    def held(trace: Trace) -> int:
        first = (each for each in trace.tensors if trace.producer[each.id] < 0 and each.role == "weight")
        return sum(each.bytes for each in first if each.layer == 0)

    more = held(divided(said, t, precision="fp32")) - held(divide_layers(step(precision="fp32"), t, True))
    assert more == 4 * numbers * (t - 1) // t


def test_with_all_but_the_vocabulary_by_tokens_a_rank_does_what_one_of_context_parallelism_does() -> None:
    by_tokens, _ = lay_out(step("llama"), "a100_80_sxm", {"tp": 2, "sequence_parallel": True,
                                                          "by_tokens": "mlp, attention"})  # fmt: skip
    context, _ = lay_out(step("llama"), "a100_80_sxm", {"cp": 2})

    def of_layers(trace: Trace) -> dict[str, tuple[int, int]]:
        sizes = trace.tensor_columns.bytes
        return {
            op.name.removesuffix(".mb0"): (op.flops, sum(int(sizes[t]) for t in op.writes))
            for op in trace.ops
            if op.kind in ("matmul", "attention", "norm") and op.layer == 1 and op.phase == "forward"
        }

    assert of_layers(by_tokens) == of_layers(context)
    assert of_layers(context)


# ---- faults that the law finds -----------------------------------------------------------------------


def whats(trace: Trace) -> set[str]:
    return {each.what for each in departures(trace, step())}


def test_an_mlp_of_some_tokens_needs_its_own() -> None:
    trace = divided("mlp")
    plain = divide_layers(step(), 2, True)
    whole = named(plain, "h0.ln2.out.for.h0.mlp.fc")
    assert plain.tensors[whole].bytes == 2 * trace.tensors[named(trace, "h0.ln2.out")].bytes
    mine, other = named(trace, "h1.ln2.out"), named(trace, "h0.ln2.out")
    assert "wrong" in whats(reading(trace, op_named(trace, "h1.mlp.fc"), mine, other))


def test_an_update_needs_the_sum_over_the_ranks() -> None:
    trace = divided("mlp")
    whole, term = named(trace, "h0.mlp.fc.weight.grad.summed"), named(trace, "h0.mlp.fc.weight.grad")
    assert trace.origin is not None
    tensors = list(trace.origin.tensors)
    tensors[whole] = tensors[term]  # a sum of what only this rank has
    origin = replace(trace.origin, tensors=tuple(tensors))
    columns = trace.tensor_columns, trace.op_columns
    assert "wrong" in whats(Trace(*columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=origin))


# ---- how it is said ----------------------------------------------------------------------------------


def test_parts_are_said_in_one_way() -> None:
    one = Layout(tp=2, sequence_parallel=True, by_tokens="mlp, attention 0-3")  # type: ignore[arg-type]
    assert one == Layout(tp=2, sequence_parallel=True, by_tokens=["attention 0-3", "mlp", "mlp"])  # type: ignore[arg-type]
    assert to_layout(one.said()) == one
    assert str(one) == "tp 2, sequence_parallel True, by_tokens attention 0-3, mlp"


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"sequence_parallel": False, "by_tokens": "mlp"}, "only with sequence_parallel; nearest: ''"),
        ({"by_tokens": "mpl"}, r"'mpl' is not one of attention, mlp, vocabulary \(did you mean 'mlp'\?\)"),
        ({"by_tokens": "mlp 7"}, "no 'mlp 7' in a model of 2 layers; nearest: 'mlp 1'"),
        ({"by_tokens": "mlp 0-7"}, "no 'mlp 0-7' in a model of 2 layers; nearest: 'mlp 0-1'"),
        ({"by_tokens": "mlp \u0661"}, "is not one of attention, mlp, vocabulary"),
        ({"by_tokens": [["mlp"]]}, "needs parts of layers"),
        ({"by_tokens": LayerPart("heads")}, "'heads' is not one of attention, mlp, vocabulary"),
        ({"tp": 3, "by_tokens": "attention, mlp"}, "tp: 3 does not divide the sequence of 16; nearest: [24]"),
        ({"by_tokens": "mlp 3-1"}, "3-1 is not a range of layers; nearest: 'mlp 1-3'"),
        ({"by_tokens": "vocabulary 2"}, "the vocabulary is of no layer"),
        ({"by_tokens": "vocabulary, mlp, attention"}, "nothing is left .* nearest: cp 2 without tp"),
        ({"cp": 2, "by_tokens": "attention"}, "cp divide attention by tokens already; nearest: cp 1, or 'mlp'"),
        ({"by_tokens": 3}, "needs parts of layers .* has 3"),
        ({"by_tokens": "mlp,"}, "'' is not one of attention, mlp, vocabulary"),
    ],
)
def test_parts_that_there_are_not_name_the_nearest(layout: dict, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        lay_out(step(), "a100_80_sxm", {"tp": 2, "sequence_parallel": True, **layout})


def test_scores_of_all_tokens_are_not_divided_by_tokens() -> None:
    base = transformer(GPT, batch=1, sequence=16, attention="eager")
    with pytest.raises(LayoutError, match="try attention 'flash'"):
        lay_out(base, "a100_80_sxm", {"tp": 2, "sequence_parallel": True, "by_tokens": "attention"})
    assert all("attention" not in map(str, each) for each in divisions(base))


def test_chunks_of_a_loss_are_of_all_tokens() -> None:
    base = transformer(GPT, batch=4, sequence=16, precision="bf16", attention="flash", loss="chunked")
    with pytest.raises(LayoutError, match="the chunks of loss 'chunked' are of all tokens; nearest: 'mlp'"):
        lay_out(base, "a100_80_sxm", {"tp": 2, "sequence_parallel": True, "by_tokens": "vocabulary"})


# ---- search ------------------------------------------------------------------------------------------


def test_a_search_by_part_finds_what_trying_all_sets_of_parts_finds() -> None:
    """Scores in several kernels, which no rank divides by tokens, few weights, and a slow link."""
    base = transformer(
        {**GPT, "n_positions": 512}, batch=1, sequence=512, precision="bf16", attention="eager", dropout=0
    )
    slow = {f"links.nvlink.{key}": "1 GB/s" for key in ("rate", "egress")}
    how: dict = {"most": 20, "schedules": ["1f1b"], "overrides": slow}
    plain = search_layouts(base, "a100_80_sxm", 2, ["keep_all"], **how)
    found = search_layouts(base, "a100_80_sxm", 2, ["keep_all"], by_part=True, **how)
    sets = divisions(base)
    assert [", ".join(map(str, each)) for each in sets] == ["mlp", "vocabulary", "mlp, vocabulary"]
    times = {}
    for said in ((), *sets):
        layout = Layout(tp=2, sequence_parallel=True, by_tokens=said)
        trace, machine = lay_out(base, "a100_80_sxm", layout, overrides=slow)
        times[said] = simulate(trace, machine).log.end
    rows = {row.layout.by_tokens: row.makespan_ns for row in found.rows if row.layout.tp == 2}
    assert rows == times
    assert {row.layout.by_tokens for row in plain.rows} == {()}
    assert plain.best is not None
    assert found.best is not None
    assert found.best.makespan_ns == min(min(times.values()), plain.best.makespan_ns)
