"""Small families of traces for theory, tests and benchmarks: chains, W1, random graphs, U-shaped nets.

All but the chains are made by one rule: forward ops in order, then one backward op for each in reverse,
which reads the gradient of its output, what was saved and the weight, and makes the gradients of what
it read. A tensor's second gradient is added to the first at once, by an op of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.errors import WorkloadError
from sim.trace import Trace, TraceBuilder

# ---- chains ------------------------------------------------------------------------------------


def chain(
    forward_ns: Sequence[int],
    backward_ns: Sequence[int],
    input_bytes: Sequence[int],
    saved_bytes: Sequence[int],
    forward_temp: Sequence[int] | None = None,
    backward_temp: Sequence[int] | None = None,
) -> Trace:
    """A chain of L stages given by the six lists that describe one to Rotor (Herrmann et al., arXiv 1911.13214).

    Per stage i: `forward_ns`, `backward_ns` (measured durations, ns); `input_bytes` x[i], with one more
    entry for the last stage's output; `saved_bytes` xbar[i+1], all that stage i saves for its own
    backward, its output x[i+1] included; `forward_temp`, `backward_temp`: further bytes held while the
    forward or the backward runs, default 0. A gradient has the size of its tensor, and the one that
    backward i makes is part of `backward_temp[i]`. Where that is too small, the gradient takes over the
    place of the one before if their sizes are equal; where they are not, backward i holds what is
    missing beyond the lists. A forward makes what it would save even if it saves nothing, so that it then
    holds saved_bytes less its output, for its own time, beyond forward_temp. A loss of no time turns
    x[L] into its gradient.
    Raises WorkloadError where lengths differ or a stage saves less than its output.
    """
    count = len(forward_ns)
    temps = forward_temp or [0] * count, backward_temp or [0] * count
    lengths = {len(backward_ns), len(input_bytes) - 1, len(saved_bytes), len(temps[0]), len(temps[1]), count}
    if len(lengths) != 1 or not count:
        raise WorkloadError("chain: all lists need one entry a stage, input_bytes one more")
    b = TraceBuilder({"model": "chain", "layers": count})
    x = [b.tensor("x0", input_bytes[0], "input")]
    inner: list[int | None] = []
    for i in range(count):
        inside = saved_bytes[i] - input_bytes[i + 1]
        if inside < 0:
            raise WorkloadError(f"chain: stage {i} saves {saved_bytes[i]} bytes, less than its output")
        x.append(b.tensor(f"x{i + 1}", input_bytes[i + 1], layer=i, saved_for="backward"))
        inner.append(b.tensor(f"s{i}", inside, layer=i, saved_for="backward") if inside else None)
        made = [x[-1]] + [s for s in (inner[-1],) if s is not None]
        b.op(f"f{i}", reads=[x[i]], writes=made, layer=i, workspace=temps[0][i], duration=forward_ns[i])
    gradient = b.tensor("d_loss", input_bytes[count], "temporary", layer=count - 1)
    b.op("loss", "loss", phase="backward", reads=[x[-1]], writes=[gradient], layer=count - 1, duration=0)
    for i in reversed(range(count)):
        size, room = input_bytes[i], temps[1][i]
        takes_over = room < size == input_bytes[i + 1]
        made_gradient = b.tensor(f"d{i}", size, "temporary", layer=i, replaces=gradient if takes_over else None)
        saved = [s for s in (inner[i],) if s is not None]
        b.op(
            f"b{i}",
            phase="backward",
            reads=[gradient, x[i], x[i + 1], *saved],
            writes=[made_gradient],
            layer=i,
            workspace=room if takes_over else max(0, room - size),
            duration=backward_ns[i],
        )
        gradient = made_gradient
    return b.build(outputs=(gradient,), carry=())


def uniform_chain(n: int, size: int = 1, duration: int = 1, backward_duration: int | None = None) -> Trace:
    """The unit chain U(n): f0 … f(n-1), then b(n-1) … b0; every tensor `size` bytes, every op `duration` ns.

    f(i) reads the result of f(i-1); b(n-1) reads that of f(n-2) alone, b(i) those of f(i-1) and b(i+1),
    b0 that of b1. It is the graph on which published recomputation optima are tabulated.
    """
    if n < 1:
        raise WorkloadError(f"uniform_chain: {n} steps; it needs at least 1")
    b = TraceBuilder({"model": "uniform_chain", "layers": n})
    f = [b.tensor(f"f{i}.out", size, layer=i) for i in range(n)]
    for i in range(n):
        b.op(f"f{i}", reads=f[i - 1 : i] if i else (), writes=[f[i]], layer=i, duration=duration)
    gradient: list[int] = []
    for i in reversed(range(n)):
        reads = f[i - 1 : i] + gradient if i else gradient
        gradient = [b.tensor(f"b{i}.out", size, "temporary", layer=i)]
        took = duration if backward_duration is None else backward_duration
        b.op(f"b{i}", phase="backward", reads=reads, writes=gradient, layer=i, duration=took)
    return b.build(outputs=gradient, carry=())


# ---- forward ops and their mirror ---------------------------------------------------------------


@dataclass
class _Step:
    """A forward op with one result: what its backward reads, and what both cost."""

    name: str
    kind: str
    inputs: list[int]
    output: int
    saved: list[int]
    weight: int | None
    layer: int
    forward_ns: int
    backward_ns: int


@dataclass
class _Tape:
    """Notes forward ops as they are added, and adds their backward."""

    b: TraceBuilder
    constant: set[int] = field(default_factory=set)
    steps: list[_Step] = field(default_factory=list)
    weight_gradients: list[tuple[int, int]] = field(default_factory=list)

    def forward(
        self,
        name: str,
        kind: str,
        inputs: list[int],
        size: int,
        layer: int,
        times: tuple[int, int],
        saved: list[int],
        weight: int | None = None,
    ) -> int:
        output = self.b.tensor(name, size, layer=layer)
        reads = [*inputs, weight] if weight is not None else list(inputs)
        for t in saved:
            self.b.mark_saved(t, f"{name}.bwd")
        self.b.op(name, kind, reads=reads, writes=[output], layer=layer, duration=times[0], splits=["batch"])
        self.steps.append(_Step(name, kind, list(inputs), output, saved, weight, layer, *times))
        return output

    def backward(self, add_ns: dict[int, int], loss_ns: int) -> None:
        """Add the loss's gradient and one backward op a forward op; add_ns: time to add gradients, by size."""
        b, last = self.b, self.steps[-1]
        size = b.bytes_of(last.output)
        gradient = {last.output: b.tensor("loss.grad", size, "temporary", layer=last.layer)}
        b.op(
            "loss",
            "loss",
            phase="backward",
            reads=[last.output],
            writes=[gradient[last.output]],
            layer=last.layer,
            duration=loss_ns,
            splits=["batch"],
        )
        for step in reversed(self.steps):
            if step.output not in gradient:
                continue  # nothing that reaches the loss reads it
            targets = [t for t in step.inputs if t not in self.constant]
            if not targets and step.weight is None:
                continue
            fresh = [
                (t, b.tensor(f"{step.name}.d{k}", b.bytes_of(t), "temporary", layer=step.layer))
                for k, t in enumerate(targets)
            ]
            made = [new for _, new in fresh]
            reads = [gradient[step.output], *step.saved]
            if step.weight is not None:
                reads.append(step.weight)
                made.append(b.tensor(f"{step.name}.dw", b.bytes_of(step.weight), "gradient", layer=step.layer))
                self.weight_gradients.append((step.weight, made[-1]))
            b.op(
                f"{step.name}.bwd",
                step.kind,
                phase="backward",
                reads=reads,
                writes=made,
                layer=step.layer,
                duration=step.backward_ns,
                splits=["batch"],
            )
            for t, new in fresh:
                gradient[t] = new if t not in gradient else self._add(gradient[t], new, step, add_ns)

    def _add(self, old: int, new: int, step: _Step, add_ns: dict[int, int]) -> int:
        size = self.b.bytes_of(old)
        total = self.b.tensor(f"{step.name}.sum{new}", size, "temporary", layer=step.layer)
        self.b.op(
            f"{step.name}.add{new}",
            "elementwise",
            phase="backward",
            reads=[old, new],
            writes=[total],
            layer=step.layer,
            duration=add_ns[size],
            splits=["batch"],
        )
        return total

    def update(self, duration: int) -> list[tuple[int, int]]:
        """Add one in-place update a weight gradient; returns (weight at the end, weight at the start)."""
        carry = []
        for weight, grad in self.weight_gradients:
            name = f"w{weight}"
            fresh = self.b.tensor(f"{name}.new", self.b.bytes_of(weight), "weight", replaces=weight)
            reads = [weight, grad]
            self.b.op(f"{name}.step", "optimizer", phase="update", reads=reads, writes=[fresh], duration=duration)
            carry.append((fresh, weight))
        return carry


