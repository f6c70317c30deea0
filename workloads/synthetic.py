"""Small families of traces for theory, tests and benchmarks: chains, W1, random graphs, U-shaped networks.

All except the chains follow one rule: forward ops in order, then one backward op for each in reverse order. A backward
op reads the gradient of its op's output, the saved tensors and the weight, and writes the gradients of its op's reads.
The second gradient of a tensor is added to the first immediately, by a separate op.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.arguments import explained
from sim.errors import WorkloadError
from sim.trace import Trace, TraceBuilder

# ---- chains ------------------------------------------------------------------------------------


@explained
def chain(
    forward_ns: Sequence[int],
    backward_ns: Sequence[int],
    input_bytes: Sequence[int],
    saved_bytes: Sequence[int],
    forward_temp: Sequence[int] | None = None,
    backward_temp: Sequence[int] | None = None,
) -> Trace:
    """A chain of L stages, given by the six lists of Rotor's chain model (Herrmann et al., arXiv 1911.13214).

    A loss that takes no time turns x[L] into its gradient. A gradient has the size of its tensor, and the gradient that
    backward i produces is part of `backward_temp[i]`. Where that is too small, the gradient takes over the storage of
    the previous one if their sizes are equal; otherwise backward i holds the difference in addition to the lists. A
    forward op produces everything that it could save even when it saves nothing; it then holds `saved_bytes` minus its
    output, while it runs, in addition to `forward_temp`.

    forward_ns, backward_ns: durations per stage in ns.
    input_bytes: size of the input x[i] of each stage, and one more entry for the output of the last.
    saved_bytes: xbar[i+1] per stage: all that stage i saves for its own backward, its output x[i+1] included.
    forward_temp, backward_temp: further bytes per stage while its forward or backward runs, by default 0.

    Raises WorkloadError where lengths differ or a stage saves less than its output.
    """
    count = len(forward_ns)
    temps = forward_temp or [0] * count, backward_temp or [0] * count
    lengths = {len(backward_ns), len(input_bytes) - 1, len(saved_bytes), len(temps[0]), len(temps[1]), count}
    if len(lengths) != 1 or not count:
        raise WorkloadError("chain: all lists need one entry per stage, input_bytes one more")
    b = TraceBuilder({"model": "chain", "layers": count})
    x = [b.tensor("x0", input_bytes[0], "input")]
    inner: list[int | None] = []
    for i in range(count):
        beside_output = saved_bytes[i] - input_bytes[i + 1]
        if beside_output < 0:
            raise WorkloadError(f"chain: stage {i} saves {saved_bytes[i]} bytes, less than its output")
        x.append(b.tensor(f"x{i + 1}", input_bytes[i + 1], layer=i, saved_for="backward"))
        inner.append(b.tensor(f"s{i}", beside_output, layer=i, saved_for="backward") if beside_output else None)
        written = [x[-1]] + [s for s in (inner[-1],) if s is not None]
        b.op(f"f{i}", reads=[x[i]], writes=written, layer=i, workspace=temps[0][i], duration=forward_ns[i])
    gradient = b.tensor("d_loss", input_bytes[count], "temporary", layer=count - 1)
    b.op("loss", "loss", phase="backward", reads=[x[-1]], writes=[gradient], layer=count - 1, duration=0)
    for i in reversed(range(count)):
        size, temp = input_bytes[i], temps[1][i]
        in_place = temp < size == input_bytes[i + 1]
        new_gradient = b.tensor(f"d{i}", size, "temporary", layer=i, replaces=gradient if in_place else None)
        saved = [s for s in (inner[i],) if s is not None]
        b.op(
            f"b{i}",
            phase="backward",
            reads=[gradient, x[i], x[i + 1], *saved],
            writes=[new_gradient],
            layer=i,
            workspace=temp if in_place else max(0, temp - size),
            duration=backward_ns[i],
        )
        gradient = new_gradient
    return b.build(outputs=(gradient,), carry=())


@explained
def uniform_chain(n: int, size: int = 1, duration: int = 1, backward_duration: int | None = None) -> Trace:
    """The unit chain U(n): ops f0 … f(n-1), then b(n-1) … b0, on which published recomputation optima are tabulated.

    f(i) reads the result of f(i-1); b(n-1) reads only that of f(n-2), b(i) those of f(i-1) and b(i+1), and b0 that of
    b1.

    n: number of steps.
    size: bytes of every tensor.
    duration: ns of every op.
    backward_duration: ns of every backward op, by default the same.
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
        backward_ns = duration if backward_duration is None else backward_duration
        b.op(f"b{i}", phase="backward", reads=reads, writes=gradient, layer=i, duration=backward_ns)
    return b.build(outputs=gradient, carry=())


# ---- forward ops and their mirror ---------------------------------------------------------------


