"""What a reading of a card shows (`nvidia-smi`, NVML): tensors as the allocator reserves them, and what lies beside.

Beside them lie the context of the device, the workspaces of cuBLAS, one per thread that computes products, and the
buffers of communicators: of each group that a collective of the trace is among, of such as a framework makes beside
those, and of each other device that one sends to or receives from. What one of NCCL's takes on A100 was measured as a
whole; on H100 it is counted connection by connection. On Ascend each has one pair of buffers, of collectives or of two
stages, and a card holds memory before any process does. The bytes are in `card_reading.toml`, each with its source.
What an older PyTorch, or PaddlePaddle, holds for collectives that the CPU does not know to have ended counts, too
(`sim.analysis.recorded_streams`).

Left out: blocks that the allocator loses to fragmentation where a profile has another one than `caching`; communicators
that no op of the trace uses, but for those named; what networks between nodes hold; NVLink SHARP; plans of cuDNN; and
other programs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from sim.analysis.peak_memory import peak_memory
from sim.analysis.recorded_streams import recorded_exchanges, recorded_in_paddle, reserved_with_streams, version_of
from sim.arguments import explained
from sim.errors import TiersimError
from sim.log import EventLog
from sim.trace.op import KIND_CODE, PHASE_CODE
from sim.units import parse_bytes

CURRENT = "2.13"
"""The version of PyTorch whose card is read where none is given."""
SEND, RECV = KIND_CODE["send"], KIND_CODE["recv"]


@dataclass(frozen=True)
class CardReading:
    """One device of the trace. Bytes.

    tensors: the most that the allocator reserved, or, where it keeps no reserve, the peak of what is resident.
    context: of the runtime.
    workspaces: of cuBLAS.
    communicators: buffers of NCCL or HCCL; None where there are any, and their size on such cards is not known.
    bytes: all of it, as far as it is known.
    """

    device: int
    tensors: int
    context: int
    workspaces: int
    communicators: int | None
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        known = self.tensors, self.context, self.workspaces, self.communicators or 0
        object.__setattr__(self, "bytes", sum(known))


@explained
def card_reading(
    log: EventLog,
    pytorch: str = CURRENT,
    *,
    paddle: bool = False,
    lazy_kernels: bool = True,
    communicators: Sequence[int] = (),
) -> tuple[CardReading, ...]:
    """What would be read of the card, one entry per device of the trace; () for a machine without figures for that.

    pytorch: the version that ran, such as "2.3"; by default one that holds no blocks for collectives.
    paddle: whether PaddlePaddle ran instead, which holds those of gradients.
    lazy_kernels: whether the context loads kernels as they are needed, as CUDA does by default from 12.2 on, and under
        PyTorch from 11.7 on, with a driver of version 515 or newer; else it has all of them from the start (CUDA
        programming guide, Lazy Loading; pytorch/pytorch, pull request 86509).
    communicators: how many ranks each further communicator has, which no op of the trace uses: such as that of all
        ranks, from a barrier at the start, or that of the norm of all gradients.

    Raises TiersimError where `pytorch` names no version, where what collectives hold leaves no space for the rest, or
    where a communicator has no ranks.
    """
    also = [_ranks(each) for each in communicators]
    if not paddle:
        version_of(pytorch)
    card = _cards().get(log.platform.name.partition(" ")[0])
    if card is None:
        return ()
    of_cuda = _figures()["context" if lazy_kernels else "context_of_all_kernels"]
    context = parse_bytes(card.get("context", of_cuda["bytes"]))
    found = []
    for device in range(log.trace.devices):
        recorded = recorded_in_paddle(log, device) if paddle else recorded_exchanges(log, device, pytorch)
        ranks = [*_communicators(log, device), *(each for each in also if each > 1)]
        found.append(_of_device(log, device, card, context, recorded, ranks))
    return tuple(found)


def _ranks(given: object) -> int:
    """How many ranks a communicator is said to have. Raises TiersimError."""
    if isinstance(given, bool) or not isinstance(given, SupportsIndex) or index(given) < 1:
        raise TiersimError(f"communicators: each needs a number of ranks of at least 1, has {given!r}; nearest: 1")
    return index(given)


@cache
def _figures() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def _cards() -> Mapping[str, Mapping[str, Any]]:
    """What is known of a card, by the name of its profile."""
    return {name: card for card in _figures()["cards"] for name in card["profiles"]}


def _of_device(
    log: EventLog, device: int, card: Mapping[str, Any], context: int, recorded: list[int], ranks: list[int]
) -> CardReading:
    """ranks: of each communicator."""
    c = log.trace.op_columns
    own = c.device == device
    products = own & (c.kind == KIND_CODE["matmul"])
    threads = len({bool(backward) for backward in (c.phase[products] == PHASE_CODE["backward"]).tolist()})
    (sources, targets), direct = _neighbours(log, device), _direct(log, device)
    buffers: int | None = 0
    if ranks or sources or targets:
        buffers = _buffers(ranks, (sources, targets), direct, card)
    return CardReading(
        device=device,
        tensors=_of_tensors(log, device, recorded),
        context=context,
        workspaces=threads * parse_bytes(card["workspace"]),
        communicators=buffers,
    )


def _of_tensors(log: EventLog, device: int, recorded: list[int]) -> int:
    """The most that the allocator reserved; the peak of what is resident where it keeps no reserve."""
    peak = peak_memory(log, log.platform.home(device).name)
    held = reserved_with_streams(log, device, recorded, int(_figures()["queue"]["launches"])) if recorded else None
    return next(bytes for bytes in (held, peak.reserved_bytes, peak.bytes) if bytes is not None)


def _communicators(log: EventLog, device: int) -> Iterator[int]:
    """How many ranks each communicator has that a device exchanges with by collectives."""
    c = log.trace.op_columns
    members: dict[str, set[int]] = {}
    for op, name in c.group.items():
        if c.kind[op] not in (SEND, RECV):
            members.setdefault(name, set()).add(int(c.device[op]))
    yield from map(len, {frozenset(group) for group in members.values() if device in group and len(group) > 1})
    axes: dict[str, int] = {}
    for op, ring in c.ring.items():  # of one rank that stands for all
        if c.device[op] == device and ring.ranks > 1 and len(members.get(c.group.get(op, ""), ())) < 2:
            axes[ring.axis] = max(axes.get(ring.axis, 0), ring.ranks)
    if "neighbour" in axes and any("context" in axis for axis in axes):
        del axes["neighbour"]  # steps of ring attention go over the communicator of the ranks of a context
    yield from axes.values()


def _neighbours(log: EventLog, device: int) -> tuple[int, int]:
    """From how many other devices one receives, and to how many it sends."""
    c = log.trace.op_columns
    ends: dict[str, dict[int, int]] = {}
    for op, name in c.group.items():
        if c.kind[op] in (SEND, RECV):
            ends.setdefault(name, {})[int(c.kind[op])] = int(c.device[op])
    pairs = {(end[SEND], end[RECV]) for end in ends.values()}
    return sum(to == device for _, to in pairs), sum(by == device for by, _ in pairs)


def _direct(log: EventLog, device: int) -> int:
    """With how many others one exchanges directly: with all in an all-to-all, in a ring of attention with one."""
    c = log.trace.op_columns
    most = dict.fromkeys(("expert", "neighbour"), 1)
    for op, ring in c.ring.items():
        if c.device[op] == device and ring.axis in most:
            most[ring.axis] = max(most[ring.axis], ring.ranks)
    return most["expert"] - 1 + min(most["neighbour"] - 1, 1)


def _buffers(ranks: list[int], stages: tuple[int, int], direct: int, card: Mapping[str, Any]) -> int | None:
    """Bytes of communicators of so many ranks each, and of direct exchanges; None if nobody knows.

    stages: from how many others one receives, and to how many it sends. direct: with how many one does both.
    """
    if "communicator" not in card:
        return None
    sources, targets = stages
    of_two, of_more = map(parse_bytes, card["communicator"])
    collective = sum(of_two if count == 2 else of_more for count in ranks)
    if "receive" not in card:
        return collective + max(sources, targets) * of_two
    receive, send = parse_bytes(card["receive"]), parse_bytes(card["send"])
    return collective + (sources + direct) * receive + (targets + direct) * send