def w1(layers: int) -> Trace:
    """The benchmark generator W1: a GPT-like stack of 22 L - 1 ops over 4 L + 1 constants, costs in whole ns.

    Batch 8, sequence 1024, hidden 1024, 2 bytes an element; an op takes the longer of FLOPs at 156
    TFLOP/s and bytes at 1.5 TB/s. Ten forward ops a layer; attention's matrices are never stored. There
    is no update: weight gradients are the outputs, constants lie there throughout, nothing is carried.
    Raises WorkloadError for less than one layer.
    """
    if layers < 1:
        raise WorkloadError(f"w1: {layers} layers; it needs at least 1")
    batch, sequence, hidden = 8, 1024, 1024
    a = batch * sequence * hidden * 2
    dense = batch * sequence * hidden * hidden
    b = TraceBuilder({"model": "w1", "layers": layers, "batch": batch, "sequence": sequence})
    x0 = b.tensor("x0", a, "input")
    tape = _Tape(b, {x0})

    def flops(count: int) -> tuple[int, int]:
        return _ceil_ns(count, 156 * 10**12), _ceil_ns(2 * count, 156 * 10**12)

    def moved(count: int) -> tuple[int, int]:
        return (_ceil_ns(count, 15 * 10**11),) * 2

    x = x0
    for i in range(layers):
        h = f"h{i}."
        elements = {"qkv": 3, "o": 1, "1": 4, "2": 4}
        w = {key: b.tensor(f"{h}w{key}", n * hidden * hidden * 2, "weight", layer=i) for key, n in elements.items()}

        def add(name: str, kind: str, inputs: list[int], size: int, times: tuple[int, int], weight: int | None = None,
                layer: int = i, saves: bool = True) -> int:  # fmt: skip
            saved = inputs if saves else []
            return tape.forward(name, kind, inputs, size, layer, times, saved, weight)

        ln1 = add(h + "ln1", "norm", [x], a, moved(2 * a))
        qkv = add(h + "qkv", "matmul", [ln1], 3 * a, flops(6 * dense), w["qkv"])
        attn = add(h + "attn", "attention", [qkv], a, flops(4 * batch * sequence**2 * hidden))
        proj = add(h + "proj", "matmul", [attn], a, flops(2 * dense), w["o"])
        add1 = add(h + "add1", "elementwise", [x, proj], a, moved(3 * a), saves=False)
        ln2 = add(h + "ln2", "norm", [add1], a, moved(2 * a))
        fc1 = add(h + "fc1", "matmul", [ln2], 4 * a, flops(8 * dense), w["1"])
        gelu = add(h + "gelu", "elementwise", [fc1], 4 * a, moved(8 * a))
        fc2 = add(h + "fc2", "matmul", [gelu], a, flops(8 * dense), w["2"])
        x = add(h + "add2", "elementwise", [add1, fc2], a, moved(3 * a), saves=False)
    tape.backward({a: moved(3 * a)[0]}, moved(2 * a)[0])
    return b.build(outputs=[grad for _, grad in tape.weight_gradients], carry=())


