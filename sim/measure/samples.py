"""Measures the times of ops and copies of many sizes on the local machine."""

# mypy: allow-subclassing-any

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from sim.measure.fit import Sample
from workloads.costs import attention_flops, executed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAM_BYTES = 28
"""Bytes per parameter that Adam in fp32 moves: it reads weight, gradient and two moments, and writes three of them."""

FEWEST = 4
"""Sizes of each kind that are measured however slow they are: one more than the constants of a kind in one type."""

LONG = 1.0
"""Seconds of a call that is not repeated, where the time per size is less."""

BATCH_BYTES, MOST_COPIES = 1 << 22, 16
"""Bytes to copy between two events, and the most copies to do it in."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure; sizes are exponents of two.

    seconds: per size.
    products: edge of matrices.
    streams: elements of memory-bound ops, either tiny, which reveals the fixed cost of an op, or larger than caches.
    copies: bytes.
    attention: sequence lengths.
    """

    seconds: float
    products: Sequence[int]
    streams: Sequence[int]
    copies: Sequence[int]
    attention: Sequence[int]


FULL = Effort(0.5, range(7, 14), (6, 8, *range(21, 27)), range(12, 30), range(7, 14))
CUDA_STREAMS = (6, 8, *range(25, 29))
"""Sizes of memory-bound ops on a GPU, whose caches are larger than a CPU core's: 128 MiB per tensor and more."""
QUICK = Effort(0.02, range(6, 10), (6, 14, 18, 20), range(14, 24, 3), range(6, 10))


@dataclass(frozen=True)
class Bench:
    """Where and how much to measure.

    device: to measure on.
    effort: how much.
    tick: called for every size that was tried.
    """

    device: torch.device
    effort: Effort
    tick: Callable[[str], None]

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, sample: Sample, run: Callable[[], object]) -> Sample:
        """The sample with its time: the median of a call, in batches of consecutive calls as in a training step.

        A call that takes longer than the time per size is repeated, too, unless it takes longer than `LONG`.
        """
        run()
        self.synchronize()
        single_s = max(self._seconds(run, 1), 1e-7)
        calls = max(1, min(1000, round(self.effort.seconds / 8 / single_s)))
        times = [single_s] if calls == 1 else []
        began, on_core = time.perf_counter(), time.thread_time()
        stop = began + self.effort.seconds
        while len(times) < 3 or time.perf_counter() < stop:
            times.append(self._seconds(run, calls))
            if single_s > max(LONG, self.effort.seconds):
                break
        waited = 1 - (time.thread_time() - on_core) / (time.perf_counter() - began)
        median = statistics.median(times)
        return replace(
            sample,
            ns=median * 1e9,
            spread=median / min(times) - 1,
            waited=max(0.0, waited) if self.device.type == "cpu" else 0.0,
        )

    def _seconds(self, run: Callable[[], object], calls: int) -> float:
        """Seconds per call of so many consecutive ones."""
        started = time.perf_counter()
        for _ in range(calls):
            run()
        self.synchronize()
        return (time.perf_counter() - started) / calls

    def sweep(
        self, sizes: Sequence[int], make: Callable[[int], tuple[Sample, Callable[[], object]]]
    ) -> Iterator[Sample]:
        """Samples of growing size, until a call takes too long to try the next one, or memory is exhausted.

        `FEWEST` sizes are tried whatever the time of one: a slow first size may be the work of another program.
        """
        for tried, size in enumerate(sizes, 1):
            try:
                sample = self.timed(*make(1 << size))
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                    raise
                self._skip(len(sizes) - tried + 1)
                return
            yield sample
            self.tick(f"{sample.kind} {sample.dtype} 2^{size}")
            if tried >= FEWEST and sample.ns > 0.5e9 * self.effort.seconds:
                self._skip(len(sizes) - tried)
                return

    def _skip(self, sizes: int) -> None:
        """Count sizes that are not tried."""
        for _ in range(sizes):
            self.tick("")


def op_sizes(effort: Effort, dtypes: int) -> int:
    """How many sizes `op_samples` will try."""
    return dtypes * (len(effort.products) + len(effort.attention)) + 6 * len(effort.streams)


def op_samples(bench: Bench, dtypes: list[str]) -> list[Sample]:
    """Samples of matrix products and attention in each type, and of memory-bound ops in fp32."""
    samples: list[Sample] = []
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
            heads, head = 8, 64
            q, k, v = (torch.randn(1, heads, n, head, device=bench.device).to(kind) for _ in range(3))
            # causal, as in language models; the kernel skips what is masked, as their traces say
            flops = executed(attention_flops(heads, n, head), n, n, causal=True)
            return Sample(
                "attention", dtype, flops, 4 * width * heads * n * head, 0
            ), lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

        samples += bench.sweep(bench.effort.products, product)
        samples += bench.sweep(bench.effort.attention, attention)
    for name in STREAMS:
        samples += bench.sweep(bench.effort.streams, partial(stream, name, bench.device))
    return samples


STREAMS = ("elementwise", "norm", "softmax", "reduce", "copy", "optimizer")


def stream(name: str, device: torch.device, n: int) -> tuple[Sample, Callable[[], object]]:
    """A memory-bound op on n fp32 elements, with the bytes that it reads and writes."""
    x = torch.ones(n, device=device)
    # where possible, the result's memory is allocated in advance: on a CPU new pages cost more than the op itself
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
        # the kernel itself: the optimizer class takes longer in Python than a small kernel
        torch._fused_adamw_([x], [gradient], [mean], [square], [], [count], **options, amsgrad=False, maximize=False)

    return Sample(name, "fp32", 0, ADAM_BYTES * n, 0), adam


def copy_times(bench: Bench, *, pinned: bool, both: bool) -> tuple[list[int], dict[str, list[float]]]:
    """Sizes in bytes and, by direction (`d2h`, `h2d`), nanoseconds of copies between a CUDA device and the host.

    Each direction has its own stream and is timed by events on it, small copies several at a time.

    bench: where and how much to measure.
    pinned: use pinned host memory.
    both: run both directions at once.
    """
    sizes: list[int] = []
    medians: dict[str, list[float]] = {"d2h": [], "h2d": []}
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
        for way in medians:
            medians[way].append(statistics.median(times[way][1:]))  # the first copy includes one-time setup
        bench.tick(f"{'pinned' if pinned else 'pageable'} copies{', both ways' if both else ''} 2^{power}")
    return sizes, medians
