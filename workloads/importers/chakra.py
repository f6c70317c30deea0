"""Chakra execution traces (MLCommons): `<prefix>.<rank>.et` in protobuf, or their JSON forms.

The format has nodes that compute, load or store memory, send, receive or take part in a collective; their dependencies;
and times in whole microseconds. Everything else is in named attributes, of which these are read (signed or unsigned):
`num_ops`, `tensor_size`, `comm_size`, `comm_type`, `comm_src`, `comm_dst`, `comm_tag`, `comm_priority`, `pg_name`,
`op_schema`. It lacks the release of memory, phases, and often tensors.

Import: each node becomes one op, each rank one device. If a node lists its tensors, these are used, one storage per
tensor. Otherwise it writes one tensor of `comm_size` or `tensor_size` bytes (0 without either), which the nodes that
depend on it read. Loads and stores become ops of kind `copy` on the device; a store reads its tensor, a load writes a
new one. Nodes of other types are left out and counted; their dependencies are passed on to the nodes that depend on
them. The k-th collectives of one process group and type form a group, and so do the k-th send and receive of one
source, destination and tag. An all-reduce goes round its ring twice, an all-to-all is one step, any other collective
goes round once. If the other rank's file is not read, they keep their duration, and a send or receive
becomes a `copy`.

Assumptions: a tensor is released after its last reader; tensors that no node writes are inputs; the nodes of a rank
run one after the other, in the order of the file where dependencies do not decide.

Files written by `workloads.exporters.chakra` contain everything that a trace does: tensors, kinds, phases, nanoseconds.
For these, `added=False` leaves out what a plan added (moves, recomputation), so that the original computation remains.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from sim.errors import TraceError
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.op import AXES, KINDS, PHASES, Ring
from workloads.importers.aten import flops_of, kind_of, phase_of
from workloads.importers.chakra_nodes import ChakraNode, nodes_of
from workloads.importers.chakra_schema import COLLECTIVES
from workloads.importers.chakra_tensors import Tensors
from workloads.importers.optrace import RANDOM
from workloads.importers.reading import MAX_BYTES, read_bytes, whole

RUN = ("COMP_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE")
KIND = {
    "MEM_LOAD_NODE": "copy",
    "MEM_STORE_NODE": "copy",
    "COMM_SEND_NODE": "send",
    "COMM_RECV_NODE": "recv",
    "COMM_COLL_NODE": "collective",
}
MOST_RANKS = 1 << 16


def read_chakra(path: str | os.PathLike[str], *, added: bool = True, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a trace from one Chakra file, or from the files of all ranks.

    path: a file, or the prefix of all ranks: `run` reads `run.0.et`, `run.1.et`, ….
    added: keep the moves and recomputations that a plan of this simulator added, as ops.
    max_bytes: the most bytes to read, of all files together.

    Raises TraceError naming the file and the node.
    """
    files = rank_files(path)
    ranks: list[tuple[str, bytes]] = []
    for file in files:
        ranks.append((file, read_bytes(file, max_bytes)))
        max_bytes -= len(ranks[-1][1])
    return build_chakra(ranks, str(path), added=added)


def rank_files(path: str | os.PathLike[str]) -> list[str]:
    """The file itself, or the files of all ranks if the path is their prefix. Raises TraceError for a missing rank."""
    if Path(path).is_file():
        return [str(path)]
    by_rank = files_by_rank(path)
    if not by_rank:
        raise TraceError(f"{path}: no such file, and no {path}.0.et")
    for rank_number in range(max(by_rank) + 1):
        if rank_number not in by_rank:
            raise TraceError(f"{path}: rank {rank_number} is missing ({path}.{rank_number}.et)")
    return [by_rank[rank_number] for rank_number in sorted(by_rank)]


def files_by_rank(path: str | os.PathLike[str]) -> dict[int, str]:
    """The files of ranks with this prefix; none where the path itself exists, or cannot be a name."""
    prefix = str(path)
    found: dict[int, str] = {}
    if "\0" in prefix or os.path.lexists(prefix):
        return found
    for name in glob.glob(glob.escape(prefix) + ".*.et*"):
        rank = re.search(r"\.(\d{1,6})\.et(\.gz)?$", name[len(prefix) :])
        if rank:
            found[int(rank.group(1))] = name
    return found


def build_chakra(files: list[tuple[str, bytes]], path: str, *, added: bool = True) -> Trace:
    """Like `read_chakra`, given the name and content of each rank's file."""
    reader = _Reader(path, added, len(files))
    for rank, (name, data) in enumerate(files):
        try:
            reader.rank(rank, *nodes_of(data))
        except TraceError as error:
            raise TraceError(f"{name}: {error}") from None
        except (TypeError, ValueError, OverflowError, KeyError, IndexError) as error:
            raise TraceError(f"{name}: malformed: {type(error).__name__}: {error}") from None
    try:
        return reader.trace()
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (TypeError, ValueError, OverflowError, KeyError, IndexError) as error:
        raise TraceError(f"{path}: malformed: {type(error).__name__}: {error}") from None


