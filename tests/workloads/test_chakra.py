"""Chakra traces: read from bytes made by hand, written from runs, and the same after a round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim import load_profile, simulate
from sim.engine.replay import replay
from sim.errors import TraceError
from sim.log import WHY
from sim.plan import Move, Plan, Wait
from sim.trace import Trace, TraceBuilder
from sim.trace.op import Ring
from workloads import load_trace, transformer, w1
from workloads.exporters.chakra import export_chakra
from workloads.importers.chakra import read_chakra
from workloads.importers.chakra_schema import COLLECTIVES, NODE_TYPES, decode, value_of

COMP, SEND, RECV, COLL = 4, 5, 6, 7


# ---- the wire format, by hand: shares no code with the reader -----------------------------------------


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value & (1 << 64) - 1)


def text(field: int, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


INT64, UINT64, INT32, STRING, BOOL = 9, 13, 7, 29, 27


def attr(name: str, kind: int, value: Any) -> bytes:
    held = text(kind, value) if kind == STRING else number(kind, int(value))
    return text(10, text(1, name) + held)


def node(id: int, name: str, type: int, *parts: bytes, deps: tuple[int, ...] = (), micros: int = 0) -> bytes:
    data = b"".join(map(varint, deps))
    listed = text(5, data) if deps else b""
    return number(1, id) + text(2, name) + number(3, type) + listed + number(7, micros) + b"".join(parts)


def file(folder: Path, name: str, *nodes: bytes) -> Path:
    messages = (text(1, "0.0.4"), *nodes)
    (folder / name).write_bytes(b"".join(varint(len(m)) + m for m in messages))
    return folder / name


def test_nodes_written_by_hand_become_ops_with_the_data_they_depend_on(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "run.0.et",
        node(7, "second", COMP, attr("num_ops", INT64, 5000), attr("tensor_size", UINT64, 64), deps=(3,), micros=11),
        node(3, "first", COMP, attr("tensor_size", INT64, 32), micros=4),
        node(8, "weights in", 2, attr("tensor_size", UINT64, 1000), micros=2),
        node(9, "out", 3, attr("tensor_size", UINT64, 64), deps=(7, 8)),
    )
    trace = load_trace(path)
    first, second, load, store = trace.ops
    assert [op.name for op in trace.ops] == ["3.first", "7.second", "8.weights in", "9.out"]
    assert [op.duration for op in trace.ops] == [4000, 11_000, 2000, 0]
    assert second.reads == first.writes
    assert second.flops == 5000
    assert (load.kind, store.kind) == ("copy", "copy")
    assert store.reads == (*second.writes, *load.writes)
    assert [t.bytes for t in trace.tensors] == [32, 64, 1000, 0]


def test_signed_and_unsigned_attributes_are_read_alike(tmp_path: Path) -> None:
    for kind in (INT64, UINT64, INT32):
        path = file(tmp_path, f"{kind}.et", node(0, "all", COLL, attr("comm_size", kind, 77), micros=1))
        assert load_trace(path).tensors[0].bytes == 77


def test_nodes_of_other_types_are_counted_and_pass_their_dependencies_on(tmp_path: Path) -> None:
    nodes = [
        node(0, "a", COMP, micros=1),
        node(1, "s", 8, deps=(0,)),
        node(2, "m", 77, deps=(1,)),
        node(3, "b", COMP, deps=(2,)),
    ]
    trace = load_trace(file(tmp_path, "x.et", *nodes))
    assert trace.meta["left_out"] == {"nodes of STORAGE_NODE": 1, "nodes of type 77": 1}
    assert trace.ops[1].reads == trace.ops[0].writes


def test_tensors_that_nodes_list_are_used_as_python_prints_them(tmp_path: Path) -> None:
    def listed(field: int, *tensors: list[Any]) -> bytes:
        return text(field, text(1, repr(list(tensors))) + text(2, repr([[2]])) + text(3, repr(["Tensor(float)"])))

    first = node(
        1, "aten::relu", COMP, listed(8, [5, 50, 0, 2, 4, "cpu"]), listed(9, [6, 60, 0, 2, 4, "cpu"]), micros=3
    )
    again = node(
        2, "aten::relu", COMP, listed(8, [6, 60, 0, 2, 4, "cpu"]), listed(9, [7, 50, 0, 2, 4, "cpu"]), micros=3
    )
    trace = load_trace(file(tmp_path, "x.et", first, again))
    assert [(t.name, t.bytes, t.role) for t in trace.tensors] == [
        ("s50", 8, "input"),
        ("s60", 8, "activation"),
        ("s50.2", 8, "activation"),  # an address that is used again
    ]
    assert trace.ops[1].reads == trace.ops[0].writes


def test_the_ranks_of_a_prefix_meet_in_their_communication(tmp_path: Path) -> None:
    coll = (attr("comm_type", INT64, 0), attr("comm_size", INT64, 4096))
    ends = (
        attr("comm_src", INT32, 0),
        attr("comm_dst", INT32, 1),
        attr("comm_tag", INT32, 5),
        attr("comm_size", INT64, 64),
    )
    file(
        tmp_path,
        "r.0.et",
        node(0, "f", COMP, micros=9),
        node(1, "ar", COLL, *coll, deps=(0,)),
        node(2, "s", SEND, *ends),
    )
    file(
        tmp_path,
        "r.1.et",
        node(0, "f", COMP, micros=5),
        node(1, "ar", COLL, *coll, deps=(0,)),
        node(2, "r", RECV, *ends),
    )
    both = load_trace(tmp_path / "r")
    assert both.devices == 2
    groups = [(op.kind, op.device, op.group) for op in both.ops if op.group]
    assert sorted(groups) == [
        ("collective", 0, "all.0.0"),
        ("collective", 1, "all.0.0"),
        ("recv", 1, "0.1.5.0"),
        ("send", 0, "0.1.5.0"),
    ]
    log = simulate(both, load_profile("a100_80_sxm", overrides={"devices": "2"})).log
    assert log.end > 9000
    alone = load_trace(tmp_path / "r.1.et")
    assert alone.meta["assumed"]["communication with ranks that were not read"] == 2
    assert [op.kind for op in alone.ops] == ["elementwise", "collective", "copy"]
    assert simulate(alone, load_profile("h200")).log.complete


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    file(tmp_path, "r.0.et", node(0, "f", COMP))
    file(tmp_path, "r.2.et", node(0, "f", COMP))
    with pytest.raises(TraceError, match="rank 1 is missing"):
        load_trace(tmp_path / "r")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node(1, "a", COMP, deps=(2,)), node(2, "b", COMP, deps=(1,))], "depends on itself through"),
        ([node(1, "a", COMP), node(1, "b", COMP)], "two nodes have the id 1"),
        ([], "it has no nodes"),
        ([node(1, "a", COMP, attr("tensor_size", INT64, -5))], "node 1: tensor_size: -5 is out of range"),
        ([node(1, "a", COMP)[:-1]], "message 1 at byte 8"),
    ],
)
def test_what_is_wrong_in_a_chakra_file_is_named(nodes: list[bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        load_trace(file(tmp_path, "x.et", *nodes))


# ---- JSON --------------------------------------------------------------------------------------------


def test_all_json_forms_of_a_trace_say_the_same(tmp_path: Path) -> None:
    proto = [
        {"version": "0.0.4"},
        {
            "id": "0",
            "name": "a",
            "type": "COMP_NODE",
            "durationMicros": "7",
            "attr": [{"name": "tensor_size", "uint64Val": "12"}],
        },
        {
            "id": "1",
            "name": "b",
            "type": "COMM_COLL_NODE",
            "dataDeps": ["0"],
            "attr": [{"name": "comm_size", "int64Val": "30"}],
        },
    ]
    graph = [
        {"Id": 0, "Name": "a", "NodeType": 4, "runtime": 7, "data_deps": [], "tensor_size": 12},
        {"Id": 1, "Name": "b", "NodeType": 7, "data_deps": [0], "comm_size": 30, "comm_type": 0},
    ]
    plain = [
        {
            "id": 0,
            "name": "a",
            "type": "COMP_NODE",
            "duration_micros": 7,
            "attr": [{"name": "tensor_size", "int64_val": 12}],
        },
        {"id": 1, "name": "b", "type": 7, "data_deps": [0], "attr": [{"name": "comm_size", "uint64_val": 30}]},
    ]
    forms = {
        "jsonizer": "\n".join(json.dumps(row, indent=1) for row in proto),
        "feeder": json.dumps({"workload_graph": graph}),
        "list": json.dumps(plain),
        "nodes": json.dumps({"nodes": plain}),
    }
    for name, content in forms.items():
        (tmp_path / f"{name}.json").write_text(content)
        trace = load_trace(tmp_path / f"{name}.json")
        assert [(op.name, op.kind, op.duration) for op in trace.ops] == [
            ("0.a", "elementwise", 7000),
            ("1.b", "collective", 0),
        ]
        assert [t.bytes for t in trace.tensors] == [12, 30], name
        assert trace.ops[1].reads == trace.ops[0].writes


# ---- writing -----------------------------------------------------------------------------------------


def facts(trace: Trace) -> list[tuple[Any, ...]]:
    """All that a trace says, by name."""
    rows: list[tuple[Any, ...]] = []
    for op in trace.ops:
        rows.append(op.views)
        names = [tuple(trace.tensors[t].name for t in ids) for ids in (op.reads, op.writes)]
        about = (
            op.kind,
            op.phase,
            op.layer,
            op.flops,
            op.bytes,
            op.workspace,
            op.device,
            op.random,
            op.duration,
            op.ring,
        )
        rows.append((op.name, *about, op.dtype, *names))
    for t in sorted(trace.tensors, key=lambda t: t.name):
        old = None if t.replaces is None else trace.tensors[t.replaces].name
        rows.append((t.name, t.bytes, t.role, t.layer, t.dtype, old))
    rows.append(tuple(sorted(trace.tensors[t].name for t in trace.outputs)))
    rows.append(tuple(sorted((trace.tensors[a].name, trace.tensors[b].name) for a, b in trace.carry)))
    return rows


@pytest.mark.parametrize("policy", ["keep_all", "swap_all", "full_recompute", "dtr"])
def test_the_computation_of_an_exported_run_is_the_one_that_ran(policy: str, tmp_path: Path) -> None:
    trace = transformer("gpt2", batch=1, sequence=64)
    result = simulate(trace, load_profile("a100_80_sxm"), policy=policy)
    (path,) = export_chakra(result.log, tmp_path / "run")
    assert path == tmp_path / "run.0.et"
    assert facts(read_chakra(path, added=False)) == facts(result.log.trace)
    log = simulate(read_chakra(path, added=False), load_profile("a100_80_sxm")).log
    assert log.end == simulate(trace, load_profile("a100_80_sxm")).log.end


def with_views() -> Trace:
    """Two views of `y`, read in two ops; one more op writes a view beside a tensor of its own."""
    b = TraceBuilder({"model": "views"})
    x, y = b.tensor("x", 1 << 20, "input"), b.tensor("y", 1 << 20)
    v, u, z, out = b.tensor("v", 0), b.tensor("u", 0), b.tensor("z", 1 << 20), b.tensor("out", 1 << 20)
    b.op("f", "matmul", reads=[x], writes=[y], flops=10**9)
    b.op("view", reads=[y], writes=[v], views=[0], duration=1)
    b.op("both", reads=[x, v, y], writes=[z, u], views=[-1, 2], duration=1)
    b.op("g", "matmul", reads=[z], writes=[], flops=10**12)
    b.op("late", reads=[v, y, u, z], writes=[out], duration=1)
    return b.build(outputs=[out], carry=())


def test_views_lie_in_the_same_tensors_after_a_round_trip(tmp_path: Path) -> None:
    trace = with_views()
    log = simulate(trace, load_profile("a100_80_sxm")).log
    (path,) = export_chakra(log, tmp_path / "run")
    again = read_chakra(path, added=False)
    assert facts(again) == facts(trace)
    assert {again.tensors[v].name: again.tensors[t].name for v, t in again.view_of.items()} == {"v": "y", "u": "y"}
    whole = load_trace(path)
    assert [op.views for op in whole.ops if op.views] == [(0,), (-1, 2)]
    assert simulate(whole, load_profile("a100_80_sxm")).log.end == log.end


def test_where_a_storage_was_copied_back_it_stands_for_its_views(tmp_path: Path) -> None:
    actions = (Move("y", "host", after="both"), Move("y", "hbm", before="late"), Wait("y", before="late"))
    log = replay(Plan(with_views(), actions), load_profile("a100_40_pcie"))
    (path,) = export_chakra(log, tmp_path / "run")
    assert facts(read_chakra(path, added=False)) == facts(with_views())
    whole = load_trace(path)
    assert [whole.tensors[t].name for t in whole.ops[-1].reads] == ["y.again1", "z"]


def test_moves_become_store_and_load_nodes_with_all_their_bytes(tmp_path: Path) -> None:
    result = simulate(transformer("gpt2", batch=1, sequence=64), load_profile("a100_80_sxm"), policy="swap_all")
    log = result.log
    (path,) = export_chakra(log, tmp_path / "run")
    moved = log.intervals[(log.interval("why") == WHY["move"]) & (log.interval("tensor") >= 0)]
    nodes = list(decode(path.read_bytes()))[1:]
    kinds = [NODE_TYPES[n.type] for n in nodes]
    sizes = [{a.name: value_of(a) for a in n.attr}.get("tensor_size") for n in nodes]
    copies = [size for kind, size in zip(kinds, sizes, strict=True) if kind.startswith("MEM_")]
    assert sum(copies) == moved[:, 8].sum() > 0
    assert kinds.count("MEM_LOAD_NODE") + kinds.count("MEM_STORE_NODE") == len(copies) == len(moved)
    assert kinds.count("MEM_LOAD_NODE") > 0
    # a load depends on its store, and somebody on the load
    by_id = {n.id: n for n in nodes}
    for n in nodes:
        if NODE_TYPES[n.type] == "MEM_LOAD_NODE":
            assert [NODE_TYPES[by_id[d].type] for d in n.data_deps] == ["MEM_STORE_NODE"]
            assert any(n.id in other.data_deps for other in nodes)
    again = load_trace(path)
    assert sum(op.bytes or 0 for op in again.ops if op.kind == "copy") == sum(copies)
    assert len(again.ops) == len(nodes)


def test_dependencies_of_an_exported_run_never_end_after_what_depends_on_them(tmp_path: Path) -> None:
    result = simulate(w1(6), load_profile("a100_80_sxm"), policy="swap_all")
    (path,) = export_chakra(result.log, tmp_path / "run")
    nodes = list(decode(path.read_bytes()))[1:]
    end: dict[int, int] = {}
    for n in nodes:
        assert all(dep < n.id for dep in (*n.data_deps, *n.ctrl_deps))
        about = {a.name: value_of(a) for a in n.attr}
        end[n.id] = about["duration_ns"]
        assert n.duration_micros == round(about["duration_ns"] / 1000)


def two_devices() -> Trace:
    b = TraceBuilder({"model": "pair"})
    x = b.tensor("x", 1 << 20, "input")
    y, z = b.tensor("y", 1 << 20), b.tensor("z", 1 << 20)
    sums = [b.tensor(f"sum{d}", 2 << 20) for d in (0, 1)]
    b.op("f", "matmul", reads=[x], writes=[y], flops=10**9, device=0)
    b.op("s", "send", reads=[y], device=0, group="pair")
    b.op("r", "recv", writes=[z], device=1, group="pair")
    for d, part in enumerate((y, z)):
        b.op(f"join{d}", "collective", reads=[part], writes=[sums[d]], device=d, group="ring", ring=Ring("data", 2, 1))
    return b.build(outputs=sums)


def test_groups_become_communication_nodes_on_each_rank_and_meet_again(tmp_path: Path) -> None:
    platform = load_profile("a100_80_sxm", overrides={"devices": "2"})
    log = simulate(two_devices(), platform).log
    paths = export_chakra(log, tmp_path / "run")
    assert [path.name for path in paths] == ["run.0.et", "run.1.et"]
    kinds = [[NODE_TYPES[n.type] for n in list(decode(path.read_bytes()))[1:]] for path in paths]
    assert kinds == [["COMP_NODE", "COMM_SEND_NODE", "COMM_COLL_NODE"], ["COMM_RECV_NODE", "COMM_COLL_NODE"]]
    about = {a.name: value_of(a) for a in list(decode(paths[1].read_bytes()))[-1].attr}
    assert COLLECTIVES[about["comm_type"]] == "ALL_GATHER"
    again = read_chakra(tmp_path / "run", added=False)
    assert facts(again) == facts(log.trace)
    assert simulate(again, platform).log.end == log.end


@pytest.mark.parametrize(
    ("kind", "ring"),
    [
        ("ALL_REDUCE", Ring("data", 2, 2)),
        ("ALL_GATHER", Ring("data", 2, 1)),
        ("REDUCE_SCATTER", Ring("data", 2, 1)),
        ("ALL_TO_ALL", Ring("expert", 2, 1)),
        (None, None),
    ],
)
def test_the_type_of_a_collective_says_how_often_it_goes_round(kind: str | None, ring: Ring | None, tmp_path: Path):
    about = {} if kind is None else {"comm_type": COLLECTIVES.index(kind)}
    for rank in range(2):
        node = {"Id": 1, "Name": "c", "NodeType": 7, "data_deps": [], "comm_size": 30, **about}
        (tmp_path / f"run.{rank}.et").write_text(json.dumps({"nodes": [node]}))
    assert [op.ring for op in read_chakra(tmp_path / "run").ops] == [ring, ring]


def test_an_unwritable_place_is_an_error_of_the_system_and_leaves_nothing(tmp_path: Path) -> None:
    log = simulate(w1(3), load_profile("h200")).log
    with pytest.raises(OSError, match="missing"):
        export_chakra(log, tmp_path / "missing" / "run")
    assert list(tmp_path.iterdir()) == []
    assert np.all(log.interval("start") >= 0)
