"""Full recomputation: keep the input of every layer, run the layer again before its backward."""

from __future__ import annotations

from dataclasses import dataclass

from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.rewrites.rewrite import hold_longer
from sim.solvers.checkpoints import by_anchor, cached_casts, held_by, region_reruns
from sim.solvers.regions import layer_regions
from sim.solvers.schedule import TraceIndex, schedule_of


@dataclass(frozen=True, kw_only=True)
class FullRecompute(RecomputationPlanner):
    """Checkpoint every layer: what enters or leaves it stays, all else goes and is made again in backward.

    A layer is a run of forward ops with the same layer index, on one device, for one microbatch. What it
    makes inside goes after its last forward read. Just before the first backward op that reads anything that
    autograd saved in the layer its forward ops run again, in order. Random ops draw the same numbers again. What
    enters a layer is held, as the arguments of a checkpoint are, until the last such op has run.
    Source: the practice of every framework (`torch.utils.checkpoint` round each layer); Chen, Xu, Zhang,
        Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174, with a segment
        a layer.
    Bounds: activations of one layer and one tensor a layer; at most one more forward. Plans in O(ops).
        An op that writes in place runs again where the layer makes again what it overwrites.
    Departs: what overwrites a value of another layer does not run again, and its result stays. PyTorch would run
        it on what it has overwritten, which gives another value. What only other layers read lies there, and
        nothing runs again for it alone.

    early_stop: run again only as far as the last op whose result the layer's backward wants, as PyTorch's
    non-reentrant checkpoint does; else the whole layer, as that does after `set_checkpoint_early_stop(False)`.
    reentrant: as PyTorch's checkpoint does with `use_reentrant=True`: the whole layer runs again before the first of
    its backward ops, and until the last of them its arguments, its results and their gradients are held.
    skip_last: leave a layer alone whose backward follows its forward at once.
    autocast_cache: copies of weights in a narrower type stay until the forward pass ends, as PyTorch's
    autocast keeps them; else they go like all else.
    Raises PolicyError where no forward op has a layer.
    """

    recomputes = True
    rewrites = True
    needs = frozenset({"layers"})
    fidelity = "code"
    rarely = "it holds what enters a layer for longer only where the layer's last backward op does not read it"
    other_values = by_parameter(early_stop=False, reentrant=True, skip_last=True, autocast_cache=False)

    early_stop: bool = True
    reentrant: bool = False
    skip_last: bool = False
    autocast_cache: bool = True

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations, layer by layer."""
        index = TraceIndex(problem.trace)
        regions = layer_regions(index, "full_recompute")
        reruns = region_reruns(
            index,
            regions,
            early_stop=self.early_stop and not self.reentrant,
            skip_last=self.skip_last,
            before="start" if self.reentrant else "saved",
        )
        held = held_by(index, reruns, reentrant=self.reentrant)
        trace = hold_longer(problem.trace, held.until)
        hold = {**held.drops, **(cached_casts(index, regions) if self.autocast_cache else {})}
        return Plan(
            trace, self.finished(problem, schedule_of(TraceIndex(trace), by_anchor(reruns), hold=hold)).actions()
        )
