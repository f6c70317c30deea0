"""Small traces in every format that is read, to be mutated."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from workloads.importers.chakra_schema import attribute, encode, messages

DATA = Path(__file__).parents[1] / "workloads" / "data"


def small(name: str, key: str, count: int) -> Any:
    """The first rows of a real file."""
    document = json.loads(gzip.decompress((DATA / name).read_bytes()))
    document[key] = document[key][:count]
    return document


def first_calls() -> Any:
    document = small("smallcnn.chrome.json.gz", "traceEvents", 10_000)
    rows = [
        e for e in document["traceEvents"] if e.get("cat") in ("cpu_op", "user_annotation") or e["name"] == "[memory]"
    ]
    rows = sorted(rows, key=lambda e: e["ts"])[:30]
    first = next(e for e in rows if e.get("cat") == "cpu_op")
    inside = {key: first[key] for key in ("pid", "tid", "ts", "dur")}
    net = {**inside, "ph": "X", "cat": "python_function", "name": "nn.Module: Net_0", "dur": 10**6}
    parts = [{**net, "name": f"nn.Module: Sequential_{i}", "ts": inside["ts"] + 10 * i, "dur": 10} for i in range(2)]
    layers = [{**part, "name": f"nn.Module: Conv_{i}", "dur": 5} for i, part in enumerate(parts)]
    document["traceEvents"] = [net, *parts, *layers, *rows]
    return document


def first_ops() -> Any:
    document = small("resnet-50.optrace.json.gz", "ops", 25)
    used = {entry[0] for op in document["ops"] for entry in (*op["ins"], *op["outs"])}
    count = len(document["ops"])
    rows = [row for row in document["storages"] if row[0] in used]
    document["storages"] = [[*row[:5], min(row[5], count)] for row in rows]
    return document


def dtr_lines() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"INSTRUCTION": "CONSTANT", "NAME": "w"},
        {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "8"},
    ]
    for i in range(4):
        args, name = ["w"] if i == 0 else [f"x{i - 1}", "w"], f"x{i}"
        rows.append({"INSTRUCTION": "CALL", "NAME": "mm", "ARGS": args, "RESULT": [name], "TIME": "5"})
        rows.append({"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": 16})
        rows.append({"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": 0 if i == 2 else -1})
    rows.append({"INSTRUCTION": "COPY", "DST": "y", "SRC": "x3"})
    rows.append({"INSTRUCTION": "COPY_FROM", "DST": "y", "SRC": "x1"})
    rows.append({"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": ["w", "y"], "MUTATE": [0], "TIME": 3})
    rows.append({"INSTRUCTION": "RELEASE", "NAME": "y"})
    return rows


def chakra_rows() -> list[dict[str, Any]]:
    listed = {"values": [[1, 2, 0, 4, 4, "cpu"]], "shapes": [[4]], "types": ["Tensor(float)"]}
    other = {"values": "[[3, 4, 0, 4, 4, 'cpu']]", "shapes": "[[4]]", "types": "['Tensor(float)']"}
    size = [{"name": "comm_size", "uint64_val": "64"}, {"name": "comm_type", "int64_val": 2}]
    return [
        {"id": 0, "name": "a", "type": "COMP_NODE", "duration_micros": 7, "inputs": listed, "outputs": other},
        {"id": 1, "name": "b", "type": 7, "data_deps": [0], "attr": size},
        {
            "id": 2,
            "name": "c",
            "type": "MEM_LOAD_NODE",
            "ctrl_deps": [1],
            "attr": [{"name": "tensor_size", "int32_val": 5}],
        },
        {"id": 3, "name": "d", "type": "COMM_SEND_NODE", "data_deps": [0, 2]},
    ]


def own_chakra() -> bytes:
    classes = messages()
    about = {
        "tensors": [[0, "x", 8, "input", -1, "", -1], [1, "y", 8, "activation", 0, "fp32", -1]],
        "outputs": [1],
        "carry": [],
    }
    head = classes["GlobalMetadata"](version="0.0.4", attr=[attribute("tiersim", "string", json.dumps(about))])
    sides = {
        "inputs": classes["IOInfo"](values='[[0, 0, 0, 8, 1, "d"]]'),
        "outputs": classes["IOInfo"](values='[[1, 1, 0, 8, 1, "d"]]'),
    }
    attrs = [attribute("op", "int64", 0), attribute("order", "uint64", 0), attribute("kind", "string", "matmul")]
    return encode(
        [head, *(classes["Node"](id=i, name=f"n{i}", type=4, attr=attrs, data_deps=[0], **sides) for i in range(3))]
    )


DOCUMENTS = {
    "chrome": first_calls(),
    "execution trace": small("smallcnn.et.json.gz", "nodes", 14),
    "op trace": first_ops(),
    "chakra": chakra_rows(),
    "feeder": {
        "workload_graph": [{"Id": 0, "Name": "a", "NodeType": 4, "runtime": 3, "data_deps": [], "tensor_size": 4}]
    },
    "dtr": dtr_lines(),
    "own": [
        {"format": "tiersim trace", "version": 1, "meta": {}},
        {"tensor": "x", "bytes": 8},
        {"op": "f", "reads": ["x"], "writes": []},
    ],
}
BY_LINE = ("dtr", "own")
DOCUMENTS |= {path.stem: json.loads(path.read_bytes()) for path in sorted(DATA.glob("*.json"))}
"""By a name a small trace of each format in JSON; files that are not packed take part by themselves."""


def content(name: str, document: Any) -> bytes:
    if name in BY_LINE and isinstance(document, list):
        return b"\n".join(json.dumps(row).encode() for row in document)
    return json.dumps(document).encode()
