"""PyTorch's joint graphs, what its own partitioner makes of them, and the same graphs as traces."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.lowering  # the partitioner looks it up as an attribute
from torch import nn
from torch._functorch import config
from torch._functorch import partitioners as theirs
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table

from sim.trace import Trace, TraceBuilder

Partition = tuple[set[str], set[str], set[str], int]


@dataclass
class Joint:
    """A joint graph after common subexpressions have been merged. static: which inputs are parameters."""

    module: torch.fx.GraphModule
    fwd_outputs: int
    static: list[int]
    known: dict[Any, Partition] = field(default_factory=dict)

    def partition(self, budget: float, **options: Any) -> Partition:
        """What PyTorch saves, reruns, and computes in forward, by name; and the bytes saved of what forward makes."""
        key = (budget, *sorted(options.items()))
        if key not in self.known:
            self.known[key] = self._partition(budget, **options)
        return self.known[key]

    def _partition(self, budget: float, **options: Any) -> Partition:
        with config.patch(activation_memory_budget=budget, **options):
            forward, backward = theirs.min_cut_rematerialization_partition(
                self.module, None, num_fwd_outputs=self.fwd_outputs, static_lifetime_input_indices=self.static
            )
        fields = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
        saved = {name for name, node in fields.items() if "tangents" not in name and node.users}
        nodes = {node.name: node for node in self.module.graph.nodes}
        bytes = sum(theirs._size_of(nodes[name]) for name in saved if nodes[name].op != "placeholder")
        first, second = ({n.name for n in part.graph.nodes if n.op == "call_function"} for part in (forward, backward))
        again = {name for name in first & second if nodes[name].target is not operator.getitem}
        return saved, again, first, bytes


def joint(model: nn.Module, *inputs: torch.Tensor, decomposed: bool = True, static: bool = True) -> Joint:
    """The joint graph that AOTAutograd hands to its partitioner."""
    found: list[Joint] = []
    parameters = len(list(model.parameters())) + len(list(model.buffers()))

    def partition(module: Any, args: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        found.append(Joint(module, num_fwd_outputs, list(range(parameters)) if static else []))
        return theirs.min_cut_rematerialization_partition(module, args, num_fwd_outputs=num_fwd_outputs)

    def boxed(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        run = lambda args: module.forward(*args)  # noqa: E731
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    table = select_decomp_table() if decomposed else None
    compiled = aot_module_simplified(
        model, inputs, fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition, decompositions=table
    )
    compiled(*inputs)
    return found[0]


# ---- as a trace ----------------------------------------------------------------------------------


def as_trace(graph: Joint, *, fold: bool = False) -> Trace:
    """Node for node: what depends on a tangent is backward, all else forward; views are copies that touch no bytes.

    fold: views are not there, as in the project's own traces: who reads one reads what it is a view of.
    """
    lists = theirs.get_default_op_list()
    nodes = [node for node in graph.module.graph.nodes if node.op != "output"]
    (last,) = (node for node in graph.module.graph.nodes if node.op == "output")
    results = [node for node in last.args[0][: graph.fwd_outputs] if node is not None]
    b = TraceBuilder({"model": "joint"})
    backward: set[Any] = set()
    tensor: dict[Any, int] = {}
    primals = 0
    for node in nodes:
        if node.op == "placeholder":
            role = "input"
            if "tangents" in node.target:
                backward.add(node)
                role = "gradient"
            else:
                role = "weight" if primals in graph.static else "input"
                primals += 1
            tensor[node] = b.tensor(node.name, theirs._size_of(node), role)
        elif any(one in backward for one in node.all_input_nodes):
            backward.add(node)
    for late in (False, True):
        for node in nodes:
            if node.op != "call_function" or (node in backward) != late or node in tensor:
                continue
            if fold and (lists.is_view(node) or node.target is operator.getitem):
                tensor[node] = tensor[node.all_input_nodes[0]]
            elif node.target is not operator.getitem:
                _op(b, node, tensor, "backward" if late else "forward", lists)
    outputs = [tensor[node] for node in dict.fromkeys(last.args[0]) if node in tensor]
    outputs = [t for t in dict.fromkeys(outputs) if t not in {tensor[n] for n in nodes if n.op == "placeholder"}]
    assert all(node in tensor for node in results)
    return b.build(outputs=outputs, carry=())


def _op(b: TraceBuilder, node: Any, tensor: dict[Any, int], phase: str, lists: Any) -> None:
    value = node.meta["val"]
    joined = node.args[0] if "aten.cat." in str(node.target) else node.all_input_nodes
    reads = [tensor[one] for one in joined]
    if isinstance(value, (tuple, list)):
        parts = {user.args[1]: user for user in node.users}
        writes = []
        for i, one in enumerate(value):
            bytes = one.numel() * one.dtype.itemsize if isinstance(one, torch.Tensor) else 0
            name = parts[i].name if i in parts else f"{node.name}.{i}"
            writes.append(b.tensor(name, bytes))
            if i in parts:
                tensor[parts[i]] = writes[-1]
    else:
        writes = [b.tensor(node.name + ".out", theirs._size_of(node))]
        tensor[node] = writes[0]
    kind, touched = _kind(node, lists)
    flops = int(theirs.estimate_runtime(node)) if lists.is_compute_intensive(node) else 0
    b.op(node.name, kind, phase=phase, reads=reads, writes=writes, flops=flops, bytes=touched, duration=1,
         random=lists.is_random(node))  # fmt: skip


def _kind(node: Any, lists: Any) -> tuple[str, int | None]:
    name = str(node.target)
    if lists.is_compute_intensive(node):
        return ("conv" if "conv" in name else "attention" if "attention" in name else "matmul"), None
    if lists.is_view(node):
        return "copy", 0
    if "aten.cat." in name:
        return "copy", None
    if lists.is_recomputable(node):
        return ("reduce" if isinstance(node.meta["val"], tuple) else "elementwise"), None
    return ("elementwise" if lists.is_random(node) else "other"), None
