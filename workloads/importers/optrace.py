"""Op-level JSON of format "op-trace-1": the ops of one iteration and the lifetime of every storage.

The format has the order of ops, module, phase, FLOPs, the storages that each op reads, allocates and writes in place,
and when each storage was allocated and released. It lacks durations, workspace inside kernels, and streams; op times
come from the platform's cost model. Views are folded into their storage.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sim.errors import TraceError
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads.importers.reading import MAX_BYTES, need, read_json

FORMAT = "op-trace-1"
ROLES = {
    "param": "weight",
    "buffer": "weight",
    "opt_state": "optimizer_state",
    "input": "input",
    "act": "activation",
    "grad": "gradient",
    "temp": "temporary",
    "opt_temp": "temporary",
    "ext": "temporary",
}
PHASES = {"forward": "forward", "recompute": "backward", "backward": "backward", "optimizer": "update", "end": "update"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "int8": "int8"}
KINDS = (
    (r"attention", "attention"),
    (r"(^|\.)(_?scaled_(?!mm|grouped_mm)|_flash|_efficient)", "attention"),
    (r"\._scaled_(grouped_)?mm", "matmul"),
    (r"\.(mm|addmm|bmm|baddbmm|addbmm|linear|mkldnn_linear|matmul|mv|addmv|_addmm_activation|_int_mm)_?\b", "matmul"),
    (r"\.(_scaled)?_?grouped_mm", "matmul"),
    (r"convolution|conv_depthwise|slow_conv", "conv"),
    (r"_log_softmax|nll_loss|cross_entropy", "loss"),
    (r"softmax", "softmax"),
    (r"norm", "norm"),
    (r"embedding", "embedding"),
    (r"pool", "pool"),
    (r"_foreach|_fused_adam|_fused_sgd", "optimizer"),
    (r"\.(sum|mean|amax|argmax|topk)\b", "reduce"),
    (r"\.(copy_|clone|_to_copy|cat|split|index_select|contiguous)\b", "copy"),
)
PRODUCTS = ("matmul", "conv", "attention")
"""Kinds of op that have FLOPs."""
RANDOM = re.compile(r"dropout|bernoulli|rand|multinomial")
ROUNDING = 512


@lru_cache(maxsize=4096)
def kind_of(op: str, phase: str) -> str:
    """The kind of an ATen op, judged by its name."""
    if phase == "update":
        return "optimizer"
    return next((kind for pattern, kind in KINDS if re.search(pattern, op)), "elementwise")


def layer_of(module: str) -> int:
    """The first number in a module path (`transformer.h.3.mlp` -> 3), -1 without one."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return int(match.group(1)) if match else -1


@dataclass
class _Storages:
    """The tensor that currently represents each storage; every in-place write creates a new one."""

    builder: TraceBuilder
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    now: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)

    def make(self, storage: int, layer: int, replaces: int | None = None) -> int:
        row = self.rows[storage]
        version = self.versions[storage] = self.versions.get(storage, -1) + 1
        name = f"s{storage}" + (f".v{version}" if version else "")
        self.now[storage] = self.builder.tensor(name, row["bytes"], row["role"], layer=layer, replaces=replaces)
        self.first.setdefault(storage, self.now[storage])
        return self.now[storage]


