"""A chunked loss on replicas, in microbatches and among ranks: each has chunks of its own tokens, and its part."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest

from sim import load_profile
from sim.analysis.peak_memory import peak_bytes, peak_memory
from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.engine.replay import replay
from sim.errors import LayoutError, TraceError
from sim.experiment import reference_run
from sim.layout import lay_out
from sim.plan import Plan
from sim.policies import load
from sim.rewrites.chunks import as_base, joined
from sim.rewrites.ranks import all_ranks
from sim.rewrites.values import Departure, departures
from sim.trace import Trace
from sim.trace.io import load as load_trace
from sim.trace.io import save
from sim.trace.op import KINDS
from sim.trace.origin import Microbatch
from tests.rewrites.test_replicas import line, named, op_named, reading, rebuilt
from tests.validation.truth import cases
from workloads import transformer
from workloads.losses import CHUNK
from workloads.stacks import with_stack

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 1024, "vocab_size": 128}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MACHINE = load_profile("a100_40_pcie")
LAYOUTS = [
    {"dp": 2},
    {"micro_batches": 2},
    {"micro_batches": 8},
    {"dp": 2, "micro_batches": 2, "zero": 2},
    {"dp": 4, "micro_batches": 2, "zero": 3},
    {"dp": 2, "gradient_buffer": True},
    {"dp": 2, "barrier": False},
    {"pp": 2, "micro_batches": 4},
    {"pp": 2, "dp": 2, "micro_batches": 2, "zero": 1},
    {"pp": 2, "micro_batches": 2, "schedule": "zb_h1"},
    {"pp": 2, "micro_batches": 4, "schedule": "pipedream"},
]


@cache
def step(model: str = "gpt2", batch: int = 8, tokens: int = 700, **options: object) -> Trace:
    config = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL}[model]
    return transformer(config, batch=batch, sequence=tokens, loss="chunked", **options)


def found(trace: Trace, base: Trace) -> Counter[str]:
    return Counter(each.what for each in departures(trace, base))


def products(trace: Trace) -> list[int]:
    """Rows of each chunk, in order."""
    ops = (op for op in trace.ops if op.name.startswith("head.chunk") and KINDS.index(op.kind) == 0)
    return [trace.tensors[op.writes[0]].shape[0] for op in ops if ".bwd" not in op.name]  # type: ignore[index]


def peak(trace: Trace) -> int:
    return int(np.cumsum(reference_run(trace, MACHINE).change("delta")).max())


@pytest.mark.parametrize("options", [{}, {"precision": "amp_bf16"}, {"stack": "compiled"}], ids=str)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_part_computes_its_part(layout: dict, model: str, options: dict) -> None:
    base = step(model, **options)
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    late = {"delayed"} if layout.get("schedule") == "pipedream" else set()
    every = all_ranks(trace)
    assert (every is trace) == ("dp" not in layout)
    for each in (trace, every) if every is not trace else (trace,):
        assert found(each, base).keys() <= {"repeated"} | late


@pytest.mark.parametrize("layout", [{"micro_batches": 4}, {"tp": 2, "dp": 2, "micro_batches": 2}], ids=str)
@pytest.mark.parametrize("stack", ["compiled", "fused"])
@pytest.mark.parametrize("model", ["gpt2", "mixtral"])
def test_a_microbatch_has_a_whole_gradient_of_the_head_in_fused_kernels(model: str, stack: str, layout: dict) -> None:
    """Of the head's input it has its rows; kernels are fused by the stack, or after the layers have been divided."""
    options = {"attention": "flash", "precision": "amp_bf16"}
    later, early = step(model, **options), step(model, stack=stack, **options)
    for base, kernels in ((later, partial(with_stack, stack=stack)), (early, None))[: 1 if "tp" in layout else 2]:
        trace, _ = lay_out(base, "a100_80_sxm", layout, kernels=kernels)
        size = {t.name: t.bytes for t in trace.tensors}
        assert size["head.dw.mb1"] == 2 * 128 * 32 // layout.get("tp", 1)
        assert size["head.dx.mb1"] == 2 * 8 * 700 * 32 // 4
        assert found(trace, base).keys() <= {"repeated"}


