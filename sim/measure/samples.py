"""Times of ops and copies on the machine at hand, over sizes."""

# mypy: allow-subclassing-any

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from sim.measure.fit import Sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAM_BYTES = 28
"""Bytes a parameter that Adam in fp32 moves: reads weight, gradient and two moments, writes three of them."""

BATCH_BYTES, MOST_COPIES = 1 << 22, 16
"""So many bytes are copied between two events, in at most so many copies."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: seconds a size, and the sizes: powers of two.

    Streams are either tiny, which tells what an op costs that moves nothing, or larger than caches.
    """

    seconds: float
    products: Sequence[int]
    streams: Sequence[int]
    copies: Sequence[int]
    attention: Sequence[int]


FULL = Effort(0.5, range(7, 14), (6, 8, *range(21, 27)), range(12, 30), range(7, 14))
CUDA_STREAMS = (6, 8, *range(25, 29))
"""Sizes of streams on a GPU, whose caches hold more than a CPU core's: 128 MiB a tensor and more."""
QUICK = Effort(0.02, range(6, 10), (6, 14, 18, 20), range(14, 24, 3), range(6, 10))


@dataclass(frozen=True)
class Bench:
    """Where and how hard to measure. tick: told of every size that was tried."""

    device: torch.device
    effort: Effort
    tick: Callable[[str], None]

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ns(self, run: Callable[[], object]) -> float:
        """Median nanoseconds of one call among batches of them, back to back as in a training step."""
        run()
        self.synchronize()
        began = time.perf_counter()
        run()
        self.synchronize()
        one = max(time.perf_counter() - began, 1e-7)
        calls = max(1, min(1000, round(self.effort.seconds / 8 / one)))
        taken: list[float] = []
        stop = time.perf_counter() + self.effort.seconds
        while len(taken) < 3 or time.perf_counter() < stop:
            began = time.perf_counter()
            for _ in range(calls):
                run()
            self.synchronize()
            taken.append((time.perf_counter() - began) / calls)
            if one > self.effort.seconds:
                break
        return statistics.median(taken) * 1e9

    def sweep(
        self, sizes: Sequence[int], make: Callable[[int], tuple[Sample, Callable[[], object]]]
    ) -> Iterator[Sample]:
        """Samples of growing size, until a call takes so long that the next would not do, or memory ends."""
        for tried, size in enumerate(sizes, 1):
            try:
                what, run = make(1 << size)
                took = self.ns(run)
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                    raise
                took = float("inf")
            else:
                yield Sample(what.kind, what.dtype, what.flops, what.bytes, took)
                self.tick(f"{what.kind} {what.dtype} 2^{size}")
            if took > 0.5e9 * self.effort.seconds:
                for _ in range(len(sizes) - tried + (took == float("inf"))):
                    self.tick("")
                return


def op_sizes(effort: Effort, dtypes: int) -> int:
    """How many sizes `op_samples` will try."""
    return dtypes * (len(effort.products) + len(effort.attention)) + 6 * len(effort.streams)


def op_samples(bench: Bench, dtypes: list[str]) -> list[Sample]:
    """Matrix products and attention in each type; ops bound by memory in the first."""
    found: list[Sample] = []
    for dtype in dtypes:
        kind = DTYPES[dtype]
        width = kind.itemsize

        def product(
            n: int, kind: torch.dtype = kind, dtype: str = dtype, width: int = width
        ) -> tuple[Sample, Callable[[], object]]:
            a, b = (torch.randn(n, n, device=bench.device).to(kind) for _ in range(2))
            return Sample("matmul", dtype, 2 * n**3, 3 * width * n * n, 0), lambda: a @ b

        def attention(
            n: int, kind: torch.dtype = kind, dtype: str = dtype, width: int = width
        ) -> tuple[Sample, Callable[[], object]]:
            heads, head = 8, 64  # causal, and counted whole, as traces of language models do
            q, k, v = (torch.randn(1, heads, n, head, device=bench.device).to(kind) for _ in range(3))
            flops = 4 * heads * n * n * head
            return Sample(
                "attention", dtype, flops, 4 * width * heads * n * head, 0
            ), lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

        found += bench.sweep(bench.effort.products, product)
        found += bench.sweep(bench.effort.attention, attention)
    for name in STREAMS:
        found += bench.sweep(bench.effort.streams, partial(stream, name, bench.device))
    return found