class _Reader:
    def __init__(self, path: str, added: bool, ranks: int) -> None:
        self.added, self.ranks = added, ranks
        self.left_out: Counter[str] = Counter()
        self.assumed: Counter[str] = Counter()
        self.meta: dict[str, Any] = {
            "model": "imported",
            "source": f"import of {os.path.basename(path)}",
            "format": "chakra",
        }
        self.builder = TraceBuilder(self.meta)
        self.tensors = Tensors(self.builder, ranks, self.assumed)
        self.rows: list[tuple[int, int, ChakraNode, dict[str, Any]]] = []
        self.met: Counter[tuple[Any, ...]] = Counter()
        self.groups: dict[str, list[str]] = {}
        self.ours = True

    # ---- one rank ----------------------------------------------------------------------------------

    def rank(self, rank: int, head: dict[str, Any], nodes: list[ChakraNode]) -> None:
        """Take the nodes of one rank; the ops are added in `trace`, when all groups are known."""
        if rank >= MOST_RANKS:
            raise TraceError(f"more than {MOST_RANKS} ranks")
        ours = head.get("tiersim") is not None
        self.ours = self.ours and ours
        if ours:
            self.tensors.declare(rank, head["tiersim"], self.meta)
        seen: Counter[tuple[Any, ...]] = Counter()
        for place, node in enumerate(nodes):
            if node.type not in RUN:
                self.left_out[f"nodes of {node.type}"] += 1
            elif not self.added and node.text("why") in ("move", "recompute"):
                self.left_out[f"{node.text('why')} nodes"] += 1
                continue
            group = self._group(node, rank, seen)
            if group:
                self.groups.setdefault(group, []).append(KIND[node.type])
            # a plan may change the order of ops; the original computation has the order of the trace
            order = node.number("order" if self.added else "op", most=1 << 40) if ours else place
            self.rows.append((place if order is None else order, rank, node, {"group": group, "ours": ours}))

    def _group(self, node: ChakraNode, rank: int, seen: Counter[tuple[Any, ...]]) -> str:
        """The name of the group that joins a node with nodes of other ranks, "" for none."""
        if node.text("group"):
            return node.text("group")[:300]
        if node.type == "COMM_COLL_NODE":
            key: tuple[Any, ...] = (node.text("pg_name")[:80] or "all", node.attrs.get("comm_type"))
        elif node.type in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
            send = node.type == "COMM_SEND_NODE"
            ends = node.number("comm_src"), node.number("comm_dst")
            source, target = (rank if end is None else end for end in ends)
            key = (source, target, node.number("comm_tag") or 0, send)
        else:
            return ""
        seen[key] += 1
        return ".".join(map(str, (*(key[:3] if len(key) == 4 else key), seen[key] - 1)))

    # ---- the trace ---------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """The trace of all ranks; their nodes alternate, so that the order within each rank is kept."""
        self.rows.sort(key=lambda row: (row[0], row[1]))
        for _, rank, node, more in self.rows:
            if node.type in RUN:
                self._add(rank, node, more)
            else:
                self.tensors.pass_on(rank, node)
        self.meta["assumed"] = {key: count for key, count in sorted(self.assumed.items()) if count}
        self.meta["left_out"] = {key: count for key, count in sorted(self.left_out.items()) if count}
        outputs, carry = self.tensors.ends(exact=not self.added)
        return self.builder.build(outputs=outputs, carry=carry)

    def _add(self, rank: int, node: ChakraNode, more: dict[str, Any]) -> None:
        phase = node.text("phase")
        if phase not in PHASES:
            phase = phase_of((node.name,)) or "forward"
        kind = node.text("kind")
        if kind not in KINDS:
            kind = KIND.get(node.type) or kind_of(node.name, phase)
        inputs, reads, writes, shapes = self.tensors.of(rank, node, phase)
        moved = node.number("comm_size", "tensor_size")
        duration = node.number("duration_ns")
        if duration is None and (node.duration or not node.number("num_ops")):
            duration = node.duration
        group = more["group"] if self._complete(more["group"]) else ""
        if more["group"] and not group:
            self.assumed["communication with ranks that were not read"] += 1
        if kind in ("send", "recv") and not group:
            kind = "copy"
        modelled = not self.added and node.attrs.get("modelled") is True
        touched = node.number("bytes") if more["ours"] and node.text("why") != "move" else moved
        flops = node.number("num_ops", most=1 << 60)
        self.builder.op(
            self._name(rank, node, more),
            kind,
            reads=reads,
            writes=writes,
            phase=phase,
            layer=whole(node.attrs["layer"], f"node {node.id}: layer", -1, 1 << 30) if "layer" in node.attrs else -1,
            flops=flops if flops is not None else min(1 << 60, flops_of(node.name, inputs, shapes)),
            bytes=touched,
            workspace=node.number("workspace") or 0,
            device=rank,
            priority=node.number("comm_priority", most=1 << 30) or 0,
            group=group,
            ring=self._ring(node, group, ours=more["ours"]) if kind == "collective" and group else None,
            random=bool(RANDOM.search(node.name)) if node.attrs.get("random") is None else node.attrs["random"] is True,
            duration=None if modelled else duration,
            dtype=node.text("dtype")[:20],
            views=self.tensors.places(reads, writes),
        )

    def _ring(self, node: ChakraNode, group: str, *, ours: bool) -> Ring | None:
        """How the ranks of a collective exchange: as we wrote it, or as the type of a collective says."""
        ranks = len(self.groups[group])
        if ours:
            axis, passes = node.text("axis"), node.number("passes", most=1 << 20)
            return Ring(axis, ranks, passes) if axis in AXES and passes else None
        number = node.number("comm_type")
        if number is None or number >= len(COLLECTIVES):
            return None
        kind = COLLECTIVES[number]
        return Ring("expert" if kind == "ALL_TO_ALL" else "data", ranks, 2 if kind == "ALL_REDUCE" else 1)

    def _name(self, rank: int, node: ChakraNode, more: dict[str, Any]) -> str:
        if more["ours"] and not self.added:
            return node.name
        return f"{rank}.{node.id}.{node.name}" if self.ranks > 1 else f"{node.id}.{node.name}"

    def _complete(self, group: str) -> bool:
        kinds = self.groups.get(group, [])
        return len(kinds) > 1 and (set(kinds) == {"collective"} or sorted(kinds) == ["recv", "send"])
