"""Full recomputation: keep the input of every layer, run the layer again before its backward."""

from __future__ import annotations

from dataclasses import dataclass

from sim.plan import Plan, Problem
from sim.policies.base import PlansFrom, by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.sharing import shared
from sim.rewrites.rewrite import hold_longer
from sim.solvers.checkpoints import by_anchor, cached_casts, held_by, named, region_reruns
from sim.solvers.regions import layer_regions
from sim.solvers.schedule import TraceIndex, schedule_of


@dataclass(frozen=True, kw_only=True)
class FullRecompute(RecomputationPlanner):
    """Checkpoint every layer: keep its inputs and outputs, drop everything else and recompute it in backward.

    A layer is a run of forward ops with the same layer index, on one device, for one microbatch. Tensors inside it
    are dropped after their last forward read. Just before the first backward op that reads anything that
    autograd saved in the layer, its forward ops are recomputed in order. Random ops draw the same numbers as before.
    The layer's inputs are held, as the arguments of a checkpoint are, until the last such op has run.
    Source: the practice of every framework (`torch.utils.checkpoint` round each layer); Chen, Xu, Zhang,
        Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174, with one segment
        per layer.
    Bounds: the activations of one layer and one tensor per layer; at most one more forward pass. Plans in O(ops).
        An op that writes in place is recomputed where the layer recomputes the value that it overwrites.
    Departs: an op that overwrites a value of another layer is not recomputed, and its result stays. PyTorch would run
        it on its own earlier result, which gives another value. A tensor that only other layers read stays resident,
        and nothing is recomputed for it alone. With early_stop=False, a recomputed result that nothing reads any more
        is freed at once; PyTorch keeps all that the recomputed function returns until it ends, which for a layer
        with two results was seen to take 4 % more in backward. With early_stop, PyTorch runs every op up to the last
        that saves something; those whose results nobody needs do not run here. A result is dropped after its last
        read in the forward pass, or where the trace says that no variable of the program names it any more
        (`Op.unbinds`, which captured traces have).

    early_stop: recompute only up to the last op whose result the layer's backward needs, as PyTorch's
        non-reentrant checkpoint does; else the whole layer, as that does after `set_checkpoint_early_stop(False)`.
    reentrant: as PyTorch's checkpoint does with `use_reentrant=True`: the whole layer is recomputed before the first of
        its backward ops, and its arguments, results and their gradients are held until the last of them.
    skip_last: do not recompute a layer whose backward follows its forward at once.
    autocast_cache: copies of weights in a narrower type stay until the forward pass ends, as PyTorch's
        autocast keeps them; else they are dropped like everything else.
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

    @property
    def plans_from(self) -> PlansFrom:  # type: ignore[override]
        """What is kept after all depends on times and on the budget."""
        return "problem" if self.remove_unnecessary else "structure"

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations, layer by layer."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
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
        hold = {**named(index, regions), **held.drops, **(cached_casts(index, regions) if self.autocast_cache else {})}
        if trace is not problem.trace:
            index = TraceIndex(trace)
        schedule = schedule_of(index, by_anchor(reruns), hold=hold, once_recomputed=held.handed)
        return Plan(trace, self.finished(problem, schedule).actions())