@dataclass
class _Step:
    """A forward op with one result: what its backward reads, and the times of both."""

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
    """Records forward ops as they are added, and adds their backward."""

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
        """Add the gradient of the loss and one backward op per forward op.

        add_ns: ns to add two gradients, by their size in bytes.
        loss_ns: ns of the loss.
        """
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
                continue  # the loss does not depend on it
            targets = [t for t in step.inputs if t not in self.constant]
            if not targets and step.weight is None:
                continue
            fresh = [
                (t, b.tensor(f"{step.name}.d{k}", b.bytes_of(t), "temporary", layer=step.layer))
                for k, t in enumerate(targets)
            ]
            gradients = [new for _, new in fresh]
            reads = [gradient[step.output], *step.saved]
            if step.weight is not None:
                reads.append(step.weight)
                gradients.append(b.tensor(f"{step.name}.dw", b.bytes_of(step.weight), "gradient", layer=step.layer))
                self.weight_gradients.append((step.weight, gradients[-1]))
            b.op(
                f"{step.name}.bwd",
                step.kind,
                phase="backward",
                reads=reads,
                writes=gradients,
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
        """Add one in-place update per weight gradient. Returns pairs (weight at the end, weight at the start)."""
        carry = []
        for weight, grad in self.weight_gradients:
            name = f"w{weight}"
            fresh = self.b.tensor(f"{name}.new", self.b.bytes_of(weight), "weight", replaces=weight)
            reads = [weight, grad]
            self.b.op(f"{name}.step", "optimizer", phase="update", reads=reads, writes=[fresh], duration=duration)
            carry.append((fresh, weight))
        return carry


@explained
def w1(layers: int) -> Trace:
    """The benchmark workload W1: a GPT-like stack of L layers, with 22 L - 1 ops and 4 L + 1 constants.

    Batch 8, sequence 1024, hidden 1024, 2 bytes per element, times in whole ns. An op takes the longer of FLOPs at 156
    TFLOP/s and bytes at 1.5 TB/s. There are ten forward ops per layer; attention matrices are never stored. There is no
    update: the weight gradients are the outputs, the constants stay resident throughout, and nothing is carried.

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


@explained
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
    """A random forward graph with its backward; the same seed gives the same trace.

    Each op reads one to three of the most recent results. The last op also reads everything that is still unread, so
    that the loss depends on all ops.

    ops: number of forward ops.
    seed: of the random numbers.
    width: how many recent results an op may read.
    max_bytes: sizes are drawn from 1 to this.
    max_ns: forward times are drawn from 1 to this; backward takes twice as long.
    weights: probability that an op has a weight.
    update: add in-place updates of the weights.
    """
    if ops < 1 or width < 1:
        raise WorkloadError(f"random_dag: ops ({ops}) and width ({width}) must be at least 1")
    draw = random.Random(seed)
    b = TraceBuilder({"model": "random_dag", "seed": seed})
    x0 = b.tensor("x0", draw.randint(1, max_bytes), "input")
    tape = _Tape(b, {x0})
    results, unread = [x0], [x0]
    for i in range(ops):
        recent = results[-width:]
        inputs = draw.sample(recent, min(len(recent), draw.randint(1, 3)))
        if i == ops - 1:
            inputs = list(dict.fromkeys((*inputs, *unread)))
        weight = b.tensor(f"w{i}", draw.randint(1, max_bytes), "weight", layer=i) if draw.random() < weights else None
        forward_ns = draw.randint(1, max_ns)
        saved = [t for t in inputs if draw.random() < 0.8]
        kind = "matmul" if weight is not None else "elementwise"
        size = draw.randint(1, max_bytes)
        out = tape.forward(f"f{i}", kind, inputs, size, i, (forward_ns, 2 * forward_ns), saved, weight)
        unread = [t for t in unread if t not in inputs] + [out]
        results.append(out)
    sizes = {b.bytes_of(t): draw.randint(1, max_ns) for t in results}
    tape.backward(sizes, draw.randint(1, max_ns))
    if not update:
        return b.build(outputs=[grad for _, grad in tape.weight_gradients], carry=())
    carry = tape.update(draw.randint(1, max_ns))
    return b.build(outputs=[last for last, _ in carry], carry=carry)


@explained
def unet(levels: int, size: int = 1 << 20, duration: int = 1000, *, update: bool = False) -> Trace:
    """A U-shaped network: steps down, a bottom, and as many steps up, each joined with its skip connection.

    The skip connection of the first level lives longest, so the trace is not a chain of small stages.

    levels: number of steps down.
    size: bytes at level 0; level k has `size` / 2^k.
    duration: ns of an op at level 0; level k takes `duration` / 2^k, and backward twice as long.
    update: add in-place updates of the weights.

    Raises WorkloadError where a level would be empty.
    """
    if levels < 1 or size >> levels < 1:
        raise WorkloadError(f"unet: {levels} levels of {size} bytes; each level halves it")
    b = TraceBuilder({"model": "unet", "levels": levels})
    x = b.tensor("x0", size, "input")
    tape = _Tape(b, {x})

    def step(name: str, inputs: list[int], level: int, layer: int, kind: str = "conv") -> int:
        forward_ns = max(1, duration >> level)
        weight = b.tensor(f"{name}.w", max(1, size >> (level + 2)), "weight", layer=layer) if kind == "conv" else None
        return tape.forward(name, kind, inputs, size >> level, layer, (forward_ns, 2 * forward_ns), inputs, weight)

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