RANKS = [
    {"tp": 2},
    {"tp": 4, "micro_batches": 2, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "pp": 2, "micro_batches": 2, "zero": 1, "schedule": "zb_h1"},
    {"cp": 2},
    {"cp": 4, "dp": 2, "zero": 3},
    {"cp": 2, "pp": 2, "micro_batches": 4, "ring_attention": True},
    {"cp": 2, "tp": 2, "dp": 2, "micro_batches": 2, "sequence_parallel": True},
]


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}, {"frozen": "embed,h0,h1,norm"}], ids=str)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", RANKS, ids=str)
def test_so_it_does_where_ranks_divide_tokens_or_the_vocabulary(layout: dict, model: str, options: dict) -> None:
    if model == "gpt2" and "frozen" in options:
        options = {"frozen": "h0,h1,ln_f"}
    base = step(model, attention="flash", precision="mixed_bf16", **options)
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    own = 8 * 700 // (layout.get("dp", 1) * layout.get("cp", 1))
    assert (sum(products(trace)), max(products(trace)) <= CHUNK) == (own, True)
    assert found(trace, base).keys() <= {"repeated"}
    assert found(all_ranks(trace), base).keys() <= {"repeated"}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_tell_each_other_three_numbers_of_each_row_and_sum_the_gradient_of_the_heads_input(
    sequence_parallel: bool, parts: int
) -> None:
    """Per row 12 bytes, there and back; of s b h 16-bit elements an all-reduce, or a reduce-scatter and no more."""
    t, tokens, width = 4, 8 * 700, 32
    base = step("llama", attention="flash", precision="mixed_bf16")
    layout = {"tp": t, "sequence_parallel": sequence_parallel, "micro_batches": parts}
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    sent = Counter()
    for op in trace.ops:
        if op.kind == "collective":
            kind = (
                "rows" if ".rows.all_reduce" in op.name else "norm.out.grad" if "norm.out.grad" in op.name else "other"
            )
            sent[kind] += op.bytes or 0
    passes = 1 if sequence_parallel else 2
    assert sent["rows"] == 2 * (t - 1) * tokens * 12 // t
    assert sent["norm.out.grad"] == passes * (t - 1) * tokens * width * 2 // t


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2, "micro_batches": 2}], ids=str)
def test_a_rank_without_its_terms_is_found(layout: dict) -> None:
    """A chunk takes the slope of the one before, or adds to what was there before that one: planted, and found."""
    base = step("llama", attention="flash", precision="mixed_bf16")
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    first, second, *_ = (op for op in trace.ops if op.name.startswith("head.chunk.bwd"))
    assert second.reads[3:] == first.writes
    assert "wrong" in found(reading(trace, second.id, second.reads[0], first.reads[0]), base)
    with pytest.raises(TraceError, match=r"'head\.dw.*': read after 'head\.chunk\.bwd.*' overwrote it"):
        reading(trace, second.id, second.reads[-1], first.reads[-1])


BERT = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(("config", "options"), [
    (BERT, {}), (GPT2, {"lora_rank": 4}), (LLAMA, {"frozen": ["head"]}),
    (LLAMA, {"frozen": ["embed", "h0", "h1", "norm"]}),
], ids=str)  # fmt: skip
def test_gradients_that_nobody_wants_are_of_no_part(config: dict, options: dict) -> None:
    """Of a head with a bias, of adapters alone, below a frozen head, and of a head above frozen layers."""
    base = transformer(config, batch=4, sequence=700, loss="chunked", **options)
    for layout in ({"dp": 2}, {"micro_batches": 2}):
        trace, _ = lay_out(base, "a100_80_sxm", layout)
        assert found(trace, base).keys() <= {"repeated"}
        assert products(trace) == [1024, 376] * layout.get("micro_batches", 1)


