"""PyTorch execution traces: the JSON of `ExecutionTraceObserver` (schema 1.0 and later, also "1.1.1-chakra").

The format has every call with its caller, its schema, and the identity of its input and output tensors: [tensor,
storage, offset, elements, bytes per element, device]. It lacks durations, FLOPs and the release of storages. FLOPs of
matmuls, convolutions and attention are computed from the shapes; times come from the platform's cost model.

Import: a call is an op if it calls only allocations and views, or if none of its calls produced its result. Views are
folded into their storage. A storage number is an address and is reused: a call that returns a storage that was not
among its arguments starts a new one. So does a call that overwrites all of a storage (`out=`, `fill_`, `zero_`,
`copy_`), unless the storage exists from the start and has been used before. Arguments that the schema marks with "!"
are written in place.

Assumptions: a storage is released after its last reader (real programs hold some longer, so the peak is a lower bound).
A storage that no call produced exists from the start and stays. Of these, one that the update writes is a weight if
forward or backward reads it, else optimizer state; one written elsewhere is a weight (a buffer); one never written is
an input, or a weight in a trace without an update, unless it contains whole numbers.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sim.errors import TraceError
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads.importers.aten import DTYPES, executed_of, flops_of, is_silent, kind_of, phase_of
from workloads.importers.execution_nodes import Node, Seen, read_node
from workloads.importers.optrace import RANDOM
from workloads.importers.reading import MAX_BYTES, need
from workloads.importers.storages import Storages
from workloads.importers.streaming import open_document

Life = tuple[int, int]
"""One storage: its number, and how often that number was used before."""


def read_execution_trace(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a trace from the JSON of PyTorch's ExecutionTraceObserver.

    Only the device with the most bytes is imported; tensors on others are counted in meta["left_out"].

    path: the file, plain or gzipped.
    max_bytes: the most bytes to read, after unpacking.

    Raises TraceError naming the file and the node.
    """
    with open_document(path, max_bytes) as document:
        document.find("nodes")
        return build_execution_trace(document.rows("nodes"), document.about, str(path))


def build_execution_trace(rows: Iterable[Any], about: dict[str, Any], path: str) -> Trace:
    """Like `read_execution_trace`, given the nodes, which are streamed. Errors do not name the file.

    rows: the nodes.
    about: the other members of the document, complete when all nodes have been read.
    path: of the file.
    """
    return _Reader(path, rows, about).trace()


