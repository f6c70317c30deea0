"""The modules that a framework can wrap: for each layer of a trace its path, and the ops of each of its calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import PolicyError
from sim.solvers.regions import Region, layer_regions
from sim.solvers.schedule import TraceIndex
from sim.trace.graph import Trace
from sim.trace.layers import has_layers, op_layers

LISTS = {
    "gpt2": "transformer.h.*",
    "llama": "model.layers.*",
    "mixtral": "model.layers.*",
    "nemotron": "model.layers.*",
    "megatron": "decoder.layers.*",
    "gpt": "gpt.decoder.layers.*",
    "bert": "bert.encoder.layer.*",
}
"""Where the layers of a transformer by name are in Hugging Face's model of its family (`…ForCausalLM`, `LMHeadModel`,
`BertForPreTraining`), in Megatron-LM's `GPTModel`, and in PaddleNLP's `GPTForCausalLM`."""

ATTENTION = re.compile(r"_scaled_dot_product_")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
BY_KIND = {"matmul": "product", "attention": "attention", "conv": "convolution"}


@dataclass(frozen=True)
class Module:
    """A module that can be wrapped.

    path: of the module in the model.
    calls: per call of an iteration its forward ops, with the backward ops of the layer that it is.
    """

    path: str
    calls: tuple[Region, ...]

    @property
    def forward(self) -> tuple[int, ...]:
        """The forward ops of all its calls."""
        return tuple(op for call in self.calls for op in call.forward)

    @property
    def backward(self) -> frozenset[int]:
        """The backward ops of all its calls."""
        return frozenset(op for call in self.calls for op in call.backward)


def is_captured(trace: Trace) -> bool:
    """Whether the ops of a trace are those that PyTorch dispatched, named after its modules."""
    names = trace.meta.get("layer_names")
    return isinstance(names, (list, tuple)) and "torch" in trace.meta


def modules_of(trace: Trace, layers: str | None = None) -> tuple[Module, ...]:
    """The layers of a trace as modules, in order. Layers of one path are calls of one module.

    layers: paths of the layers in the model, with `*` for the number: "model.layers.*". By default those that the
        trace was captured from, or those of Hugging Face's model of that family.

    Raises PolicyError where the trace has no layers, or nothing says where they are in the model.
    """
    if not has_layers(trace):
        raise PolicyError("export: no op of this trace has a layer, so there is no module to wrap")
    index = TraceIndex(trace)
    layer = op_layers(trace).tolist()
    regions = layer_regions(index, "export")
    numbers = sorted({layer[region.forward[0]] for region in regions})
    path_of = dict(zip(numbers, _paths(trace, numbers, layers), strict=True))
    calls: dict[str, list[Region]] = {path_of[k]: [] for k in numbers}
    for region in regions:
        calls[path_of[layer[region.forward[0]]]].append(region)
    return tuple(Module(path, tuple(found)) for path, found in calls.items())


def _paths(trace: Trace, numbers: Sequence[int], layers: str | None) -> list[str]:
    if layers is not None:
        if layers.count("*") != 1:
            raise PolicyError(f"export: layers {layers!r}: expected a path with one '*' for the number: model.layers.*")
        return [layers.replace("*", str(k)) for k in numbers]
    if is_captured(trace):
        names = [str(name) for name in trace.meta["layer_names"]]
        if max(numbers) >= len(names):
            raise PolicyError(f"export: the trace names {len(names)} layers, and an op is in layer {max(numbers)}")
        return [names[k] for k in numbers]
    family = str(trace.meta.get("family", ""))
    if family not in LISTS:
        raise PolicyError(
            "export: the trace does not say where its layers are in the model; say so: --layers 'model.layers.*'"
        )
    return [LISTS[family].replace("*", str(k)) for k in numbers]


def calls_of(modules: Sequence[Module]) -> list[tuple[int, ...]]:
    """Per call of modules that run one after the other its forward ops."""
    calls = zip(*(module.calls for module in modules), strict=True)
    return [tuple(op for part in call for op in part.forward) for call in calls]


# ---- what PyTorch calls an op --------------------------------------------------------------------


def dispatched(trace: Trace, op: int) -> str:
    """The name under which exported code counts an op, "" where the trace does not tell.

    Matrix products and fused attention have one name each, since which of their kernels runs depends on biases, types
    and the device; any other op has PyTorch's own. Of a trace that was not captured only products, convolutions and
    attention are known: each of them is one call.
    """
    if not is_captured(trace):
        return BY_KIND.get(trace.ops[op].kind, "")
    words = trace.op_columns.name[op].split(".")
    while len(words) > 1 and words[-1].isdecimal():  # the number of an op whose name was taken
        words.pop()
    short = words[-1]
    if short in PRODUCTS:
        return "product"
    return "attention" if ATTENTION.match(short) else short


def counted(trace: Trace, ops: Sequence[int]) -> list[tuple[str, int]]:
    """Per op its name, and how many of that name come before it among these."""
    seen: Counter[str] = Counter()
    found = []
    for op in ops:
        name = dispatched(trace, op)
        found.append((name, seen[name]))
        seen[name] += 1
    return found
