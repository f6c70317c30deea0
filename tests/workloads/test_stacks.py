"""Other software stacks: the same values, fewer kernels, less traffic, and what they save for backward."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings

from sim.errors import WorkloadError
from sim.experiment import simulate
from sim.layout import lay_out, to_layout
from sim.rewrites.fuse import fuse
from sim.rewrites.stack import fuse_streams, recomputed_inside, stream_groups
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from sim.trace.origin import Fused, leaves
from tests.strategies import traces
from workloads import cnn, transformer, with_stack
from workloads.stacks import STACKS, not_saved, stacks

OTHERS = [stack for stack in STACKS if stack != "eager"]
GPT = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 512}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
CASES = [
    (GPT, {"precision": "amp_bf16"}),
    (GPT, {"precision": "fp32", "attention": "eager", "micro_batches": 2}),
    (LLAMA, {"precision": "bf16", "optimizer": "adamw_fused"}),
    (LLAMA, {"precision": "mixed_fp16", "loss": "chunked"}),
]


def saved(trace: Trace) -> dict[str, int]:
    """Bytes that forward leaves for backward, by tensor."""
    return {t.name: t.bytes for t in trace.tensors if t.saved_for}


@pytest.mark.parametrize("stack", OTHERS)
@pytest.mark.parametrize(("config", "axes"), CASES)
def test_the_same_values_in_fewer_kernels(config, axes, stack):
    eager = transformer(config, batch=2, sequence=32, **axes)
    other = with_stack(eager, stack)
    found = departures(other, eager)
    assert {departure.what for departure in found} <= {"repeated"}  # what backward recomputes in its kernels
    assert len(other.ops) < 0.75 * len(eager.ops)
    assert sum(other.touched) < sum(eager.touched)
    least, most = sum(saved(other).values()), sum(saved(eager).values())
    # a GPT's layer that is compiled alone saves what it saves eagerly: its wide results have to be there for products
    assert least < most or (stack == "compiled_layers" and least == most)
    assert other.meta["stack"] == stack
    products = [sum(op.flops for op in t.ops if op.kind in ("matmul", "attention")) for t in (eager, other)]
    assert products[0] == products[1]


@pytest.mark.parametrize("stack", OTHERS)
def test_what_is_said_to_be_saved_is_what_backward_reads(stack):
    for config, axes in CASES[::2]:
        trace = with_stack(transformer(config, batch=2, sequence=32, **axes), stack)
        made = {t: op.phase for op in trace.ops for t in op.writes}
        read = {t for op in trace.ops if op.phase == "backward" for t in op.reads if made.get(t) == "forward"}
        marked = {t.id for t in trace.tensors if t.saved_for and t.id in made}
        assert marked <= read


def test_swiglu_and_gelu_are_one_kernel_each_way_and_rms_norm_saves_its_input():
    llama = transformer(LLAMA, batch=2, sequence=32, precision="bf16", stack="fused")
    names = {op.name for op in llama.ops}
    assert "h0.mlp.mul" in names
    assert "h0.mlp.act" not in names
    kept = saved(llama)
    assert not [name for name in kept if "norm2.up" in name or "norm2.down" in name or "mlp.act.out" in name]
    assert {"h0.mlp.gate.out", "h0.mlp.up.out", "h0.attn.add.out", "h0.norm2.rstd.out"} <= set(kept)
    gpt = transformer(GPT, batch=2, sequence=32, precision="mixed_bf16", stack="fused")
    act = [op for op in gpt.ops if op.name.startswith("h0.mlp.act")]
    assert len(act) == 1
    assert act[0].bytes == 2 * 2 * 32 * 256 * 2  # reads and writes 16-bit elements once
    (back,) = (op for op in gpt.ops if {t for t in op.writes if gpt.tensors[t].name == "h0.mlp.fc.bias.grad"})
    assert {gpt.tensors[t].name for t in back.reads} >= {"h0.mlp.fc.out"}  # its sum is of the kernel that makes it


def test_fused_update_is_one_kernel_for_each_layer_that_touches_each_operand_once():
    trace = transformer(GPT, batch=2, sequence=32, precision="fp32", stack="fused")
    updates = [op for op in trace.ops if op.phase == "update"]
    assert len(updates) == 3
    assert sum(int(trace.touched[op.id]) for op in updates) == 28 * trace.meta["parameters"]
    assert not [t for t in trace.tensors if t.name.endswith((".denominator", ".root"))]


def test_a_kernel_does_not_sum_columns_while_it_reduces_rows():
    """By hand: x -> normalised rows -> y; the norm and a sum over rows are two kernels."""
    b = TraceBuilder()
    x, g = b.tensor("x", 64, "input", shape=(4, 8), dtype="bf16"), b.tensor("g", 64, shape=(4, 8), dtype="bf16")
    d, s, e = (
        b.tensor(n, n_, shape=h, dtype="bf16") for n, n_, h in (("d", 64, (4, 8)), ("s", 16, (8,)), ("e", 64, (4, 8)))
    )
    b.op("make", "elementwise", reads=[x], writes=[g])
    b.op("norm", "norm", reads=[g], writes=[d])
    b.op("sum", "reduce", reads=[d], writes=[s])
    b.op("scale", "elementwise", reads=[d], writes=[e])
    trace = b.build(outputs=[s, e], carry=())
    assert stream_groups(trace) == [[0, 1, 3], [2]]
    plain = fuse(trace, [[0, 1, 3]], streams=True)
    assert [op.name for op in plain.ops] == ["scale", "sum"]
    assert not departures(plain, trace)


def test_what_a_later_kernel_recomputes_is_in_its_reads_and_in_no_memory():
    b = TraceBuilder()
    x = b.tensor("x", 8, "input")
    y, z, w, g, d = (b.tensor(n, 8) for n in "yzwgd")
    b.op("y", "elementwise", reads=[x], writes=[y], flops=1)
    b.op("z", "elementwise", reads=[y], writes=[z], flops=1)
    b.op("product", "matmul", reads=[z], writes=[w])
    b.op("g", "matmul", reads=[w], writes=[g], phase="backward")
    b.op("d", "elementwise", reads=[g, y], writes=[d], phase="backward", flops=1)
    trace = b.build(outputs=[d], carry=())
    groups = stream_groups(trace)
    assert recomputed_inside(trace, groups) == {0}  # y is a copy of x's size, which is there anyway
    new = fuse(trace, groups, recomputed={0}, streams=True)
    last = new.ops[-1]
    assert [new.tensors[t].name for t in last.reads] == ["x", "g"]
    assert last.flops == 2
    assert "y" not in {t.name for t in new.tensors}
    assert [d.what for d in departures(new, trace)] == ["repeated"]
    assert [leaf.id for leaf in leaves(new.origin.ops[-1])] == [0, 4]
    assert isinstance(new.origin.ops[-1], Fused)


def bf16(b: TraceBuilder, name: str, *shape: int, role: str = "activation") -> int:
    return b.tensor(name, 2 * math.prod(shape), role, shape=shape, dtype="bf16")


def test_a_reduction_of_rows_keeps_sums_over_rows_out_of_its_kernel():
    """By hand: y, the largest of each of 4 rows, and the sum of all rows, which is another loop."""
    b = TraceBuilder()
    x, y, most, total = bf16(b, "x", 4, 8, role="input"), bf16(b, "y", 4, 8), bf16(b, "most", 4), bf16(b, "total", 8)
    b.op("y", "elementwise", reads=[x], writes=[y])
    b.op("most", "reduce", reads=[y], writes=[most])
    b.op("total", "reduce", reads=[y], writes=[total])
    assert stream_groups(b.build(outputs=[y, most, total])) == [[0, 1], [2]]


def test_what_has_one_number_per_row_is_in_the_kernel_that_reduces_rows():
    """RMSNorm of five calls, one kernel under `torch.compile`: squares, their sums, roots, and two products."""
    b = TraceBuilder()
    x, w = bf16(b, "x", 4, 8, role="input"), bf16(b, "w", 8, role="weight")
    squares, scaled, out = (bf16(b, name, 4, 8) for name in ("squares", "scaled", "out"))
    sums, roots = bf16(b, "sums", 4, 1), bf16(b, "roots", 4, 1)
    b.op("square", "elementwise", reads=[x], writes=[squares])
    b.op("sum", "reduce", reads=[squares], writes=[sums])
    b.op("root", "elementwise", reads=[sums], writes=[roots])
    b.op("scale", "elementwise", reads=[x, roots], writes=[scaled])
    b.op("weigh", "elementwise", reads=[scaled, w], writes=[out])
    assert stream_groups(b.build(outputs=[out])) == [[0, 1, 2, 3, 4]]


def test_what_is_made_of_weights_alone_leaves_a_kernel_divisible_by_samples():
    """Gemma's norm multiplies by 1 + w, which is the same for all samples."""
    b = TraceBuilder()
    x, w, scale = bf16(b, "x", 4, 8, role="input"), bf16(b, "w", 8, role="weight"), bf16(b, "scale", 8)
    rows, out = bf16(b, "rows", 4, 8), bf16(b, "out", 4, 8)
    b.op("norm", "norm", reads=[x], writes=[rows], splits=("batch",))
    b.op("one_plus", "elementwise", reads=[w], writes=[scale])
    b.op("weigh", "elementwise", reads=[rows, scale], writes=[out], splits=("batch",))
    trace = b.build(outputs=[out])
    groups = stream_groups(trace)
    assert groups == [[0, 2], [1]]
    assert fuse(trace, groups, streams=True).ops[-1].splits == ("batch",)


