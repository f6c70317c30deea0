"""The tensors of Chakra nodes: those they list, those of this simulator's own files, or one per node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from sim.errors import TraceError
from sim.trace.builder import TraceBuilder
from sim.trace.tensor import ROLES
from workloads.importers.aten import DTYPES
from workloads.importers.chakra_nodes import ChakraNode
from workloads.importers.execution_nodes import Seen, tensors_in, written
from workloads.importers.reading import need, parse_json, texts, whole
from workloads.importers.storages import Storages

Shapes = list[tuple[int, ...]]


@dataclass
class Tensors:
    """Which tensors a node reads and writes, and which of them lie in others.

    view_of: per view the tensor in whose storage it lies.
    Storages are keyed (rank, number) where nodes list tensors, (rank, node, "made") where they do not.
    """

    builder: TraceBuilder
    ranks: int
    assumed: Counter[str]
    storages: Storages = field(init=False)
    given: dict[Hashable, list[Any]] = field(default_factory=dict)
    outputs: list[Hashable] = field(default_factory=list)
    carry: list[tuple[Hashable, Hashable]] = field(default_factory=list)
    made_by: dict[tuple[int, int], tuple[Hashable, ...]] = field(default_factory=dict)
    size: dict[Hashable, int] = field(default_factory=dict)
    now: dict[Hashable, int] = field(default_factory=dict)
    lives: Counter[Hashable] = field(default_factory=Counter)
    overwritten: set[int] = field(default_factory=set)
    view_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.storages = Storages(self.builder)

    # ---- files that this simulator wrote -------------------------------------------------------------

    def declare(self, rank: int, text: Any, meta: dict[str, Any]) -> None:
        """Read the table of tensors at the head of a file written by this simulator."""
        head = need(parse_json(need(text, str, "tiersim"), "tiersim"), dict, "tiersim")
        for key, value in need(head.get("meta", {}), dict, "tiersim: meta").items():
            meta.setdefault(key, value) if key != "model" else meta.update(model=value)
        for row in need(head.get("tensors", []), list, "tiersim: tensors"):
            number, name, size, role, layer, dtype, replaces = need(row, list, "tiersim: a tensor")
            where = f"tiersim: tensor {number}"
            if role not in ROLES:
                raise TraceError(f"{where}: role {str(role)[:40]!r} is unknown")
            whole(layer, f"{where}: layer", -1, 1 << 30)
            whole(replaces, f"{where}: replaces", -1, 1 << 31)
            row = [texts(name, where), whole(size, f"{where}: bytes"), role, layer, texts(dtype, where), replaces]
            self.given[whole(number, where, 0, 1 << 31)] = row
        pairs = need(head.get("carry", []), list, "tiersim: carry")
        self.outputs += [
            whole(t, "tiersim: outputs", 0, 1 << 31) for t in need(head.get("outputs", []), list, "outputs")
        ]
        for pair in pairs:
            last, first = need(pair, list, "tiersim: carry")
            self.carry.append((whole(last, "tiersim: carry"), whole(first, "tiersim: carry")))

    def ends(self, *, exact: bool) -> tuple[list[int] | None, list[tuple[int, int]] | None]:
        """Outputs and carry: those of this simulator's own file if the original computation is requested, else None."""
        if self.given and exact:
            outputs = [self.now[t] for t in dict.fromkeys(self.outputs) if t in self.now]
            pairs = dict.fromkeys(self.carry)
            return outputs, [(self.now[a], self.now[b]) for a, b in pairs if a in self.now and b in self.now]
        return None, None

    # ---- one node --------------------------------------------------------------------------------------

    def of(self, rank: int, node: ChakraNode, phase: str) -> tuple[Shapes, list[int], list[int], Shapes]:
        """For one node: shapes of its inputs, ids that it reads, ids that it writes, shapes of its outputs."""
        given = self._listed(node, node.inputs, "inputs")
        made = self._listed(node, node.outputs, "outputs")
        if self.given:
            read = {self._known(seen): seen.storage for seen in given}
            made = list({seen.tensor: seen for seen in made}.values())
            writes = [self._next(seen) for seen in made]
            # where a copy came back into another storage, it stands for the views, too, which had none of the bytes
            reads = [t for t in read if self.view_of.get(t, t) in read]
            stored = {storage: t for t, storage in read.items() if t not in self.view_of}
            for t, seen in zip(writes, made, strict=True):
                if self.given[seen.tensor][5] < 0 and seen.storage in stored:
                    self.view_of[t] = stored[seen.storage]
            return [], reads, writes, []
        if not given and not made:
            return [], *self._plain(rank, node, phase), []
        return [s.shape for s in given], *self._stored(rank, node, phase, given, made), [s.shape for s in made]

    def places(self, reads: list[int], writes: list[int]) -> list[int]:
        """Per result the place in `reads` of the tensor in whose storage it lies, -1 where it has its own."""
        return [reads.index(self.view_of[t]) if t in self.view_of else -1 for t in writes]

    def pass_on(self, rank: int, node: ChakraNode) -> None:
        """Leave a node out: nodes that depend on it inherit its dependencies."""
        self.made_by[rank, node.id] = self._from(rank, node)

    def _from(self, rank: int, node: ChakraNode) -> tuple[Hashable, ...]:
        return tuple(dict.fromkeys(key for dep in node.deps for key in self.made_by.get((rank, dep), ())))[:4096]

    def _listed(self, node: ChakraNode, side: tuple[Any, Any, Any], what: str) -> list[Seen]:
        values, shapes, types = side
        if not isinstance(values, list):
            return []
        return tensors_in((values, shapes, types, None), f"node {node.id} ({node.name}): {what}")

    def _known(self, seen: Seen) -> int:
        """A tensor of the file's table that a node reads; one without a producer exists from the start."""
        key = seen.tensor
        if key not in self.now:
            self._declared(key, None)
        return self.now[key]

    def _next(self, seen: Seen) -> int:
        key = seen.tensor
        old = self.given[key][5] if key in self.given else -1
        taken = None
        if old >= 0:
            if old not in self.now:
                self._declared(old, None)
            if self.now[old] not in self.overwritten:
                taken = self.now[old]
                self.overwritten.add(taken)
        return self._declared(key, taken)

    def _declared(self, key: int, taken: int | None) -> int:
        if key not in self.given:
            raise TraceError(f"tensor {key} is not in the table of tensors")
        name, size, role, layer, dtype, _ = self.given[key]
        count = self.lives[key]
        self.lives[key] += 1
        label = f"{name}.again{count}" if count else name
        self.now[key] = self.builder.tensor(label, size, role, layer=layer, dtype=dtype, replaces=taken)
        return self.now[key]

    def _plain(self, rank: int, node: ChakraNode, phase: str) -> tuple[list[int], list[int]]:
        size = node.number("comm_size", "tensor_size") or 0
        if node.type in ("MEM_STORE_NODE", "COMM_SEND_NODE"):
            size = 0
        key = (rank, node.id, "made")
        reads = [self.storages.now[k] for k in self._from(rank, node)]
        self.assumed["results of nodes that list no tensors"] += 1
        self.made_by[rank, node.id] = (key,)
        return reads, [self.storages.make(key, f"r{rank}.n{node.id}", size, _role(phase))]

    def _stored(
        self, rank: int, node: ChakraNode, phase: str, given: list[Seen], made: list[Seen]
    ) -> tuple[list[int], list[int]]:
        now, schema = self.storages.now, node.text("op_schema")
        inside = {(rank, seen.storage): seen for seen in given if seen.bytes}
        for key, seen in inside.items():
            if key not in now:
                self.assumed["tensors there from the start, taken as inputs"] += 1
                self.lives[key] += 1
                self.storages.make(key, self._label(key), seen.bytes, "input", dtype=DTYPES.get(seen.kind, ""))
        marked = written(node.name, schema)[0]
        changed = {(rank, seen.storage) for seen in given if seen.argument in marked and seen.bytes}
        # results of other nodes that this one depends on without listing them
        reads = [now[key] for key in (*inside, *self._from(rank, node))]
        fresh = {(rank, seen.storage): seen for seen in made if seen.bytes and (rank, seen.storage) not in inside}
        writes = [self.storages.change(key, self._label(key)) for key in sorted(changed)]
        for key, seen in fresh.items():
            self.lives[key] += 1
            dtype = DTYPES.get(seen.kind, "")
            writes.append(self.storages.make(key, self._label(key), seen.bytes, _role(phase), dtype=dtype))
        self.made_by[rank, node.id] = ()
        if not writes:  # a token for nodes that depend only on this one
            token = (rank, node.id, "done")
            writes.append(self.storages.make(token, f"r{rank}.n{node.id}.done", 0, "temporary"))
            self.made_by[rank, node.id] = (token,)
        return list(dict.fromkeys(reads)), writes

    def _label(self, key: tuple[int, int]) -> str:
        again = f".{self.lives[key]}" if self.lives[key] > 1 else ""
        return (f"r{key[0]}." if self.ranks > 1 else "") + f"s{key[1]}{again}"


def _role(phase: str) -> str:
    return "activation" if phase == "forward" else "temporary"
