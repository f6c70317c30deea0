"""Full recomputation: keep the input of every layer, run the layer again before its backward."""

from __future__ import annotations

from dataclasses import dataclass

from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.solvers.regions import cached_casts, layer_regions, rerun_regions
from sim.solvers.runs import Ledger, runs


@dataclass(frozen=True, kw_only=True)
class FullRecompute(RecomputationPlanner):
    """Checkpoint every layer: what enters or leaves it stays, all else goes and is made again in backward.

    A layer is a run of forward ops with the same layer index, on one device, for one microbatch. What it
    makes inside goes after its last forward read. Just before the first backward op that reads any of it
    the layer's forward ops run again, in order. Random ops draw the same numbers again.
    Source: the practice of every framework (`torch.utils.checkpoint` round each layer); Chen, Xu, Zhang,
        Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174, with a segment
        a layer.
    Bounds: activations of one layer and one tensor a layer; at most one more forward. Plans in O(ops).
        An op that writes in place runs again where the layer makes again what it overwrites.
    Departs: what overwrites a value of another layer does not run again, and its result stays. PyTorch would run
        it on what it has overwritten, which gives another value. What only other layers read lies there, and
        nothing runs again for it alone.

    early_stop: run again only as far as the last op whose result the layer's backward reads, as PyTorch's
    non-reentrant checkpoint does; else the whole layer, as its reentrant one.
    skip_last: leave a layer alone whose backward follows its forward at once.
    autocast_cache: copies of weights in a narrower type stay until the forward pass ends, as PyTorch's
    autocast keeps them; else they go like all else.
    Raises PolicyError where no forward op has a layer.
    """

    recomputes = True
    needs = frozenset({"layers"})
    fidelity = "code"
    other_values = by_parameter(early_stop=False, skip_last=True, autocast_cache=False)

    early_stop: bool = True
    skip_last: bool = False
    autocast_cache: bool = True

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations, layer by layer."""
        ledger = Ledger(problem.trace)
        regions = layer_regions(ledger, "full_recompute")
        again = rerun_regions(ledger, regions, early_stop=self.early_stop, skip_last=self.skip_last)
        hold = cached_casts(ledger, regions) if self.autocast_cache else None
        return Plan(problem.trace, self.finished(problem, runs(ledger, again, hold=hold)).actions())