def read_optrace(path: str | os.PathLike[str], *, rounding: int = ROUNDING, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a trace from an op-trace-1 file, which is held in memory whole.

    Only the device with the most bytes is imported; storages on others are counted in meta["left_out"].

    path: the file, plain or gzipped.
    rounding: storage sizes are rounded up to multiples of this many bytes, as by PyTorch's allocator, so that a replay
        that keeps everything has PyTorch's own peak; 1 for exact sizes.
    max_bytes: the most bytes to read, after unpacking.

    Raises TraceError naming the file and the entry.
    """
    data = need(read_json(path, max_bytes), dict, f"{path}")
    if data.get("format") != FORMAT:
        raise TraceError(f"{path}: format is {data.get('format')!r}, expected {FORMAT!r}")
    try:
        return _build(data, rounding, str(path))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TraceError(f"{path}: malformed: {type(error).__name__}: {error}") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _build(data: dict[str, Any], rounding: int, path: str) -> Trace:
    ops = need(data["ops"], list, "ops")
    columns = data.get("storage_columns", ["id", "bytes", "device", "kind", "alloc_op", "free_before_op"])
    raw = [dict(zip(columns, row, strict=True)) for row in need(data["storages"], list, "storages")]
    by_device: dict[str, int] = {}
    for row in raw:
        by_device[row["device"]] = by_device.get(row["device"], 0) + need(row["bytes"], int, f"storage {row['id']}")
    device = max(by_device, key=lambda name: by_device[name]) if by_device else ""
    case = dict(data.get("case") or {})
    meta = {"model": case.get("model", "imported"), "source": f"import of {os.path.basename(path)}", "format": FORMAT}
    meta |= {key: case[key] for key in ("batch", "precision", "policy") if key in case}
    if case.get("batch") and case.get("seq"):
        meta |= {"sequence": case["seq"], "tokens": case["batch"] * case["seq"], "samples": case["batch"]}
    builder = TraceBuilder(meta)
    storages = _Storages(builder)
    for row in raw:
        if row["device"] == device:
            size = -(-need(row["bytes"], int, f"storage {row['id']}") // rounding) * rounding
            storages.rows[row["id"]] = {**row, "bytes": size, "role": ROLES.get(row["kind"], "temporary")}
    kernels = [i for i, op in enumerate(ops) if not op.get("view")]
    held = _holds(storages.rows, kernels, len(ops))
    initial = [key for key, row in storages.rows.items() if row["alloc_op"] < 0]
    for key in initial:
        storages.make(key, -1)
    leaving = [storages.now[key] for key in initial if not _stays(storages.rows[key], len(ops))]
    if leaving:
        # a storage that exists at the start and is released during the iteration needs a producer, or it would stay
        builder.op("start", "copy", writes=leaving, bytes=0, duration=0)
    for i in kernels:
        _add_op(builder, storages, ops[i], i, held.get(i, ()))
    kept = [key for key, row in storages.rows.items() if key in storages.now and _stays(row, len(ops))]
    meta["left_out"] = {"views": len(ops) - len(kernels), "storages": len(raw) - len(storages.rows)}
    meta["rounding"] = rounding
    outputs = [storages.now[key] for key in kept]
    carry = [(storages.now[key], storages.first[key]) for key in kept if storages.rows[key]["alloc_op"] < 0]
    return builder.build(outputs=outputs, carry=carry)


def _stays(row: dict[str, Any], ops: int) -> bool:
    """Whether a storage is still live after the last op."""
    return not 0 <= row["free_before_op"] < ops


def _holds(rows: dict[int, dict[str, Any]], kernels: list[int], count: int) -> dict[int, list[int]]:
    """The storages that were released directly after each op."""
    held: dict[int, list[int]] = {}
    for key, row in rows.items():
        if not -1 <= row["free_before_op"] <= count:
            raise TraceError(f"storage {key}: free_before_op {row['free_before_op']} is out of range -1..{count}")
        index = bisect_left(kernels, row["free_before_op"]) - 1
        if index >= 0 and not _stays(row, count):
            held.setdefault(kernels[index], []).append(key)
    return held


def _add_op(builder: TraceBuilder, storages: _Storages, op: dict[str, Any], i: int, held: Any) -> None:
    phase = PHASES.get(op["phase"], "backward")
    layer = layer_of(op.get("module") or "") if phase != "update" else -1
    reads = [storages.now[entry[0]] for entry in op["ins"] if entry[0] in storages.now]
    changed = [key for key in dict.fromkeys(op.get("writes", ())) if key in storages.now]
    touched = sum(builder.bytes_of(t) for t in dict.fromkeys(reads))
    allocated = [
        entry[0] for entry in op["outs"] if entry[3] and entry[0] in storages.rows and entry[0] not in storages.now
    ]
    writes = [storages.make(key, layer, replaces=storages.now[key]) for key in changed]
    writes += [storages.make(key, layer) for key in dict.fromkeys(allocated)]
    touched += sum(builder.bytes_of(t) for t in writes)
    dtype = next((DTYPES[entry[2]] for entry in (*op["ins"], *op["outs"]) if entry[2] in DTYPES), "")
    builder.op(
        f"{i}.{op['op']}",
        kind_of(op["op"], phase),
        reads=list(dict.fromkeys(reads)),
        writes=writes,
        phase=phase,
        layer=layer,
        flops=int(op.get("flops") or 0),
        bytes=touched,
        random=bool(RANDOM.search(op["op"])),
        dtype=dtype,
        releases=[t for t in (storages.now[key] for key in held if key in storages.now) if t not in (*reads, *writes)],
    )