STREAMS = ("elementwise", "norm", "softmax", "reduce", "copy", "optimizer")


def stream(name: str, device: torch.device, n: int) -> tuple[Sample, Callable[[], object]]:
    """An op on n fp32 elements that memory bounds, and the bytes that it reads and writes."""
    x = torch.ones(n, device=device)
    # where it can be, the result's memory is there before: on a CPU fresh pages cost more than the op itself
    z, row = torch.ones(n, device=device), min(1024, n)
    if name == "elementwise":
        y = torch.ones(n, device=device)
        return Sample(name, "fp32", 0, 12 * n, 0), lambda: torch.add(x, y, out=z)
    if name == "norm":
        table = x.view(-1, row)
        return Sample(name, "fp32", 0, 8 * n, 0), lambda: F.layer_norm(table, (row,))
    if name == "softmax":
        table = x.view(-1, row)
        out = z.view(-1, row)
        return Sample(name, "fp32", 0, 8 * n, 0), lambda: torch.softmax(table, dim=-1, out=out)
    if name == "reduce":
        return Sample(name, "fp32", 0, 4 * n, 0), lambda: x.sum()
    if name == "copy":
        return Sample(name, "fp32", 0, 8 * n, 0), lambda: z.copy_(x)
    gradient, mean, square = (torch.ones(n, device=device) for _ in range(3))
    count = torch.ones((), device=device)
    options = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}

    def adam() -> None:
        # the kernel itself: the optimizer class spends more in Python than a small one takes
        torch._fused_adamw_([x], [gradient], [mean], [square], [], [count], **options, amsgrad=False, maximize=False)

    return Sample(name, "fp32", 0, ADAM_BYTES * n, 0), adam


def copy_times(bench: Bench, *, pinned: bool, both: bool) -> tuple[list[int], dict[str, list[float]]]:
    """Sizes and, by direction (`d2h`, `h2d`), nanoseconds of copies between a CUDA device and the host.

    Each direction has a stream of its own and is timed by events on it, small copies several at a time. both: the
    two directions at once.
    """
    sizes: list[int] = []
    found: dict[str, list[float]] = {"d2h": [], "h2d": []}
    streams = {"d2h": torch.cuda.Stream(bench.device), "h2d": torch.cuda.Stream(bench.device)}
    for power in bench.effort.copies:
        size = 1 << power
        calls = max(1, min(MOST_COPIES, BATCH_BYTES // size))
        ends = {
            way: (
                torch.zeros(size, dtype=torch.uint8, pin_memory=pinned),
                torch.zeros(size, dtype=torch.uint8, device=bench.device),
            )
            for way in streams
        }
        bench.synchronize()  # the zeros are written on another stream
        times: dict[str, list[float]] = {"d2h": [], "h2d": []}
        stop = time.perf_counter() + bench.effort.seconds
        while len(times["d2h"]) < 5 or time.perf_counter() < stop:
            for ways in [("d2h", "h2d")] if both else [("d2h",), ("h2d",)]:
                marks = {}
                for way in ways:
                    host, device = ends[way]
                    to, source = (host, device) if way == "d2h" else (device, host)
                    with torch.cuda.stream(streams[way]):
                        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        first.record()
                        for _ in range(calls):
                            to.copy_(source, non_blocking=pinned)
                        last.record()
                    marks[way] = first, last
                bench.synchronize()
                for way, (first, last) in marks.items():
                    times[way].append(first.elapsed_time(last) * 1e6 / calls)
        sizes.append(size)
        for way in found:
            found[way].append(statistics.median(times[way][1:]))  # the first copy pays for what is set up once
        bench.tick(f"{'pinned' if pinned else 'pageable'} copies{', both ways' if both else ''} 2^{power}")
    return sizes, found
