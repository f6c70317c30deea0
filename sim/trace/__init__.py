"""What has to be computed: tensors, ops and the graph that they form."""

from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.op import KINDS, PHASES, Implementation, Op
from sim.trace.tensor import ROLES, Tensor

__all__ = ["KINDS", "PHASES", "ROLES", "Implementation", "Op", "Tensor", "Trace", "TraceBuilder"]