class _Reader:
    def __init__(self, path: str, rows: Iterable[Any], about: dict[str, Any]) -> None:
        self.left_out: Counter[str] = Counter()
        self.nodes: dict[int, Node] = {}
        for i, row in enumerate(rows):
            node = read_node(need(row, dict, f"node {i}"), f"node {i}")
            if node.id in self.nodes:
                raise TraceError(f"two nodes have the id {node.id}")
            node.name, node.schema = sys.intern(node.name), sys.intern(node.schema)
            self.nodes[node.id] = node
        if not self.nodes:
            raise TraceError("it has no nodes")
        self.order = sorted(self.nodes)
        self._keep_one_device()
        self.meta: dict[str, Any] = {"model": "imported", "source": f"import of {os.path.basename(path)}"}
        self.meta |= {"format": "execution trace", "schema": str(about.get("schema", ""))[:40]}
        self.builder = TraceBuilder(self.meta)
        self.storages = Storages(self.builder)
        self.roles: dict[Life, str] = {}

    def _keep_one_device(self) -> None:
        held: dict[str, dict[int, int]] = {}
        for node in self.nodes.values():
            for seen in (*node.inputs, *node.outputs):
                held.setdefault(seen.device, {})[seen.storage] = seen.bytes
        self.device = max(held, key=lambda d: sum(held[d].values()), default="")
        self.left_out["storages of other devices"] = sum(len(held[d]) for d in held if d != self.device)
        for node in self.nodes.values():
            node.inputs = [seen for seen in node.inputs if seen.device == self.device]
            node.outputs = [seen for seen in node.outputs if seen.device == self.device]

    # ---- which calls are ops -----------------------------------------------------------------------

    def _choose(self) -> list[Node]:
        """The calls that are ops, in the order in which they run, and the silent calls outside ops."""
        nodes = self.nodes
        for i in self.order:
            node = nodes[i]
            node.last, node.silent = i, is_silent(node.name)
        callers = set()
        for i in reversed(self.order):  # a call has a larger number than its caller
            node = nodes[i]
            above = nodes.get(node.parent)
            if above is not None and above.id < i:
                above.last = max(above.last, node.last)
                above.silent = above.silent and node.silent
                if not node.silent:
                    callers.add(above.id)
        chosen: list[Node] = []
        for i in self.order:
            node = nodes[i]
            above = nodes.get(node.parent)
            if above is not None and above.id < i:
                leaf = above.id not in callers and not above.silent and bool(above.schema or above.outputs)
                node.inner = above.inner or leaf
            if not node.inner and (i not in callers) and (node.inputs or node.outputs):
                chosen.append(node)
        return self._with_callers(chosen, callers)

    def _with_callers(self, chosen: list[Node], callers: set[int]) -> list[Node]:
        """Add the calls that touch a storage that none of their own calls touches, after these."""
        kept = list(chosen)
        below: dict[int, set[int]] = {node.id: _touched(node) for node in chosen}
        for i in reversed(self.order):
            node, above = self.nodes[i], self.nodes.get(self.nodes[i].parent)
            if i in callers and not node.inner:
                touched_inside = below.setdefault(i, set())
                if not is_silent(node.name) and not _touched(node) <= touched_inside:
                    node.given_on = touched_inside & {seen.storage for seen in node.outputs}
                    kept.append(node)
                    touched_inside |= _touched(node)
            if above is not None and above.id < i and i in below:
                mine = below.pop(i)
                more = below.setdefault(above.id, set())
                if len(mine) > len(more):  # merge the smaller set into the larger
                    mine, more = more, mine
                    below[above.id] = more
                more |= mine
        return sorted(kept, key=lambda n: (n.last, 1, -n.id) if n.id in callers else (n.id, 0, 0))

    # ---- storages -----------------------------------------------------------------------------------

    def trace(self) -> Trace:
        ops = self._choose()
        self._phases = self._find_phases()
        steps = [step for step in map(self._step, ops) if step is not None]
        self._lives(steps)
        return self._build(steps)

    def _find_phases(self) -> dict[int, str]:
        own: dict[int, str | None] = {}
        for i in self.order:
            node = self.nodes[i]
            above = own.get(node.parent) if node.parent < i else None
            own[i] = phase_of((node.name,)) or above
        phases, last = {}, "forward"
        for i in self.order:
            last = own[i] or last
            phases[i] = last
        return phases

    def _step(self, node: Node) -> _Step | None:
        given: dict[int, Seen] = {}
        for seen in node.inputs:
            if seen.bytes and (seen.storage not in given or given[seen.storage].bytes < seen.bytes):
                given[seen.storage] = seen
        written = {s for s in _written(node, node.written) if s in given}
        for seen in node.outputs:
            if seen.bytes and seen.storage in node.given_on and seen.storage not in given:
                given[seen.storage] = seen
                written.add(seen.storage)
        fresh = {seen.storage: seen for seen in node.outputs if seen.bytes and seen.storage not in given}
        needed = {seen.storage for seen in node.inputs if seen.argument not in node.overwritten}
        overwritten = _written(node, node.overwritten) - needed - node.given_on
        if not node.silent and not node.schema and not fresh and not written:
            self.left_out["calls that return nothing"] += 1
            return None
        if not given and not fresh:
            return None
        return _Step(node, node.silent, given, fresh, written, overwritten & written)

    def _lives(self, steps: list[_Step]) -> None:
        """Number the successive storages at each address; determine their sizes and uses."""
        self.size: dict[Life, int] = {}
        self.kind: dict[Life, str] = {}
        self.uses: dict[Life, set[str]] = {}
        now: dict[int, Life] = {}
        produced: set[Life] = set()
        untouched: set[Life] = set()  # allocated but not touched since
        for step in steps:
            for storage in step.fresh:
                step.began[storage] = (storage, now[storage][1] + 1 if storage in now else 0)
            for storage in step.overwritten:
                old = now.get(storage)
                if old is None:
                    step.began[storage] = (storage, 0)
                elif old in produced and old not in untouched and step.given[storage].covers(self.size[old]):
                    step.began[storage] = (storage, old[1] + 1)
            produced.update(step.began.values())
            if step.silent:
                untouched.update(step.began.values())
            else:
                untouched.difference_update(now[s] for s in step.given if s in now)
            for storage, seen in step.given.items():
                life = now[storage] = step.began.get(storage) or now.get(storage, (storage, 0))
                step.lives[storage] = life
                self._note(life, seen)
                if not step.silent:
                    phase = self._phases[step.node.id]
                    self.uses.setdefault(life, set()).add(("write " if storage in step.written else "read ") + phase)
            for storage, seen in step.fresh.items():
                life = now[storage] = step.lives[storage] = step.began[storage]
                self._note(life, seen)

    def _note(self, life: Life, seen: Seen) -> None:
        self.size[life] = max(self.size.get(life, 0), seen.bytes)
        self.kind.setdefault(life, seen.kind)

    # ---- building ------------------------------------------------------------------------------------

    def _build(self, steps: list[_Step]) -> Trace:
        started = {life for step in steps for life in step.began.values()}
        updates = any("update" in use for uses in self.uses.values() for use in uses)
        initial = [life for life in self.size if life not in started and life in self.uses]
        for life in initial:
            role = self.roles[life] = self._role_at_start(life, updates)
            self.storages.make(life, _name(life), self.size[life], role, dtype=DTYPES.get(self.kind[life], ""))
        at_start = Counter(self.roles.values())
        self.unallocated: dict[Life, str] = {}
        for step in steps:
            if step.silent:
                self.unallocated |= dict.fromkeys(step.began.values(), step.node.name)
                self.left_out["allocations and views"] += 1
            else:
                self._add(step)
        roles_assumed = {f"there from the start, role {role}": count for role, count in sorted(at_start.items())}
        self.meta["assumed"] = {**roles_assumed, "storages released after their last reader": len(started)}
        self.meta["left_out"] = {key: count for key, count in sorted(self.left_out.items()) if count}
        now, first = self.storages.now, self.storages.first
        return self.builder.build(outputs=[now[k] for k in initial], carry=[(now[k], first[k]) for k in initial])

    def _role_at_start(self, life: Life, updates: bool) -> str:
        uses = self.uses[life]
        before = any(not use.endswith("update") for use in uses)
        if "write update" in uses:
            return "weight" if before else "optimizer_state"
        if any(use.startswith("write") for use in uses):
            return "weight"
        if not updates and self.kind[life] in DTYPES:
            return "weight"
        return "input"

    def _add(self, step: _Step) -> None:
        node, now = step.node, self.storages.now
        phase = self._phases[node.id]
        allocated = dict.fromkeys(step.began.values())
        for storage in step.given:
            life = step.lives[storage]
            if life in self.unallocated and life not in allocated:  # allocated by a call that is not an op
                if storage in step.written:
                    allocated[life] = None
                    del self.unallocated[life]
                else:
                    name = self.unallocated.pop(life)
                    self.builder.op(
                        f"{node.id}.{name}.s{life[0]}.{life[1]}", writes=[self._allocate(life, phase)], phase=phase
                    )
        for life in allocated:
            self.unallocated.pop(life, None)
        reads = [now[step.lives[s]] for s in step.given if step.lives[s] in now and step.lives[s] not in allocated]
        changed = [step.lives[s] for s in step.given if s in step.written and step.lives[s] in now]
        changed = [life for life in dict.fromkeys(changed) if life not in allocated]
        writes = [self.storages.change(k, _name(k)) for k in changed]
        writes += [self._allocate(life, phase) for life in allocated]
        shapes = [s.shape for s in node.inputs]
        flops = min(1 << 60, flops_of(node.name, shapes, [s.shape for s in node.outputs]))
        self.builder.op(
            f"{node.id}.{node.name}",
            kind_of(node.name, phase),
            reads=list(dict.fromkeys(reads)),
            writes=writes,
            phase=phase,
            flops=executed_of(node.name, shapes, flops, node.causal),
            counted=flops,
            random=bool(RANDOM.search(node.name)),
            dtype=next((DTYPES[s.kind] for s in (*node.inputs, *node.outputs) if s.kind in DTYPES), ""),
        )

    def _allocate(self, life: Life, phase: str) -> int:
        dtype = DTYPES.get(self.kind[life], "")
        return self.storages.make(life, _name(life), self.size[life], self._role(life, phase), dtype=dtype)

    def _role(self, life: Life, phase: str) -> str:
        if life in self.roles:  # later versions keep the role of the first
            return self.roles[life]
        role = "temporary"
        if phase == "forward":
            role = "activation"
        elif phase == "backward" and any(use.endswith("update") for use in self.uses.get(life, ())):
            role = "gradient"
        self.roles[life] = role
        return role


@dataclass(slots=True)
class _Step:
    """A call with its storages, by address.

    node: the call.
    silent: whether it runs no kernel.
    given, fresh: tensors among its arguments, and among its results but not its arguments.
    written, overwritten: storages that it writes in place, and those of them that it overwrites completely.
    lives: the storage that each address refers to.
    began: the storages that start with this call.
    """

    node: Node
    silent: bool
    given: dict[int, Seen]
    fresh: dict[int, Seen]
    written: set[int]
    overwritten: set[int]
    lives: dict[int, Life] = field(default_factory=dict)
    began: dict[int, Life] = field(default_factory=dict)


def _name(life: Life) -> str:
    return f"s{life[0]}" + (f".{life[1]}" if life[1] else "")


def _written(node: Node, arguments: frozenset[int]) -> set[int]:
    return {seen.storage for seen in node.inputs if seen.argument in arguments and seen.bytes}


def _touched(node: Node) -> set[int]:
    return {seen.storage for seen in (*node.inputs, *node.outputs) if seen.bytes}