def test_what_a_product_reads_stays_with_what_it_is_made_from():
    """By hand: a makes what b and c read, b what a product reads, and d reads b and the product.

    The product is between b and d: these are never one kernel, but a, b and c are.
    """
    b = TraceBuilder()
    x, *made = b.tensor("x", 64, "input"), *(b.tensor(name, 64) for name in ("a", "b", "c", "product", "d"))
    b.op("a", "elementwise", reads=[x], writes=[made[0]])
    b.op("b", "elementwise", reads=[made[0]], writes=[made[1]])
    b.op("c", "elementwise", reads=[made[0]], writes=[made[2]])
    b.op("product", "matmul", reads=[made[1]], writes=[made[3]])
    b.op("d", "elementwise", reads=[made[1], made[3]], writes=[made[4]])
    assert stream_groups(b.build(outputs=[made[2], made[4]])) == [[0, 1, 2], [4]]


@pytest.mark.parametrize("name", ["w.grad.accumulate", "w.grad.main"])
def test_autograd_adds_gradients_outside_of_the_kernels_that_make_them(name: str):
    b = TraceBuilder()
    x, g, before = b.tensor("x", 64, "input"), b.tensor("g", 64, "gradient"), b.tensor("before", 64, "gradient")
    after = b.tensor("after", 64, "gradient", replaces=before)
    b.op("w.grad", "elementwise", reads=[x], writes=[g], phase="backward")
    b.op(name, "elementwise", reads=[before, g], writes=[after], phase="backward")
    assert stream_groups(b.build(outputs=[after])) == [[0]]


