"""PyTorch execution traces: the JSON of `ExecutionTraceObserver` (schema 1.0 and later, also "1.1.1-chakra").

What it carries: every call with its caller, its schema, and the identity of the tensors it was given and returned:
[tensor, storage, offset, elements, bytes an element, device]. What it does not: durations, FLOPs and when a storage
was released. FLOPs of matmuls, convolutions and attention are computed from the shapes; times come from the
platform's model.

What becomes of it: a call that calls nothing but allocations and views is an op; so is one whose result none of its
calls made. Views fold into their storage. A storage number is an address and is used again: a call that returns a
storage which it was not given begins a new one; so does one that overwrites all of a storage (`out=`, `fill_`,
`zero_`, `copy_`) unless that was there from the start and had been used before. Arguments that the schema marks with
"!" are written in place. Assumed: a storage goes after its last reader (real programs hold some longer, so the peak
is a lower bound); a storage that no call made was there from the start and stays; of those, one that the update
writes is a weight if forward or backward read it, else optimizer state; one written elsewhere is a weight (a buffer);
one never written is an input, or a weight in a trace without an update unless it holds whole numbers.
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
from workloads.importers.aten import DTYPES, flops_of, is_silent, kind_of, phase_of
from workloads.importers.execution_nodes import Node, Seen, read_node
from workloads.importers.optrace import RANDOM
from workloads.importers.reading import MAX_BYTES, need
from workloads.importers.storages import Storages
from workloads.importers.streaming import open_document

Life = tuple[int, int]
"""One storage: its number, and how often that number had been used before."""


def read_execution_trace(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Trace:
    """A trace from the JSON of PyTorch's ExecutionTraceObserver.

    Tensors on another device than the one that holds most are left out and counted in meta["left_out"].
    Raises TraceError naming the file and the node.
    """
    with open_document(path, max_bytes) as document:
        document.find("nodes")
        return build_execution_trace(document.rows("nodes"), document.about, str(path))


def build_execution_trace(rows: Iterable[Any], about: dict[str, Any], path: str) -> Trace:
    """As `read_execution_trace`, of its nodes, which are read once and not held.

    about: the other members of the document, there when all nodes have been read. Errors do not name the file.
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
            raise TraceError("no node in it")
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
        """The calls that are ops, in the order in which they run; silent calls outside ops stand among them."""
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
        """Add the calls that touch a storage which none of their calls touches, after these."""
        kept = list(chosen)
        below: dict[int, set[int]] = {node.id: _touched(node) for node in chosen}
        for i in reversed(self.order):
            node, above = self.nodes[i], self.nodes.get(self.nodes[i].parent)
            if i in callers and not node.inner:
                inside = below.setdefault(i, set())
                if not is_silent(node.name) and not _touched(node) <= inside:
                    node.given_on = inside & {seen.storage for seen in node.outputs}
                    kept.append(node)
                    inside |= _touched(node)
            if above is not None and above.id < i and i in below:
                mine = below.pop(i)
                more = below.setdefault(above.id, set())
                if len(mine) > len(more):  # join the smaller into the larger
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
        whole_ones = _written(node, node.overwritten) - needed - node.given_on
        if not node.silent and not node.schema and not fresh and not written:
            self.left_out["calls that return nothing"] += 1
            return None
        if not given and not fresh:
            return None
        return _Step(node, node.silent, given, fresh, written, whole_ones & written)

    def _lives(self, steps: list[_Step]) -> None:
        """Number the uses of each address; find sizes, and how each storage is used."""
        self.size: dict[Life, int] = {}
        self.kind: dict[Life, str] = {}
        self.uses: dict[Life, set[str]] = {}
        now: dict[int, Life] = {}
        made: set[Life] = set()
        bare: set[Life] = set()  # allocated, and not touched since
        for step in steps:
            for storage in step.fresh:
                step.began[storage] = (storage, now[storage][1] + 1 if storage in now else 0)
            for storage in step.overwritten:
                old = now.get(storage)
                if old is None:
                    step.began[storage] = (storage, 0)
                elif old in made and old not in bare and step.given[storage].covers(self.size[old]):
                    step.began[storage] = (storage, old[1] + 1)
            made.update(step.began.values())
            if step.silent:
                bare.update(step.began.values())
            else:
                bare.difference_update(now[s] for s in step.given if s in now)
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
        began = {life for step in steps for life in step.began.values()}
        updates = any("update" in use for uses in self.uses.values() for use in uses)
        there = [life for life in self.size if life not in began and life in self.uses]
        for life in there:
            role = self.roles[life] = self._role_at_start(life, updates)
            self.storages.make(life, _name(life), self.size[life], role, dtype=DTYPES.get(self.kind[life], ""))
        at_start = Counter(self.roles.values())
        self.unborn: dict[Life, str] = {}
        for step in steps:
            if step.silent:
                self.unborn |= dict.fromkeys(step.began.values(), step.node.name)
                self.left_out["allocations and views"] += 1
            else:
                self._add(step)
        roles_assumed = {f"there from the start, role {role}": count for role, count in sorted(at_start.items())}
        self.meta["assumed"] = {**roles_assumed, "storages released after their last reader": len(began)}
        self.meta["left_out"] = {key: count for key, count in sorted(self.left_out.items()) if count}
        now, first = self.storages.now, self.storages.first
        return self.builder.build(outputs=[now[k] for k in there], carry=[(now[k], first[k]) for k in there])

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
        made = dict.fromkeys(step.began.values())
        for storage in step.given:
            life = step.lives[storage]
            if life in self.unborn and life not in made:  # allocated by a call that is no op
                if storage in step.written:
                    made[life] = None
                    del self.unborn[life]
                else:
                    name = self.unborn.pop(life)
                    self.builder.op(
                        f"{node.id}.{name}.s{life[0]}.{life[1]}", writes=[self._come(life, phase)], phase=phase
                    )
        for life in made:
            self.unborn.pop(life, None)
        reads = [now[step.lives[s]] for s in step.given if step.lives[s] in now and step.lives[s] not in made]
        changed = [step.lives[s] for s in step.given if s in step.written and step.lives[s] in now]
        changed = [life for life in dict.fromkeys(changed) if life not in made]
        writes = [self.storages.change(k, _name(k), self._role(k, phase)) for k in changed]
        writes += [self._come(life, phase) for life in made]
        self.builder.op(
            f"{node.id}.{node.name}",
            kind_of(node.name, phase),
            reads=list(dict.fromkeys(reads)),
            writes=writes,
            phase=phase,
            flops=min(1 << 60, flops_of(node.name, [s.shape for s in node.inputs], [s.shape for s in node.outputs])),
            random=bool(RANDOM.search(node.name)),
            dtype=next((DTYPES[s.kind] for s in (*node.inputs, *node.outputs) if s.kind in DTYPES), ""),
        )

    def _come(self, life: Life, phase: str) -> int:
        dtype = DTYPES.get(self.kind[life], "")
        return self.storages.make(life, _name(life), self.size[life], self._role(life, phase), dtype=dtype)

    def _role(self, life: Life, phase: str) -> str:
        if life in self.roles:  # a later version is for what the first one was for
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
    """A call with the storages it was given, made and wrote; lives and began: which life of each address."""

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
