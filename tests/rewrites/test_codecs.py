"""Codes: their sizes against printed ratios and counted bytes, and the law of values on what they claim."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import simulate
from sim.errors import TraceError
from sim.rewrites.codecs import FORMATS, code_bytes
from sim.rewrites.encoding import Codec, encode
from sim.rewrites.values import approximate, departures
from sim.trace import Trace, TraceBuilder
from sim.trace.tensor import Tensor

KIB = 1024


def fp32(elements: int, zeros: float | None = None) -> Tensor:
    return Tensor(0, "t", 4 * elements, "activation", dtype="fp32", zeros=zeros)


@pytest.mark.parametrize(
    ("form", "ratio"),
    [("sign", 32), ("argmax", 8), ("fp32", 1), ("fp16", 2), ("fp10", 3), ("fp8", 4)],
)
def test_dense_codes_of_fp32_have_the_published_ratio(form, ratio):
    assert code_bytes(form, fp32(3 * 256)) == Fraction(4 * 3 * 256, ratio)


@pytest.mark.parametrize(("density", "ratio"), [(1, 0.970), (0.5, 1.882), (0.25, 3.556), (0.1, 7.619)])
def test_zero_value_compression_has_the_printed_ratio(density, ratio):
    assert 4 * KIB * 100 / code_bytes("zvc", fp32(KIB * 100, 1 - density)) == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize(("zeros", "ratio"), [(0.5, 1.59), (0.75, 3.16)])
def test_sparse_rows_have_the_printed_ratio(zeros, ratio):
    assert 4 * 256 * 100 / code_bytes("csr", fp32(256 * 100, zeros)) == pytest.approx(ratio, abs=5e-3)


@given(st.lists(st.sampled_from((0.0, 1.5, 0.0, -2.0)), min_size=1, max_size=2000))
def test_sparse_codes_are_as_large_as_what_an_encoder_writes(values):
    """An encoder of NumPy arrays, not of fractions."""
    array = np.array(values, np.float32)
    tensor = Tensor(0, "t", array.nbytes, "activation", shape=array.shape, zeros=float(np.mean(array == 0)))
    mask, packed = np.packbits(array != 0), array[array != 0]
    assert code_bytes("zvc", tensor) == mask.nbytes + packed.nbytes
    rows = [array[i : i + 256] for i in range(0, len(array), 256)]
    columns = np.concatenate([np.flatnonzero(row) for row in rows]).astype(np.uint8)
    starts = np.cumsum([np.count_nonzero(row) for row in rows]).astype(np.uint32)
    assert code_bytes("csr", tensor) == packed.nbytes + columns.nbytes + starts.nbytes


@pytest.mark.parametrize("count", [10, 30, 1000, 999, 12_345_670])
def test_a_share_that_is_a_whole_number_of_elements_is_that_number(count):
    """Shares such as 0.6 and 1/3, which no float is: the nearest float stands for them."""
    for zeros in (1, count // 3, 3 * count // 10, count // 2, 2 * count // 3, 6 * count // 10, count - 1):
        bits = -(-count // 8)
        assert code_bytes("zvc", fp32(count, zeros / count)) == bits + 4 * (count - zeros)
        assert code_bytes("zvc", fp32(count, 1 - (count - zeros) / count)) == bits + 4 * (count - zeros)


def test_a_ratio_that_no_float_is_gives_no_byte_more():
    b = TraceBuilder()
    x, y, z = b.tensor("x", 1000, "input"), b.tensor("y", 1000), b.tensor("z", 1)
    b.op("make", reads=[x], writes=[y])
    b.op("use", reads=[y], writes=[z], phase="backward")
    trace = encode(b.build(outputs=[z]), {y: Codec("own", ratio=0.1)})
    assert [t.bytes for t in trace.tensors if t.name == "y.own"] == [100]


def test_what_states_no_zeros_has_no_sparse_code():
    with pytest.raises(TraceError, match="tensor 't': the trace does not say how many of its elements are zero"):
        code_bytes("csr", fp32(8))


# ---- what codes claim ----------------------------------------------------------------------------


def relu_net(*, reader: str = "") -> Trace:
    """x -> relu -> y -> pool -> z -> loss; y is saved for both backward ops, and for `reader` where that is named."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 64, "input"), b.tensor("y", 64, zeros=0.5), b.tensor("z", 16)
    places, out = b.tensor("places", 32, dtype="int64"), b.tensor("loss.out", 4)
    b.op("relu", "elementwise", reads=[x], writes=[y], function="relu", duration=1)
    b.op("pool", "pool", reads=[y], writes=[z, places], function="max_pool", duration=1)
    b.op("loss", "loss", reads=[z], writes=[out], duration=1)
    dz, dy, dx = (b.tensor(f"d{n}", s, "temporary") for n, s in (("z", 16), ("y", 64), ("x", 64)))
    b.op("loss.bwd", "loss", reads=[out], writes=[dz], phase="backward", duration=1)
    b.op("pool.bwd", "pool", reads=[dz, y, places], writes=[dy], phase="backward", function="max_pool", duration=1)
    if reader:
        b.op(reader, "conv", reads=[dy, y], writes=[b.tensor("dw", 8, "temporary")], phase="backward", flops=1)
    b.op("relu.bwd", "elementwise", reads=[dy, y], writes=[dx], phase="backward", function="relu", duration=1)
    return b.build(outputs=[dx], carry=())