def test_an_update_from_fp32_masters_touches_28_bytes_per_parameter():
    """Adam: 2 of the gradient; master and two moments, 4 each, there and back; 2 of the weight, which is not read."""
    b = TraceBuilder()
    states = ("w.master", "m", "v")
    g, w = bf16(b, "g", 8, role="gradient"), bf16(b, "w", 8, role="weight")
    old = [b.tensor(name, 4 * 8, "optimizer_state", shape=(8,), dtype="fp32") for name in states]
    new = [
        b.tensor(f"{n}1", 4 * 8, "optimizer_state", dtype="fp32", replaces=t) for n, t in zip(states, old, strict=True)
    ]
    updated = b.tensor("w1", 2 * 8, "weight", shape=(8,), dtype="bf16", replaces=w)
    steps = b.tensor("steps", 4, "optimizer_state", shape=(), dtype="fp32")
    b.op("moments", "optimizer", reads=[g, *old[1:]], writes=new[1:], phase="update")
    b.op("step", "optimizer", reads=[w, old[0], *new[1:], steps], writes=[updated, new[0]], phase="update")
    (op,) = fuse_streams(b.build(), (), [], update=True, stack="fused").trace.ops
    assert op.bytes == 28 * 8


def made_from(overwritten: str, *, random: bool = False) -> Trace:
    """By hand: forward makes y from x and s, which a phase overwrites; a product and backward read y."""
    b = TraceBuilder()
    x, s = b.tensor("x", 64, "input"), b.tensor("s", 8, "input")
    y, z, out, g, d = (b.tensor(name, 64) for name in ("y", "z", "out", "g", "d"))
    new = b.tensor("new", 8, replaces=s)
    ops = [
        ("y", "elementwise", "forward", [x, s], y),
        ("z", "elementwise", "forward", [y], z),
        ("out", "matmul", "forward", [z], out),
        ("g", "matmul", "backward", [out], g),
        ("d", "elementwise", "backward", [g, y], d),
    ]
    ops.insert({"forward": 3, "backward": 4, "update": 5}[overwritten], ("s", "other", overwritten, [s], new))
    for name, kind, phase, reads, made in ops:
        b.op(name, kind, reads=reads, writes=[made], phase=phase, random=random and name == "y")
    return b.build(outputs=[out, d, new], carry=())


