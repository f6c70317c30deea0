"""Selective recomputation: run again only what is large and cheap in a transformer layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from sim.errors import PolicyError, near
from sim.plan import Plan, Problem
from sim.policies.base import Policy
from sim.solvers.regions import Region, layer_regions, rerun_regions
from sim.solvers.runs import Ledger, runs

MODES = ("attention_core", "all_but_matmul")
CORE = ".attn.core"
EXPENSIVE = ("matmul", "conv", "attention")


@dataclass(frozen=True, kw_only=True)
class SelectiveRecompute(Policy):
    """Keep what is dear to compute, run the rest of a layer again before its backward.

    recompute="attention_core": the products with K and V, the softmax and its dropout run again, and the
        matrices of sequence x sequence entries go. Source: Korthikanti et al., "Reducing Activation
        Recomputation in Large Transformer Models", MLSys 2023, arXiv:2205.05198, section 4.2. Bounds: on
        their model the activations of a layer fall from sbh (34 + 5as/h) to 34 sbh bytes, for
        4 B s^2 h more FLOPs a layer; that is s/(18h) of an iteration's, where the paper counts s/(6h).
    recompute="all_but_matmul": results of matrix products, convolutions and fused attention stay, all
        else in a layer runs again. Source: PyTorch's `create_selective_checkpoint_contexts` with such a
        list round every layer.
    Departs: PyTorch's cache also holds a product that nobody reads again, until the layer's backward
        begins; here it goes after its last read.

    recompute: one of the two. early_stop: run again only as far as backward needs it, as PyTorch does;
    None takes each source's way: the whole core (Megatron), or early (PyTorch).
    Raises PolicyError where the trace has no layers or, for "attention_core", no op named
    `….attn.core.…`: fused attention keeps no matrices, so there is nothing to run again.
    """

    recomputes = True
    needs = frozenset({"layers"})
    fidelity = "code"

    recompute: str = "attention_core"
    early_stop: bool | None = None

    def __post_init__(self) -> None:
        if self.recompute not in MODES:
            wrong = near(self.recompute, MODES)
            raise PolicyError(f"policy 'selective_recompute': recompute is {self.recompute!r}{wrong}")

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations, layer by layer."""
        ledger = Ledger(problem.trace)
        layers = layer_regions(ledger, "selective_recompute")
        core = self.recompute == "attention_core"
        stop = not core if self.early_stop is None else self.early_stop
        if core:
            again = rerun_regions(ledger, self._cores(ledger, layers), early_stop=stop)
        else:
            ops = problem.trace.ops
            keep = {op for layer in layers for op in layer.forward if ops[op].kind in EXPENSIVE}
            again = rerun_regions(ledger, layers, early_stop=stop, keep=keep)
        return Plan(problem.trace, runs(ledger, again).actions())

    def _cores(self, ledger: Ledger, layers: list[Region]) -> list[Region]:
        names = ledger.trace.op_columns.name
        found, fused = [], ""
        for layer in layers:
            for is_core, group in groupby(layer.forward, key=lambda op: CORE + "." in names[op]):
                if is_core:
                    found.append(Region(tuple(group), layer.backward))
            fused = fused or next((names[op] for op in layer.forward if names[op].endswith(CORE)), "")
        if not found:
            why = f"{fused!r} is fused and keeps no matrices" if fused else f"no op is named '…{CORE}.…'"
            raise PolicyError(f"policy 'selective_recompute' finds no attention core to run again: {why}")
        return found
