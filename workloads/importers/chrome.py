"""PyTorch profiler traces: the Chrome JSON that `export_chrome_trace` writes, plain or gzipped.

The format has calls with start and duration on each thread, shapes and element types of their inputs (`record_shapes`),
every allocation and release with address, bytes and the allocator's total (`profile_memory`), the calls of modules
(`with_stack`), from which layers follow (see `workloads.importers.modules`), and GPU kernels with their launches. It
lacks the tensors that an op reads (inputs have no identity), FLOPs, and everything allocated before the recording:
parameters and optimizer state, unless the module is given (see `workloads.importers.weights`), and the batch.

Import: the ops that run something, in order, with their measured time (that of their kernels, where there are kernels).
An allocation is a tensor that lives from the op of its allocation to the op in or after which it was released (its
release point, which is not a read); an allocation that lives within one op is workspace. A replay that keeps everything
therefore has exactly the allocator's own peak.

Assumptions: an input is the newest live storage of equal size that was there before the call, preferring those that
the forward op of the same sequence number touched and those that are released as the op ends; one that is expanded has
the size of what it shows, and a part of a tensor that of the whole. Inputs without a match were allocated before the
recording and are left out. An op whose name ends in `_` writes its first input in place, or what has just been
allocated with the size of that input; a call whose result was allocated before other calls within it (the copy of a
bias) writes that in place. Memory that the allocator held before the first event is one tensor that stays to the end.
A recording without marked steps is one iteration, however often it calls an optimizer; if that is more than once,
meta["assumed"] says so. Time between ops (Python, the launch of views) is not replayed; it is in
meta["between_ops_ns"].
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from sim.errors import TraceError
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads.importers.allocations import Allocations, Event, Part
from workloads.importers.aten import DTYPES, executed_of, flops_of, is_causal, kind_of, phase_of, results_of
from workloads.importers.calls import Call, Timeline
from workloads.importers.gradients import ADD, STORES, gradients, held_before, stored
from workloads.importers.inputs import KEPT, Input, inputs_of
from workloads.importers.modules import PREFIX, ModuleCalls, ModuleLayers
from workloads.importers.optrace import PRODUCTS, RANDOM
from workloads.importers.reading import MAX_BYTES, microseconds, need, texts, whole
from workloads.importers.storages import Storages
from workloads.importers.streaming import open_document
from workloads.importers.weight_reads import Outermost, WeightReads
from workloads.importers.weights import KnownModule, KnownWeights

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "privateuse1_runtime")
SEQUENCE = "Sequence number"
"""An argument of a call that is used beside its inputs; others are not stored."""
VALUES = "Concrete Inputs"
"""And, of attention, what says whether its mask is causal; of a convolution, its steps and which gradients it has."""
MARK = re.compile(r"ProfilerStep#(\d{1,12})")
UPDATE = "Optimizer.step#"
"""How the profiler's names of an optimizer's steps begin."""
MOST_TOUCHED = 64
"""How many storages are remembered per sequence number."""
ROUNDING = 512
CPU = 0
"""The type of the CPU among the devices of memory events."""


def read_chrome(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_BYTES,
    step: int | None = None,
    known: KnownModule | None = None,
) -> Trace:
    """Read a trace of one step from a PyTorch profiler's Chrome JSON.

    Only the device with the most allocated bytes is imported; events of others are counted in meta["left_out"].
    meta["steps"] lists the steps of the recording, meta["step"] is the imported one.

    path: the file, plain or gzipped.
    max_bytes: the most bytes to read, after unpacking.
    step: the N of the profiler's mark `ProfilerStep#N`; None for the last complete step. A recording without marks is
        one step.
    known: the module, with what it held before the recording (see `workloads.importers.weights`).

    Raises TraceError naming the file and the entry.
    """
    with open_document(path, max_bytes) as document:
        document.find("traceEvents")
        return build_chrome(document.rows("traceEvents"), str(path), step, known)


def build_chrome(rows: Iterable[Any], path: str, step: int | None = None, known: KnownModule | None = None) -> Trace:
    """Like `read_chrome`, given the events, which are streamed. Errors do not name the file."""
    return _Reader(path, rows, step, known or KnownModule()).trace()


def _steps(calls: list[Call]) -> dict[int, tuple[int, int, int]]:
    """For each step that the profiler marked: its start and end in ns, and how many ops started in it."""
    marks = {int(found[1]): call for call in calls if not call.is_op and (found := MARK.fullmatch(call.name))}
    starts = sorted(call.start for call in calls if call.is_op)
    return {
        number: (call.start, call.end, bisect_left(starts, call.end) - bisect_left(starts, call.start))
        for number, call in sorted(marks.items())
    }


def _chosen(steps: dict[int, tuple[int, int, int]], step: int | None) -> int | None:
    """The requested step, None if none is marked. A step with less than half of the most ops is incomplete."""
    if step is not None:
        if step not in steps:
            known = f"there are {', '.join(map(str, steps))}" if steps else "it has no marked steps"
            raise TraceError(f"step {step}: is not in the recording; {known}")
        return step
    most = max((ops for _, _, ops in steps.values()), default=0)
    complete = [number for number, (_, _, ops) in steps.items() if ops and 2 * ops >= most]
    return complete[-1] if complete else None


class _Reader:
    def __init__(self, path: str, rows: Iterable[Any], step: int | None, known: KnownModule) -> None:
        self.left_out: Counter[str] = Counter()
        self.assumed: Counter[str] = Counter()
        self.uncounted: Counter[str] = Counter()
        self.calls: list[Call] = []
        self.threads: dict[tuple[str, str], tuple[str, str]] = {}
        self.launches: dict[Any, tuple[int, Any]] = {}
        self.kernels: list[tuple[Any, int]] = []
        self.modules: list[Call] = []
        by_device: dict[tuple[int, int], list[Event]] = {}
        for i, row in enumerate(rows):
            if isinstance(row, dict):
                self._take(row, f"event {i}", by_device)
            else:
                self.left_out["events that are no object"] += 1
        steps = _steps(self.calls)
        chosen = _chosen(steps, step)
        has_memory = any(by_device.values())
        if chosen is not None:
            by_device = self._within(*steps[chosen][:2], by_device)
        elif (updates := sum(call.name.startswith(UPDATE) for call in self.calls)) > 1:
            # several iterations, or several optimizers of one: nothing in the recording tells which
            self.assumed["optimizer steps read as one iteration, since prof.step() marks none"] = updates
        device = self._device(by_device)
        if not self.calls:
            raise TraceError("it has no CPU ops: record with ProfilerActivity.CPU")
        if not has_memory:
            raise TraceError(
                "it has no memory events, so that its tensors are unknown: record with "
                "profile(profile_memory=True, record_shapes=True)"
            )
        self.line = Timeline.of(self.calls, [e.time for e in self.events], [e.time for e in self.events if e.bytes > 0])
        self.calls = self.line.calls
        self.module_calls = ModuleCalls(self.modules, self.calls)
        if not self.line.units:
            raise TraceError("it has no op that runs anything")
        self.meta: dict[str, Any] = {
            "model": "imported",
            "source": f"import of {os.path.basename(path)}",
            "format": "chrome",
        }
        if chosen is not None:
            self.meta |= {"step": chosen, "steps": list(steps)}
        self.meta |= {"device": f"{device[0]}:{device[1]}", "memory_events": len(self.events)}
        self.outermost = Outermost(self.line, self.module_calls)
        paths = self.outermost.paths(known)
        self.layers = ModuleLayers(self.module_calls, {n: p for n, p in paths.items() if p in known.layers})
        if self.layers.names:
            self.meta |= {"layers": len(self.layers.names), "layer_names": list(self.layers.names)}
        self.builder = TraceBuilder(self.meta)
        self.storages = Storages(self.builder)
        trained = {weight.shape for weight in known.weights if weight.is_trained}
        self.stored = [each for each in stored(self.calls) if each.gradient.shape in trained or not known.weights]
        rounding = 1 if device[0] == CPU else ROUNDING
        self.weights = KnownWeights(known, paths, held_before(self.stored), self.storages, rounding)
        self.gradients: set[int] = set()
        self.added_to: dict[int, int] = {}
        self.weight_reads = WeightReads(self.line, self.module_calls, self.outermost, self.weights)
        self.size: dict[int, int] = {}
        self.live: dict[int, dict[int, None]] = {}
        self.touched_by_sequence: dict[int, list[int]] = {}
        self.later = 0
        self.first_unit = self._first_units()
        self.made: list[tuple[int, int]] = []  # unit and storage, in order

    def _within(
        self, start: int, end: int, by_device: dict[tuple[int, int], list[Event]]
    ) -> dict[tuple[int, int], list[Event]]:
        """Leave what began in a span of time, in ns."""
        self.calls = [call for call in self.calls if start <= call.start < end]
        self.modules = [call for call in self.modules if start <= call.start < end]
        return {device: [e for e in events if start <= e.time < end] for device, events in by_device.items()}

    def _device(self, by_device: dict[tuple[int, int], list[Event]]) -> tuple[int, int]:
        """The device with the most allocated bytes, whose events are read."""
        amount = {device: sum(abs(e.bytes) for e in events) for device, events in by_device.items()}
        device = max(by_device, key=lambda d: amount[d], default=(0, -1))
        self.events = sorted(by_device.get(device, []), key=lambda e: e.time)  # stable: equal times keep their order
        self.left_out["memory events of other devices"] = sum(map(len, by_device.values())) - len(self.events)
        return device

    # ---- reading ---------------------------------------------------------------------------------

    def _take(self, row: dict[str, Any], where: str, by_device: dict[tuple[int, int], list[Event]]) -> None:
        kind, category = row.get("ph"), row.get("cat")
        if kind == "X" and category in ("cpu_op", "user_annotation", *KERNELS, *LAUNCHES):
            args = need(row.get("args", {}), dict, f"{where}: args")
            start, span, thread = self._when(row, where)
            if category in KERNELS:
                self.kernels.append((_plain(args.get("correlation")), span))
            elif category in LAUNCHES:
                self.launches[_plain(args.get("correlation"))] = (start, thread)
            else:
                name = sys.intern(texts(row.get("name"), f"{where}: name"))
                kept = (SEQUENCE, *KEPT, VALUES) if "attention" in name or "conv" in name else (SEQUENCE, *KEPT)
                args = {key: args[key] for key in kept if key in args}
                self.calls.append(Call(name, start, start + span, thread, args, category == "cpu_op"))
        elif kind == "X" and category == "python_function" and str(row.get("name")).startswith(PREFIX):
            start, span, thread = self._when(row, where)
            name = sys.intern(texts(row["name"], f"{where}: name"))
            self.modules.append(Call(name, start, start + span, thread, {}, False))
        elif row.get("name") == "[memory]":
            args = need(row.get("args"), dict, f"{where}: args")
            device = (_small(args.get("Device Type", 0)), _small(args.get("Device Id", -1)))
            size = whole(args.get("Bytes"), f"{where}: Bytes", -(1 << 50))
            address = whole(args.get("Addr"), f"{where}: Addr", -(1 << 64), 1 << 64)
            total = args.get("Total Allocated")
            total = None if total is None else whole(total, f"{where}: Total Allocated", -(1 << 50))
            time = microseconds(row.get("ts"), f"{where}: ts")
            if size:
                by_device.setdefault(device, []).append(Event(time, size, address, total))
        elif kind == "X":
            self.left_out[f"{str(category)[:40]} events"] += 1

    def _when(self, row: dict[str, Any], where: str) -> tuple[int, int, tuple[str, str]]:
        """Start and duration of a call in ns, and its thread."""
        start = microseconds(row.get("ts"), f"{where}: ts")
        span = microseconds(row.get("dur", 0), f"{where}: dur")
        thread = (str(row.get("pid"))[:80], str(row.get("tid"))[:80])
        return start, span, self.threads.setdefault(thread, thread)

    def _durations(self) -> list[int]:
        """For each unit, the time of the kernels it launched; its own time if the file has no kernels."""
        units = self.line.units
        if not self.kernels:
            return [unit.time_ns for unit in units]
        starts: dict[Any, list[int]] = {}
        places: dict[Any, list[int]] = {}
        for i, unit in enumerate(units):
            thread = self.calls[unit.call].thread
            starts.setdefault(thread, []).append(unit.start)
            places.setdefault(thread, []).append(i)
        spans = [0] * len(units)
        for correlation, span in self.kernels:
            time, thread = self.launches.get(correlation, (-1, None))
            index = bisect_right(starts.get(thread, []), time) - 1
            if correlation is None or index < 0:
                self.left_out["kernels without a launch"] += 1
            else:
                spans[places[thread][index]] += span
        self.assumed["ops timed by their kernels"] = sum(1 for span in spans if span)
        return spans

    # ---- building ----------------------------------------------------------------------------------

    def trace(self) -> Trace:
        durations = self._durations()
        allocations = Allocations.of(self.events, [unit.start for unit in self.line.units])
        parts, initial, self.size = allocations.parts, allocations.initial, allocations.size
        self.left_out["releases that were not recorded"] = allocations.unrecorded
        keep: list[int] = []
        base = max(0, allocations.base - self.weights.total)
        if base:
            self.assumed["bytes allocated before the recording"] = base
            keep.append(self.builder.tensor("allocated before", base, "weight"))
        phases = self._phases()
        self._find_gradients(allocations, phases)
        for storage in initial:
            self._allocate(storage, "backward")
        if initial:
            # a storage that exists at the start and is released during the recording needs a producer, or it would stay
            tensors = [self.storages.now[s] for s in initial]
            self.builder.op("start", "copy", writes=tensors, bytes=0, duration=0)
        layers = self._layers(phases)
        for part in parts:
            duration = durations[part.unit] if part.first else 0
            self._add(part, phases[part.unit], layers[part.unit], duration)
        left = [s for held in self.live.values() for s in held]
        keep += [self.storages.now[s] for s in sorted(left)]
        self._check_weights()
        held, carry = self.weights.ends()
        units = self.line.units
        self.meta["assumed"] = {key: count for key, count in sorted(self.assumed.items()) if count}
        self.meta["left_out"] = {key: count for key, count in sorted(self.left_out.items()) if count}
        if self.uncounted:
            self.meta["uncounted"] = dict(sorted(self.uncounted.items()))
        start = min(c.start for c in self.calls if c.is_op)
        end = max(c.end for c in self.calls if c.is_op)
        self.meta["recorded_ns"] = end - start
        self.meta["between_ops_ns"] = max(0, end - start - sum(unit.time_ns for unit in units))
        return self.builder.build(outputs=[*keep, *held], carry=carry)

    def _check_weights(self) -> None:
        """Note weights that no op has read. Raises TraceError where none was: they are another module's."""
        if not self.weights.count:
            return
        if not any("Input Dims" in call.args for call in self.calls):
            raise TraceError("module: it has no shapes to match weights by: record with record_shapes=True")
        if self.weights.unread == self.weights.count:
            raise TraceError("module: no op reads a weight of its shapes and types: give the one that was recorded")
        self.left_out["weights that no op reads"] = self.weights.unread
        self.left_out["parameters of the optimizer that the module does not have"] = self.weights.unknown

    def _phases(self) -> list[str]:
        known = [phase_of(self.line.above(unit.call)) for unit in self.line.units]
        if all(phase is None for phase in known):
            self.assumed["ops without a phase, taken as forward"] = len(known)
        # ops directly before a backward pass are a forward pass, also of a second step or microbatch
        following: str | None = None
        for i in reversed(range(len(known))):
            if known[i] is None and following == "backward":
                known[i] = "forward"
            else:
                following = known[i] or following
        # those after the last one belong to the update (clipping), unless a module runs
        for i in range(1, len(known)):
            if known[i] is None and known[i - 1] in ("backward", "update"):
                call = self.calls[self.line.units[i].call]
                known[i] = "update" if self.module_calls.innermost(call.thread, call.start) < 0 else "forward"
        phases, last = [], "forward"
        for phase in known:
            last = phase or last
            phases.append(last)
        return phases

    def _layers(self, phases: list[str]) -> list[int]:
        """The layer of each unit, -1 for none: in backward that of the forward op of the same sequence number.

        What backward runs beside that, between two ops of one layer, belongs to it, too.
        """
        layers, forward = [-1] * len(phases), {}
        before, gap = -1, 0
        for i, (unit, phase) in enumerate(zip(self.line.units, phases)):
            call, sequence = self.calls[unit.call], self._sequence(unit.call)
            if phase == "update":
                continue
            layers[i] = self.layers.at(call.thread, call.start)
            if sequence is not None and (phase == "forward" or self.outermost.is_recomputed(i)):
                forward[sequence] = layers[i]
            if phase == "forward":
                continue
            if layers[i] < 0 and sequence is not None:
                layers[i] = forward.get(sequence, -1)
            if layers[i] >= 0 or sequence in forward:
                if layers[i] == before >= 0:
                    layers[gap:i] = [before] * (i - gap)
                before, gap = layers[i], i + 1
        return layers

    def _allocate(self, storage: int, phase: str, layer: int = -1) -> int:
        role = "activation" if phase == "forward" else "gradient" if storage in self.gradients else "temporary"
        size = self.size[storage]
        self.live.setdefault(size, {})[storage] = None
        return self.storages.make(storage, f"s{storage}", size, role, layer=layer)

    def _add(self, part: Part, phase: str, layer: int, duration: int) -> None:
        call = self.calls[self.line.units[part.unit].call]
        inputs, sequence = inputs_of(call.args), self._sequence(self.line.units[part.unit].call)
        fills, operands = call.name.endswith("_"), inputs if part.first else []
        if fills and operands and operands[0].bytes in part.made.values():
            fills, operands = False, operands[1:]  # it fills what has just been allocated for it: a copy of a bias
        now = self.storages.now
        target, known = self._accumulated(part, operands)
        if target is not None or known is not None:  # adds to a gradient
            fills, operands = False, operands[1:]
        weights: list[int] = []
        if part.first:
            weights, operands = self.weight_reads.of(part.unit, operands, phase, self._sequence, self._is_live)
        self.assumed["weights matched by shape"] += len(weights)
        inner = self._inner(part)
        used = self._match(operands, sequence, inner, part.released, self._just_made(part) if fills else None)
        left = [s for s in inner if s not in part.released]
        changed = used[:1] if fills else [] if part.made else left
        changed = [target] if target is not None else changed
        reads = [now[s] for s in dict.fromkeys((*used, *changed))] + [self.weights.tensor(i) for i in weights]
        writes = [self.storages.change(s, f"s{s}", layer=layer) for s in changed]
        if known is not None:
            reads, writes = [*reads, known[0]], [*writes, known[1]]
        if part.first:
            read, written = self.weights.update(part.unit)
            reads, writes = reads + read, writes + written
        stopped = self._is_stopped(part, inner)
        reads = [] if stopped else reads
        writes += [self._allocate(s, phase, layer) for s in part.made]
        self.made += ((part.unit, s) for s in part.made)
        self.later = 0 if part.first else self.later + 1
        if sequence is not None and phase == "forward":
            touched = (*used, *part.made, *self.touched_by_sequence.get(sequence, ()))  # the last op has the number
            self.touched_by_sequence[sequence] = list(touched[:MOST_TOUCHED])
        if part.first or writes or part.released or part.workspace:
            kind = "other" if stopped else self._kind(part.unit, phase)
            kind = "other" if kind in PRODUCTS and not call.is_main else kind  # what calls a product for it
            shapes = [given.shape for given in inputs]
            flops = self._flops(part.unit, shapes) if part.first and not stopped and call.is_main else 0
            values = call.args.get(VALUES)
            causal = isinstance(values, list) and is_causal(call.name, values)
            if part.first and not flops and kind in PRODUCTS:
                self.uncounted[call.name] += 1
            self.builder.op(
                f"{part.unit}.{call.name}" + ("" if part.first else f".part{self.later}"),
                kind,
                reads=list(dict.fromkeys(reads)),
                writes=writes,
                phase=phase,
                layer=layer,
                flops=executed_of(call.name, shapes, flops, causal),
                counted=flops,
                workspace=part.workspace,
                random=bool(RANDOM.search(call.name)),
                duration=duration,
                dtype=next((DTYPES[given.kind] for given in inputs if given.kind in DTYPES), ""),
                releases=[t for t in (now[s] for s in part.released) if t not in (*reads, *writes)],
            )
        for storage in part.released:
            del self.live[self.size[storage]][storage]

    def _kind(self, unit: int, phase: str) -> str:
        """The kind of an op: that of its own name, or of what looks up for its sake."""
        outer = self.calls[self.outermost.of_unit[unit]].name
        kind = kind_of(outer, phase)
        return kind if kind == "embedding" else kind_of(self.calls[self.line.units[unit].call].name, phase)

    def _flops(self, unit: int, shapes: Sequence[Sequence[int]]) -> int:
        """The FLOPs of an op; of a convolution's kernel those of the op that calls it and says what its result is."""
        call = self.calls[self.line.units[unit].call]
        if "conv" in call.name:
            for _ in range(4):
                values = call.args.get(VALUES)
                given = [each.shape for each in inputs_of(call.args)]
                if isinstance(values, list) and (results := results_of(call.name, given, values)):
                    return flops_of(call.name, given, results)
                if call.parent < 0:
                    break
                call = self.calls[call.parent]
            call = self.calls[self.line.units[unit].call]
        return flops_of(call.name, shapes, ())

    def _is_stopped(self, part: Part, inner: list[int]) -> bool:
        """Whether a recomputed product never ran: a checkpoint that has all that was saved stops within the call."""
        if not part.first or part.made or part.most or inner:
            return False
        return self.calls[self.line.units[part.unit].call].is_main and self.outermost.is_recomputed(part.unit)

    def _inner(self, part: Part) -> list[int]:
        """Of a call's own section, after those of the calls within it, the live storages that these allocated."""
        first = self.first_unit[self.line.units[part.unit].call]
        if not part.first or first == part.unit:
            return []
        made = self.made[bisect_left(self.made, (first, 0)) :]
        return [s for _, s in made if s in self.live.get(self.size[s], ())]

    def _just_made(self, part: Part) -> list[int]:
        """The live storages that the op which calls this one has allocated, or its calls, the newest first."""
        above = self.calls[self.line.units[part.unit].call].parent
        if above < 0 or not self.calls[above].is_op or "::" not in self.calls[above].name:
            return []
        made = self.made[bisect_left(self.made, (self.first_unit[above], 0)) :]
        return [s for _, s in reversed(made) if s in self.live.get(self.size[s], ())]

    def _first_units(self) -> dict[int, int]:
        """Per call the first unit in it."""
        first: dict[int, int] = {}
        for i, unit in enumerate(self.line.units):
            call = unit.call
            while call >= 0 and call not in first:
                first[call] = i
                call = self.calls[call].parent
        return first

    def _accumulated(self, part: Part, operands: Sequence[Input]) -> tuple[int | None, tuple[int, int] | None]:
        """The gradient that an op adds to: its storage, or what it reads and writes of one of before the recording."""
        call = self.line.units[part.unit].call
        above = self.calls[call].parent
        if not part.first or not operands or self.calls[call].name != ADD or above < 0:
            return None, None
        target = self.added_to.get(above)
        if target is not None and target in self.live.get(self.size[target], ()):
            return target, None
        return None, self.weights.accumulate(operands[0]) if self.calls[above].name == STORES else None

    def _find_gradients(self, allocations: Allocations, phases: list[str]) -> None:
        """Know which ops are those of optimizers' steps, and which storages are gradients: also the last step's."""
        is_step = [any(n.startswith(UPDATE) for n in self.line.above(unit.call)) for unit in self.line.units]
        inputs = ((i, inputs_of(self.calls[unit.call].args)) for i, unit in enumerate(self.line.units) if is_step[i])
        self.weights.updated_by(inputs)
        parts = allocations.parts
        backward = (part for part in parts if phases[part.unit] == "backward")
        made = [(self.line.units[part.unit].start, storage) for part in backward for storage in part.made]
        rounded = self.weights.rounded
        self.gradients, self.added_to = gradients(self.stored, self.calls, made, allocations, rounded)
        first = phases.index("backward") if "backward" in phases else len(phases)
        left, early = self.weights.sizes(), [s for part in parts if part.unit < first for s in part.released]
        for storage in sorted(set(allocations.initial).intersection(early)):
            if left[self.size[storage]] > 0:
                left[self.size[storage]] -= 1
                self.gradients.add(storage)

    def _sequence(self, call: int) -> int | None:
        for _ in range(64):
            if call < 0:
                break
            number = self.calls[call].args.get(SEQUENCE)
            if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
                return number
            call = self.calls[call].parent
        return None

    def _is_live(self, given: Input) -> bool:
        """Whether a storage that the recording has allocated has an input's size."""
        return bool(self.live.get(given.bytes) or self.live.get(self.weights.rounded(given.bytes)))

    def _match(
        self,
        inputs: list[Input],
        sequence: int | None,
        inner: Sequence[int],
        leaving: Sequence[int],
        filled: Sequence[int] | None,
    ) -> list[int]:
        """The live storages that are most likely an op's inputs, judged only by size.

        inner: those that are none. leaving: those that are released as soon as it has run.
        filled: where it writes the first one, what that may be before others: one of these, else one that stays, if
            any does.
        """
        first = self.touched_by_sequence.get(sequence, []) if sequence is not None else []
        matched: dict[int, None] = {}

        def free(storages: Iterable[int]) -> Iterator[int]:
            return (s for s in storages if s in held and s not in matched and s not in inner)

        for given in inputs:
            size = given.whole_bytes or given.bytes
            for wanted in dict.fromkeys((size, -(-size // ROUNDING) * ROUNDING)):
                held = self.live.get(wanted, {})
                if given.whole_bytes and any(s in held for s in matched):
                    break  # another part of the same
                going, newest = reversed(leaving), reversed(held)
                if matched:
                    choice = next(free(chain(first, going, newest)), None)
                elif filled is not None:
                    choice = next(free(chain(filled, (s for s in newest if s not in leaving), going)), None)
                else:
                    choice = next(free(chain(going, newest)), None)
                if choice is not None:
                    if next(islice(free(held), 1, None), None) is not None:
                        self.assumed["of these, one of several that fit"] += 1
                    matched[choice] = None
                    self.assumed["inputs matched by size"] += 1
                    break
            else:
                self.left_out["inputs from before the recording, or views of part of a storage"] += 1
        return list(matched)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else None


def _small(value: Any) -> int:
    return value if type(value) is int and -(2**31) <= value < 2**31 else -1
