"""cDMA: what vDNN offloads is compressed by the copy engines on its way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from sim.declared import Rate
from sim.errors import PolicyError
from sim.log import EventLog
from sim.plan import Move, Plan, Problem
from sim.policies.base import Beside, by_parameter
from sim.policies.offload.vdnn import Vdnn
from sim.rewrites.codecs import code_bytes
from sim.trace.graph import Trace
from sim.units import parse_rate


@dataclass(frozen=True, kw_only=True)
class Cdma(Vdnn):
    """Offload and prefetch as vDNN does, each copy zero-value compressed beside the copy engine.

    Every offloaded tensor is compressed, without a choice: a bit for each element, and those that are not zero. It
    crosses the link and lies on the host in that many bytes, and is restored on its way back. A copy takes as long as
    the slowest of the link, for the compressed bytes, and the codec, for the bytes before compression.
    Source: Rhu, O'Connor, Chatterjee, Pool, Kwon, Keckler, "Compressing DMA Engine: Leveraging Activation Sparsity for
        Training Deep Neural Networks", HPCA 2018, arXiv:1705.01626 (zero-value compression; on top of vDNN).
    Bounds: of fp32 with a fraction z of zeros, 32 / (1 + 32 (1 - z)) times fewer bytes, at most 32; dense data take
        3 % more. Time as for `vdnn`, with these bytes.
    Headline: ratio 2.6 on average (at most 13.8); 32 % faster than vDNN on average, at most 61 %. With the fraction of
        zeros that gives 2.6 in every ReLU's result (`zeros="cdma"`), AlexNet, VGG-16, GoogLeNet and ResNet-50 are 25 to
        52 % faster than with `vdnn` on a P100 where all inputs are offloaded, 3 to 29 % where those of convolutions
        are; the ratio is 1.2 to 2.3, as what pooling or normalisation produces has fewer zeros, or states none.
    Departs: no machine has this codec. Where the profile does not state one (`links.d2h.codec`), the copy engines have
        the throughput that the paper provides for, `codec`. Run-length and dictionary compression, which the
        paper compares, are left out. Of a tensor of which the trace states no zeros (`Tensor.zeros`) none is taken to
        be zero. Compression reads the device's memory beside what computes there, without slowing it down. Where the
        host is too small for what vDNN offloads, the choice of what is moved on to the next tier counts bytes before
        compression; so does a copy from there that passes the host.

    codec: bytes/s, counted before compression; where a link states its own, the slower of the two. None for those of
        the links alone.
    variant, algorithm, heavy, classifier: as for `vdnn`; its passes are tried with compression.
    Notes: as `vdnn`, and `ratio`: bytes offloaded per byte that crosses; `unknown_zeros`, how many tensors state none.
    Raises PolicyError as `vdnn`, and where `codec` is None and a link between device and host states none.
    """

    rewrites = True
    fidelity = "equations"
    saves = MappingProxyType({**Vdnn.saves, "codec": "zeros take one bit each on the link and on the host"})
    other_values = by_parameter(codec=Beside("1 MB/s", variant="all"))

    codec: Rate | None = "200 GB/s"

    def plan(self, problem: Problem) -> Plan:
        """vDNN's plan, made by replays with compression, with compressed copies."""
        rate = self._rate(problem)

        def evaluate(plan: Plan, budget: int | None = None) -> EventLog:
            return problem.evaluate(_compressed(problem, plan, rate), budget)

        measured = replace(problem, evaluate=evaluate)
        plan = _compressed(problem, super().plan(measured), rate)
        away = [t for t in plan.notes["offloaded"] if plan.trace.tensor_columns.bytes[t]]
        whole = sum(int(plan.trace.tensor_columns.bytes[t]) for t in away)
        small = sum(wire_bytes(plan.trace, t) for t in away)
        unknown = sum(t not in plan.trace.tensor_columns.zeros for t in away)
        notes = {**plan.notes, "ratio": whole / small if small else 1.0, "unknown_zeros": unknown}
        return replace(plan, notes=notes)

    def _rate(self, problem: Problem) -> int | None:
        """Bytes/s of the codec, None where only the links say. Raises PolicyError where they do not."""
        platform, host = problem.platform, self._host(problem)
        if self.codec is not None:
            return parse_rate(self.codec) if isinstance(self.codec, str) else int(self.codec)
        for source, target in ((problem.home, host), (host, problem.home)):
            links = [platform.links[i] for i in platform.route(source, target)]
            if not any(link.codec for link in links):
                name = links[0].name
                text = f"link {name!r} has no codec; state one (--set links.{name}.codec='200 GB/s') or `codec`"
                raise PolicyError(f"cdma: {platform.name}: {text}")
        return None


def wire_bytes(trace: Trace, tensor: int) -> int:
    """Bytes of a tensor on the wire; of one that states no zeros, as if none of its elements were zero."""
    it = trace.tensors[tensor]
    return code_bytes("zvc", it if it.zeros is not None else replace(it, zeros=0.0))


def _compressed(problem: Problem, plan: Plan, rate: int | None) -> Plan:
    """The same plan whose copies away from the devices are compressed, and restored on their way back."""
    homes = {problem.platform.home(device).name for device in range(problem.platform.devices)}

    def through(move: Move) -> Move:
        wire = None if move.to in homes else wire_bytes(plan.trace, plan.trace.tensor_id(move.tensor))
        return replace(move, wire=wire, codec=rate)

    return replace(plan, actions=tuple(through(a) if isinstance(a, Move) else a for a in plan.actions))