@pytest.mark.parametrize("layout", [
    {"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"tp": 2, "dp": 2, "micro_batches": 2}, {"tp": 2, "cp": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config["model_type"])
def test_a_vocabulary_need_not_divide_among_the_ranks(config: dict, layout: dict) -> None:
    """As GPT-2's 50,257: a rank's part of it is rounded, and has no shape."""
    base = transformer({**config, "vocab_size": 131}, batch=4, sequence=700, loss="chunked", precision="bf16")
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    assert found(trace, base).keys() <= {"repeated"}
    assert found(all_ranks(trace), base).keys() <= {"repeated"}


@pytest.mark.parametrize("layout", [
    {"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "micro_batches": 2}, {"dp": 4, "ep": 2, "zero": 3},
])  # fmt: skip
@pytest.mark.parametrize("stack", ["eager", "compiled"])
def test_so_it_does_where_replicas_divide_experts(layout: dict, stack: str) -> None:
    base = step("mixtral")
    trace, _ = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack=stack))
    own = 8 // (layout["dp"] * layout.get("micro_batches", 1)) * 700
    assert max(products(trace)) <= CHUNK < sum(products(trace)) == own * layout.get("micro_batches", 1)
    assert found(trace, base).keys() <= {"repeated"}
    assert found(all_ranks(trace), base).keys() <= {"repeated"}


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "mixed_bf16"])
@pytest.mark.parametrize(("batch", "tokens", "parts"), [
    (8, 700, 2), (8, 700, 4), (8, 1024, 4), (4, 900, 2), (14, 700, 7),
])  # fmt: skip
def test_they_take_what_microbatches_built_one_by_one_take(model, precision, batch, tokens, parts) -> None:
    mine, _ = lay_out(step(model, batch, tokens, precision=precision), MACHINE, {"micro_batches": parts})
    other = step(model, batch, tokens, precision=precision, micro_batches=parts)
    assert peak(mine) == peak(other)
    assert len(mine.ops) == len(other.ops)
    assert reference_run(mine, MACHINE).end == pytest.approx(reference_run(other, MACHINE).end, rel=1e-4)
    left = batch // parts * tokens
    assert products(mine) == [min(CHUNK, left - at) for at in range(0, left, CHUNK)] * parts
    head = [sum(op.flops for op in t.ops if op.name.startswith(("head.", "mb")) and "chunk" in op.name)
            for t in (mine, other)]  # fmt: skip
    assert head[0] == head[1]


def test_no_part_has_more_logits_than_a_chunk() -> None:
    """At most CHUNK rows of logits at once: on 1,400 tokens of a replica, as on 5,600 of all."""
    for layout in ({"dp": 4}, {"micro_batches": 4}):
        trace, _ = lay_out(step(), "a100_80_sxm", layout)
        sizes = {t.bytes for t in trace.tensors if t.name.startswith("head.logits")}
        assert max(sizes) == CHUNK * 128 * 4


def test_replicas_exchange_gradients_alone() -> None:
    base, d = step("llama"), 4
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": d})
    sent = sum(op.bytes or 0 for op in trace.ops if op.ring is not None)
    rings = sum(op.ring is not None for op in trace.ops)
    assert 0 <= sent - 2 * (d - 1) * 4 * base.meta["parameters"] // d <= rings  # each rounds up


def test_every_replica_simulated_is_as_the_one_that_stands_for_all() -> None:
    trace, _ = lay_out(step(), "a100_80_sxm", {"dp": 4, "micro_batches": 2})
    one, all_of_them = replay(Plan(trace), line(1, 4)), replay(Plan(all_ranks(trace)), line(4))
    held = peak_bytes(all_of_them)
    assert {held[f"hbm@{i}"] for i in range(4)} == {peak_bytes(one)["hbm@0"]}


def test_joined_chunks_are_those_that_they_join() -> None:
    base = step()
    chunks = joined(base)
    assert chunks is not None
    assert not departures(chunks.trace, base)
    assert products(chunks.trace) == [8 * 700]
    assert len(chunks.trace.ops) == len(base.ops) - 3 * (len(products(base)) - 1)
    assert joined(transformer(GPT2, batch=2, sequence=16, loss="fused")) is None


def test_a_divided_trace_keeps_what_it_stands_for_in_a_file(tmp_path) -> None:
    base = step()
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 2, "micro_batches": 2})
    save(trace, tmp_path / "t.jsonl")
    assert load_trace(tmp_path / "t.jsonl").origin == trace.origin
    assert found(load_trace(tmp_path / "t.jsonl"), base).keys() <= {"repeated"}


def test_what_is_no_chunk_as_they_are_made_is_named() -> None:
    other = as_base(step())
    name = tuple(n.replace("head.chunk.loss.2", "head.chunk.other") for n in other.op_columns.name)
    with pytest.raises(LayoutError, match=r"dp: no chunks of loss 'chunked' are known, .* nearest: 1"):
        lay_out(rebuilt(other, name=name), "a100_80_sxm", {"dp": 2})


# ---- faults that the law finds -----------------------------------------------------------------------


def divided() -> tuple[Trace, Trace]:
    base = step()
    return lay_out(base, "a100_80_sxm", {"micro_batches": 2})[0], base


def wrong(trace: Trace, base: Trace) -> list[Departure]:
    return [each for each in departures(trace, base) if each.what != "repeated"]