@pytest.mark.parametrize(("overwritten", "again"), [("update", {0}), ("forward", set()), ("backward", set())])
def test_what_is_made_from_an_overwritten_tensor_is_saved(overwritten: str, again: set[int]):
    trace = made_from(overwritten)
    assert recomputed_inside(trace, stream_groups(trace)) == again
    fused = with_stack(trace, "fused")
    last = next(op for op in fused.ops if op.name == "d")
    assert {fused.tensors[t].name for t in last.reads} == ({"g", "x", "s"} if again else {"g", "y"})


@pytest.mark.parametrize("stack", ["compiled", "fused"])
def test_what_a_product_of_backward_reads_is_not_recomputed_in_kernels(stack: str):
    """By hand: of two results of a norm one is within its kernel, and backward reads the other in a product."""
    b = TraceBuilder()
    x, rows, y, z = (b.tensor(name, 64, "input" if name == "x" else "activation") for name in ("x", "rows", "y", "z"))
    deviations, out, g, d, e, p = (b.tensor(name, 64) for name in ("deviations", "out", "g", "d", "e", "p"))
    b.op("norm", "norm", reads=[x], writes=[rows, deviations])
    b.op("y", "elementwise", reads=[rows], writes=[y])
    b.op("z", "elementwise", reads=[y], writes=[z])
    b.op("out", "matmul", reads=[z], writes=[out])
    b.op("g", "matmul", reads=[out], writes=[g], phase="backward")
    b.op("d", "elementwise", reads=[g, y], writes=[d], phase="backward")
    b.op("e", "elementwise", reads=[d], writes=[e], phase="backward")
    b.op("p", "matmul", reads=[e, deviations], writes=[p], phase="backward")
    trace = b.build(outputs=[out, p], carry=())
    new = with_stack(trace, stack)
    assert not [each for each in departures(new, trace) if each.what != "repeated"]
    assert "deviations" in {tensor.name for tensor in new.tensors}


