"""torchtune's activation offloading: copies on a stream of their own, a few behind forward, one ahead in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Annotated

import numpy as np
from annotated_types import Ge

from sim.errors import PolicyError
from sim.plan import Action, Drop, Move, Plan, Problem, Wait
from sim.policies.base import Policy, by_parameter
from sim.policies.saved_copies import Packed, Save, following, forward_passes, saves_of, with_copies
from sim.policies.sharing import rewriting, shared
from sim.solvers.cascade import cascade
from sim.trace.chain import BACKWARD, backward_ops
from sim.trace.graph import Trace
from sim.trace.layers import blocks, has_layers, layer_runs, op_layers
from sim.trace.op import KIND_CODE
from sim.trace.tensor import ROLE_CODE

PRODUCTS = (KIND_CODE["matmul"], KIND_CODE["conv"])


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Policy):
    """Copy what autograd saves to the host beside the computation, and fetch each backward op's part one op ahead.

    Forward: each saved copy goes out as soon as it is saved, and its tensor is held on the device until the fifth save
    after it; then the device waits for that copy and releases the tensor. The first backward op that needs what was
    saved finds the last few tensors still there; when it has run, the device waits for their copies and releases them,
    too. Each further one waits for its own tensors, whose copies begin when the one before the previous has ended. The
    output head and the loss keep what they save.
    Source: torchtune, `training/_activation_offloading.py` (`OffloadActivations`, by PyTorch's saved-tensor hooks),
        with its defaults; TRL has the same class.
    Bounds: in forward the device holds as many saved copies as the stash has places; one op ahead in backward, whose
        stall is what a copy takes longer than one op. Each saved byte crosses the link twice, and where a tensor
        is saved by several ops, once for each. Slower than `swap_all` where single ops are shorter than their copies,
        since that looks a block ahead: the published rule, which holds little memory and knows no graph.
    Departs: the published copies share one stream, so that none goes back before all are out; here the two directions
        may overlap for the last few copies of forward. A tensor that the stash has just released is fetched only then,
        there also while the first backward op runs. As in `save_on_cpu`, a saved tensor that no kernel reads is
        not copied, a tensor is saved when the forward op has run whose backward ops read it, and a copy that
        stands for a tensor takes device memory until it is out. The processor is taken to run ahead of the device, as
        it does with kernels of some length. Tensors beyond the host's capacity go on to the next tier behind it.

    use_streams: False for copies for which the device waits at once, in both directions.
    max_fwd_stash_size: how many saves later the device waits for a copy in forward.
    min_offload_size: bytes below which a tensor stays.
    duplicates: False copies each tensor once, after its last forward use, for all its backward readers.
    checkpointed: whether each layer is checkpointed, so that autograd saves the layers' inputs alone, and a layer's
        backward is one node of its graph. The policy does not recompute: combine it with one that does.
    head: whether what the last product outside the layers saves, and what is saved after it, is offloaded as well.
    Raises PolicyError for a platform without a host tier.
    """

    moves = True
    saves = MappingProxyType({"copy": "PyTorch copies to the host straight from the saved tensor"})
    needs = frozenset({"host"})
    fidelity = "code"
    plans_from = "machine"
    rarely = "tensors of random nets are smaller than what is offloaded"
    other_values = by_parameter(
        use_streams=False,
        max_fwd_stash_size=1,
        min_offload_size=1 << 22,
        duplicates=False,
        checkpointed=True,
        head=True,
    )

    use_streams: bool = True
    max_fwd_stash_size: Annotated[int, Ge(1)] = 5
    min_offload_size: Annotated[int, Ge(0)] = 1024
    duplicates: bool = True
    checkpointed: bool = False
    head: bool = False

    @property
    def rewrites(self) -> bool:  # type: ignore[override]
        """Whether tensors are added for further copies of one."""
        return self.duplicates and not self.checkpointed

    def plan(self, problem: Problem) -> Plan:
        """A move out, a wait and a release, a move back and a wait for each saved copy."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        platform, bytes = problem.platform, problem.trace.tensor_columns.bytes
        if platform.host is None:
            raise PolicyError(f"offload_activations: {platform.name} has no host tier to copy to")
        host, homes = platform.host.name, tuple(platform.home(each).name for each in range(problem.trace.devices))
        key = self, host, homes, (bytes > 0).tobytes(), (bytes >= self.min_offload_size).tobytes()
        plan = rewriting(problem.trace, key, (), lambda: self._copied(problem.trace, host, homes))
        actions = cascade(plan.trace, platform, plan.actions, host)
        return plan if actions is plan.actions else replace(plan, actions=actions)

    def _copied(self, given: Trace, host: str, homes: Sequence[str]) -> Plan:
        """The plan, whatever of the host's tensors go on to a tier behind it."""
        saves = saves_of(given, duplicates=self.rewrites)
        if self.checkpointed:
            saves = _of_layers(given, saves)
        stays = set() if self.head else _of_the_head(given)
        kept = set(given.outputs)
        offloaded = [save for save in saves if self._is_offloaded(given, save.tensor) and save.tensor not in kept]
        trace, packed = with_copies(given, [save for save in offloaded if save.at not in stays])
        # torch counts every save, also of what is not offloaded
        order = {save: i for i, save in enumerate(sorted(saves, key=lambda save: (save.at, save.used_until)))}
        actions: list[Action] = []
        for device in range(trace.devices):
            own = [one for one in packed if trace.op_columns.device[one.readers[0]] == device]
            stash = self.max_fwd_stash_size if self.use_streams else 0
            streams = _Streams(trace, device, host, homes[device], stash)
            actions += streams.actions(own, [order[one.save] for one in own])
        return Plan(trace, actions)

    def _is_offloaded(self, trace: Trace, tensor: int) -> bool:
        columns = trace.tensor_columns
        large = columns.bytes[tensor] >= self.min_offload_size
        return bool(large and columns.role[tensor] != ROLE_CODE["weight"] and tensor not in trace.outputs)


class _Streams:
    """What one device's computing stream and its stream of copies do, in program order.

    stash: how many saves later the computing stream waits for a copy out; 0 for at once, both ways.
    """

    def __init__(self, trace: Trace, device: int, host: str, home: str, stash: int) -> None:
        self.host, self.home, self.places = host, home, stash
        ops = np.flatnonzero(trace.op_columns.device == device).tolist()
        self.next = following(trace)
        phase = trace.op_columns.phase
        passes = groupby((op for op in ops if phase[op] <= BACKWARD), lambda op: bool(phase[op] == BACKWARD))
        runs = [list(run) for is_backward, run in passes if is_backward]
        self.begin = {op: run[0] for run in runs for op in run}  # backward op -> the first of its pass
        self.copies: list[Action] = []
        self.waits: list[Action] = []
        self.absent_from: dict[int, int] = {}  # copy -> the op before which the device has released it
        self.latest = -1  # the op before which the last fetch began

    def actions(self, packed: Sequence[Packed], numbers: Sequence[int]) -> list[Action]:
        """What is copied and waited for. numbers: of each saved copy, its position among all saves."""
        nodes: dict[int, list[int]] = {}
        for i, one in enumerate(packed):
            nodes.setdefault(one.save.node, []).append(i)
        unpacked = [(min(packed[i].readers[0] for i in members), 0, members) for members in nodes.values()]
        stash: dict[int, int] = {}  # saved copies whose tensors the device still holds, and their numbers
        ends: list[int] = []  # of each node of this pass for which copies were fetched, its last op
        firsts = sorted(op for op, _, _ in unpacked)
        following_node = dict(pairwise(firsts))
        for op, is_save, members in sorted([*unpacked, *((one.at, 1, [i]) for i, one in enumerate(packed))]):
            if is_save:
                (i,) = members
                for j in [j for j, number in stash.items() if number <= numbers[i] - self.places]:
                    self._release(packed[j], after=op)
                    del stash[j]
                self.copies.append(Move(packed[i].copy, self.host, keep=packed[i].used_until >= 0, after=op))
                stash[i] = numbers[i]
                if not self.places:
                    self._release(packed[i], after=op)
                    del stash[i]
                continue
            end = max(packed[i].ends for i in members)
            if absent := [packed[i].copy for i in members if i not in stash]:
                ends = [last for last in ends if self.begin.get(last) == self.begin[op]]
                self._load(op, absent, ends)
                ends.append(end)
            if end in self.next:  # where gradients of weights come later, the next node is there before this one ends
                free = min(self.next[end], following_node.get(op, self.next[end]))
                for i in stash:
                    self._release(packed[i], before=free, held=i in members)
            stash.clear()
        return [*self.copies, *self.waits]  # at one anchor copies start before the device waits

    def _release(self, one: Packed, *, after: int | None = None, before: int | None = None, held: bool = False) -> None:
        """Wait for a copy out, and release what it is a copy of, unless a backward op holds it until its last use."""
        self.copies.append(Wait(one.copy, after=after, before=before))
        if one.used_until < 0 or held:
            return  # a tensor that stands for it left with its copy
        if after is not None and after < one.used_until:
            after = one.used_until
        self.copies.append(Drop(one.copy, after=after, before=before))
        self.absent_from[one.copy] = before if before is not None else -1

    def _load(self, op: int, copies: Sequence[int], ends: Sequence[int]) -> None:
        """Fetch what a node unpacks, from the end of the node before the previous one on, in the order of the nodes.

        ends: the last ops of the nodes of this pass for which copies were fetched before.
        """
        begin = self.begin[op] if self.places else op
        if ends:
            begin = max(begin, self.latest)
        if len(ends) > 1:
            begin = max(begin, self.next.get(ends[-2], op))
        for copy in copies:
            begin = min(max(begin, self.absent_from.get(copy, -1)), op)
            self.copies.append(Move(copy, self.home, before=begin))
            self.waits.append(Wait(copy, before=op))
        self.latest = begin


def _of_the_head(trace: Trace) -> set[int]:
    """The forward ops from the output head on: the last product of each pass, if it belongs to no layer."""
    kind, layer, layered = trace.op_columns.kind, op_layers(trace), has_layers(trace)
    found: set[int] = set()
    for run in forward_passes(trace):
        products = [op for op in run.forward if kind[op] in PRODUCTS]
        if products and not (layered and layer[products[-1]] >= 0):
            found.update(op for op in run.forward if op >= products[-1])
    return found


def _of_layers(trace: Trace, saves: Sequence[Save]) -> list[Save]:
    """What is saved of what enters a layer, each unpacked when the backward of its first reader's layer begins."""
    entering = {t for block in blocks(trace) if block.layer >= 0 for t in block.inputs}
    runs = {op: run for run in layer_runs(trace, backward_ops(trace).tolist()) for op in run}
    kept = [(save, runs[save.readers[0]]) for save in saves if save.tensor in entering]
    return [save._replace(node=run[0], ends=run[-1]) for save, run in kept]