def claiming(trace: Trace, name: str, change) -> Trace:
    assert trace.origin is not None
    claims, t = list(trace.origin.tensors), named(trace, name)
    claims[t] = change(claims[t])
    new = rebuilt(trace)
    object.__setattr__(new, "origin", replace(trace.origin, tensors=tuple(claims)))
    return new


def test_a_chunk_that_is_left_out_of_the_sum_is_found() -> None:
    """The second chunk of a microbatch says that it adds to what the first has left, and that had no rows."""
    trace, base = divided()
    first = named(trace, "head.dw.sum.6.mb0.1")
    assert trace.tensors[first].replaces is not None
    short = claiming(trace, "head.dw.sum.6.mb0.1", lambda x: Microbatch(x.of, 0, 500, x.count))
    assert {each.op for each in wrong(short, base)} >= {"head.chunk.bwd.mb0", "head.chunk.bwd.2.mb0"}


def test_a_chunk_that_reads_another_ones_logits_is_found() -> None:
    trace, base = divided()
    names = [t.name for t in trace.tensors if t.name.startswith("head.dlogits") and ".mb0" in t.name]
    op = op_named(trace, "head.chunk.bwd.2.mb0")
    of_first, of_second = (named(trace, name) for name in names[:2])
    assert of_second in trace.ops[op].reads
    mixed = reading(trace, op, of_second, of_first)
    assert "head.chunk.bwd.2.mb0" in {each.op for each in wrong(mixed, base)}


def test_a_chunk_of_the_other_microbatchs_tokens_is_found() -> None:
    trace, base = divided()
    op = op_named(trace, "head.chunk.mb1")
    x = trace.ops[op].reads[0]
    other = named(trace, trace.tensors[x].name.replace("mb1", "mb0"))
    mixed = reading(trace, op, x, other)
    assert "head.chunk.mb1" in {each.op for each in wrong(mixed, base)}


def test_a_gradient_of_the_head_counted_twice_is_found() -> None:
    """The second microbatch scales the sum that the first has left."""
    trace, base = divided()
    scale = [op for op in trace.ops if op.name.startswith("head.bwd.scale.2")]
    grown = [trace.tensors[op.reads[0]].name for op in scale]
    assert all(a != b for a, b in pairwise(grown))
    claimed = claiming(trace, grown[1], lambda x: Microbatch(x.of, 0, 1, x.count))
    assert wrong(claimed, base)


@pytest.mark.parametrize("policy", ["full_recompute", "swap_all", "dtr", "zero_offload"])
@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[7]], ids=str)
def test_policies_run_inside(policy: str, layout: dict) -> None:
    base = step(precision="amp_bf16")
    ran = run_policy(load(policy), *lay_out(base, "a100_80_sxm", layout))
    assert ran.done, ran.error
    assert found(ran.plan.trace, base).keys() <= {"repeated"}
    assert not [text for law in ("capacity", "ops", "order", "tiling", "outcome") if (text := breaks(CHECKS[law], ran))]


@pytest.mark.parametrize(("config", "precision", "parts", "peaks"), [
    (cases.LLAMA, "bf16", 2, (447_785_472, 418_685_440, 248_508_416)),
    (cases.LLAMA, "bf16", 4, (447_875_584, 418_775_552, 248_598_528)),
    (cases.LLAMA, "fp32", 4, (1_068_763_136, 997_485_568, 497_015_808)),
    (cases.GPT2, "bf16", 4, (483_324_928, 458_104_832, 202_404_864)),
    (cases.GPT2, "fp32", 2, (955_902_464, 906_925_568, 404_539_392)),
])  # fmt: skip
def test_peaks_are_those_of_pytorchs_loop_over_microbatches(config, precision, parts, peaks) -> None:
    """Four samples of 700 tokens in each: what `run` of `tests/validation/truth/make_more.py` finds for the same case,
    with PyTorch 2.13, a model of Hugging Face and the loss in plain PyTorch."""
    given = {"precision": precision, "attention": "sdpa", "optimizer": "adamw_foreach", "loss": "chunked"}
    base = transformer(config, batch=4 * parts, sequence=700, **given)
    trace, machine = lay_out(base, "a100_80_sxm", {"micro_batches": parts})
    found = peak_memory(reference_run(trace, machine)).by_phase
    for phase, theirs in zip(("forward", "backward", "update"), peaks, strict=True):
        assert found[phase] == pytest.approx(theirs, rel=4e-5), phase