def test_random_numbers_are_drawn_once():
    """Backward would draw others: PyTorch's partitioner saves what `native_dropout` drew, hand-written kernels do."""
    trace = made_from("update", random=True)
    groups = stream_groups(trace)
    assert recomputed_inside(trace, groups) == not_saved(trace, groups) == set()


def test_a_compiled_backward_reads_nothing_that_forward_has_overwritten():
    """By hand: s is smaller than y, which is made from it, and a cut would save s; but s is overwritten in place."""
    b = TraceBuilder()
    x, s, y = b.tensor("x", 64, "input"), b.tensor("s", 8), b.tensor("y", 64)
    over, (out, g, d) = b.tensor("over", 8, replaces=s), (b.tensor(name, 64) for name in ("out", "g", "d"))
    b.op("s", "matmul", reads=[x], writes=[s])
    b.op("y", "elementwise", reads=[s], writes=[y])
    b.op("over", "elementwise", reads=[s], writes=[over])
    b.op("out", "matmul", reads=[y, over], writes=[out])
    b.op("g", "matmul", reads=[out], writes=[g], phase="backward")
    b.op("d", "elementwise", reads=[g, y], writes=[d], phase="backward")
    trace = b.build(outputs=[d], carry=())
    assert not_saved(trace, stream_groups(trace)) == set()


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(traces())
def test_random_traces_keep_their_values(trace):
    for stack in OTHERS:
        try:
            other = with_stack(trace, stack)
        except WorkloadError:
            continue
        assert {departure.what for departure in departures(other, trace)} <= {"repeated"}


def test_faster_smaller_and_still_divisible():
    eager, *others = (transformer(GPT, batch=4, sequence=64, precision="amp_bf16", stack=s) for s in STACKS)
    plain = simulate(eager, "a100_80_sxm", "keep_all")
    for trace in others:
        run = simulate(trace, "a100_80_sxm", "keep_all")
        assert run.log.end < plain.log.end
        assert trace.origin is None  # a workload of its own
        divided, _ = lay_out(trace, "a100_80_sxm", to_layout({"pp": 2, "micro_batches": 2}))
        assert {each.what for each in departures(divided, trace)} <= {"repeated"}  # casts, per microbatch


def test_convolution_nets_have_stacks_too():
    eager = cnn("resnet-50", 2, 64)
    fused = with_stack(eager, "fused")
    assert {departure.what for departure in departures(fused, eager)} <= {"repeated"}
    assert len(fused.ops) < len(eager.ops)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: transformer(GPT, batch=1, sequence=8, stack="fusd"),
            "stack 'fusd' is unknown (did you mean 'fused'?)",
        ),
        (
            lambda: cnn("vgg-16", 1, stack="compile"),
            "stack 'compile' is unknown (did you mean 'compiled' or 'compiled_layers'?)",
        ),
        (lambda: with_stack(transformer(GPT, batch=1, sequence=8, stack="fused"), "compiled"), "already of the stack"),
        (lambda: with_stack(measured(), "fused"), "the time of 'a' was measured"),
        (lambda: with_stack(measured(kind="matmul"), "fused"), "no ops that could be one kernel"),
    ],
)
def test_bad_input_is_one_clear_line(make, says):
    with pytest.raises(WorkloadError) as error:
        make()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def measured(kind: str = "elementwise") -> Trace:
    b = TraceBuilder()
    x, y, z = b.tensor("x", 8, "input"), b.tensor("y", 8), b.tensor("z", 8)
    b.op("a", kind, reads=[x], writes=[y], duration=5)
    b.op("b", kind, reads=[y], writes=[z], duration=5)
    return b.build(outputs=[z], carry=())


def test_every_fusion_names_who_does_it_and_where_that_was_read():
    for stack, what in stacks().items():
        assert stack == "eager" or what["fuses"]
        assert all(set(row) == {"what", "by", "source"} and all(row.values()) for row in what["fuses"])