def _ceil_ns(amount: int, rate: int) -> int:
    return max(1, -(-amount * 10**9 // rate))


def random_dag(
    ops: int,
    seed: int,
    *,
    width: int = 4,
    max_bytes: int = 1 << 20,
    max_ns: int = 1000,
    weights: float = 0.5,
    update: bool = True,
) -> Trace:
    """A random forward graph of `ops` ops with its backward and, if asked for, in-place updates.

    Each op reads one to three results among the last `width`; sizes are 1 … `max_bytes`, forward times
    1 … `max_ns`, backward twice that; each has a weight with probability `weights`. The last op joins
    what nobody has read, so that all of it matters. The same seed gives the same trace.
    """
    if ops < 1 or width < 1:
        raise WorkloadError(f"random_dag: ops ({ops}) and width ({width}) must be at least 1")
    draw = random.Random(seed)
    b = TraceBuilder({"model": "random_dag", "seed": seed})
    x0 = b.tensor("x0", draw.randint(1, max_bytes), "input")
    tape = _Tape(b, {x0})
    made, unread = [x0], [x0]
    for i in range(ops):
        recent = made[-width:]
        inputs = draw.sample(recent, min(len(recent), draw.randint(1, 3)))
        if i == ops - 1:
            inputs = list(dict.fromkeys((*inputs, *unread)))
        weight = b.tensor(f"w{i}", draw.randint(1, max_bytes), "weight", layer=i) if draw.random() < weights else None
        took = draw.randint(1, max_ns)
        saved = [t for t in inputs if draw.random() < 0.8]
        kind = "matmul" if weight is not None else "elementwise"
        size = draw.randint(1, max_bytes)
        out = tape.forward(f"f{i}", kind, inputs, size, i, (took, 2 * took), saved, weight)
        unread = [t for t in unread if t not in inputs] + [out]
        made.append(out)
    sizes = {b.bytes_of(t): draw.randint(1, max_ns) for t in made}
    tape.backward(sizes, draw.randint(1, max_ns))
    if not update:
        return b.build(outputs=[grad for _, grad in tape.weight_gradients], carry=())
    carry = tape.update(draw.randint(1, max_ns))
    return b.build(outputs=[last for last, _ in carry], carry=carry)


def unet(levels: int, size: int = 1 << 20, duration: int = 1000, *, update: bool = False) -> Trace:
    """A U-shaped net: `levels` steps down, a bottom, as many steps up, each joined with its skip connection.

    Level k works on `size` / 2^k bytes and takes `duration` / 2^k ns, backward twice that. The skip of the
    first level lives longest: no chain of small stages. Raises WorkloadError where a level would be empty.
    """
    if levels < 1 or size >> levels < 1:
        raise WorkloadError(f"unet: {levels} levels of {size} bytes; each level halves it")
    b = TraceBuilder({"model": "unet", "levels": levels})
    x = b.tensor("x0", size, "input")
    tape = _Tape(b, {x})

    def step(name: str, inputs: list[int], level: int, layer: int, kind: str = "conv") -> int:
        took = max(1, duration >> level)
        weight = b.tensor(f"{name}.w", max(1, size >> (level + 2)), "weight", layer=layer) if kind == "conv" else None
        return tape.forward(name, kind, inputs, size >> level, layer, (took, 2 * took), inputs, weight)

    skips = []
    for k in range(levels):
        skips.append(step(f"down{k}", [x], k, k))
        x = step(f"pool{k}", [skips[k]], k + 1, k, "pool")
    x = step("bottom", [x], levels, levels)
    for k in reversed(range(levels)):
        x = step(f"up{k}", [x], k, 2 * levels - k)
        x = step(f"join{k}", [x, skips[k]], k, 2 * levels - k)
    tape.backward({size >> k: max(1, duration >> k) for k in range(levels + 1)}, max(1, duration))
    if not update:
        return b.build(outputs=[grad for _, grad in tape.weight_gradients], carry=())
    carry = tape.update(duration)
    return b.build(outputs=[last for last, _ in carry], carry=carry)