def found(rewritten: Trace, base: Trace) -> list[tuple[str, str]]:
    return [(one.what, one.op or one.tensor) for one in departures(rewritten, base)]


def test_the_code_that_suffices_computes_the_same():
    base = relu_net()
    new = encode(base, {}, ["pool.bwd", "relu.bwd"])
    assert found(new, base) == []
    sizes = {t.name: t.bytes for t in new.tensors if t.name not in base.tensor_columns.name}
    assert sizes == {"places.argmax": 2, "y.sign": 2}
    reads = {op.name: [new.tensors[t].name for t in op.reads] for op in new.ops if op.phase == "backward"}
    assert reads["pool.bwd"] == ["dz", "places.argmax"]
    assert reads["relu.bwd"] == ["dy", "y.sign"]
    assert new.touched[new.op_id("pool.bwd")] == base.touched[base.op_id("pool.bwd")]


def test_signs_do_not_suffice_for_who_needs_the_values():
    base = relu_net(reader="conv.bwd")
    wrong = encode(base, {}, ["relu.bwd"])
    assert found(wrong, base) == []  # conv.bwd still reads y itself
    with pytest.raises(TraceError, match=r"'conv.bwd' is not the backward of relu or max_pool"):
        encode(base, {}, ["conv.bwd"])


def test_a_code_of_signs_read_as_values_is_wrong():
    """Planted: an op other than a ReLU's reads the code as if it were enough."""
    base = relu_net(reader="conv.bwd")
    liar = encode(relabelled(base, "conv.bwd", "relu"), {}, ["conv.bwd", "relu.bwd"])
    assert found(relabelled(liar, "conv.bwd", ""), base) == [("wrong", "conv.bwd")]


def relabelled(trace: Trace, op: str, function: str) -> Trace:
    from dataclasses import replace

    functions = {**trace.op_columns.function, trace.op_id(op): function}
    columns = replace(trace.op_columns, function={key: value for key, value in functions.items() if value})
    origin = replace(trace.origin, base=relu_net(reader="conv.bwd").content_hash) if trace.origin else None
    return Trace(
        trace.tensor_columns, columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=origin
    )


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if not form.lossless])
def test_a_lossy_format_shows_where_it_is_read_and_cannot_pass_for_lossless(form):
    base = relu_net(reader="conv.bwd")
    declared = encode(base, {"y": Codec(form, lossless=False)})
    assert found(declared, base) == [("lossy", "pool.bwd"), ("lossy", "conv.bwd"), ("lossy", "relu.bwd")]
    assert approximate(declared) == ("y.decoded",)
    assert found(encode(base, {"y": Codec(form)}), base) == [("wrong", f"y.{form}")]


def test_a_code_has_as_many_bytes_as_its_format():
    base = relu_net(reader="conv.bwd")
    assert found(encode(base, {"y": Codec("zvc")}), base) == []
    assert found(encode(base, {"y": Codec("zvc", Fraction(1, 4))}), base) == [("wrong", "y.zvc")]


def viewed(late: bool) -> Trace:
    """An activation of zeros of which forward makes a view, which backward reads too (`late`) or not."""
    b, size = TraceBuilder(), 4 * KIB
    x, y, v = (
        b.tensor("x", size, "input"),
        b.tensor("y", size, dtype="fp32", zeros=0.9, shape=(32, 32)),
        b.tensor("v", 0),
    )
    z, d, e = b.tensor("z", size), b.tensor("d", size, "temporary"), b.tensor("e", 4, "temporary")
    b.op("f", reads=[x], writes=[y], layer=0, duration=10)
    b.op("view", reads=[y], writes=[v], views=[0], layer=0, duration=0)
    b.op("g", "matmul", reads=[y, v], writes=[z], layer=1, duration=10_000)
    b.op("loss", "loss", phase="backward", reads=[z], writes=[d], duration=10_000)
    b.op("g.bwd", "matmul", phase="backward", reads=[d, y, *[v][:late]], writes=[e], layer=1, duration=10)
    return b.build(outputs=[e], carry=())


def test_what_backward_reads_through_a_view_of_forward_is_not_encoded():
    plain = viewed(late=False)
    assert not departures(encode(plain, {"y": Codec("csr")}), plain)
    with pytest.raises(TraceError, match=r"'y' is .* or a view of it outlives forward"):
        encode(viewed(late=True), {"y": Codec("csr")})


@pytest.mark.parametrize("late", [True, False])
def test_a_policy_of_codes_leaves_what_backward_reads_through_a_view(late):
    names = simulate(viewed(late), "a100_80_gds", "gist").log.trace.tensor_columns.name
    assert ("y.csr" in names) == (not late)
