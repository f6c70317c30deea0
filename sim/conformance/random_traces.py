"""Random traces for the suite: small nets with backward and update that meet a policy's needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from zlib import crc32

from hypothesis import strategies as st

from sim.conformance.digits import Digits
from sim.rewrites.holding import with_releases
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.op import Implementation

SIZES = (16, 1, 40, 64, 7, 100, 0)
VIEWED = (1, 40)
"""Steps of these sizes are views where a trace has any."""

TIMES = (10, 1, 30, 100, 0)
WORK = (0, 0, 0, 8, 30)
LARGE = 1 << 24
"""How many times as large tensors are in a few traces: some then have more than 2^30 bytes."""

MANY = 90
"""Forward ops of the few traces that are long: with backward and update they have more than 159 ops."""

QUICKER, LEANER = 0.5, 1.5
"""Time factors of further implementations of ops with workspace: with three times the workspace, and with none."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward op.

    back: how far back it reads, besides the previous result.
    The others: indices and flags.
    """

    back: tuple[int, ...]
    size: int
    took: int
    work: int
    weight: bool
    mask: bool
    saves_input: bool
    saves_output: bool
    overwrites: bool


_BACKS = ((), (0,), (1,), (2,), (3,), (0, 2), (1, 3), (2, 3))


def steps(chain: bool) -> st.SearchStrategy[Step]:
    """Forward ops. In a chain each reads only the previous result, writes to new storage and has a result.

    A step is encoded as one number, because numbers are drawn and shrunk faster than structures.
    """
    sizes = [size for size in SIZES if size] if chain else list(SIZES)
    count = len(sizes) * len(TIMES) * len(WORK) * len(_BACKS) * 2**5

    def step(code: int) -> Step:
        digits = Digits(code)
        size, took, work = (digits.pick(choice) for choice in (sizes, TIMES, WORK))
        back = digits.pick(_BACKS)
        flags = [digits.pick((False, True)) for _ in range(5)]
        if chain:
            return Step((), size, took, work, flags[0], flags[1], True, flags[3], False)
        return Step(back, size, took, work, *flags)

    return st.integers(0, count - 1).map(step)


@st.composite
def random_traces(
    draw: st.DrawFn,
    *,
    needs: frozenset[str] = frozenset(),
    devices: int = 1,
    cpu: bool = False,
    unit: int = 1,
    longest: int = 12,
) -> Trace:
    """Forward ops in order, a backward that reads what was saved, and in-place updates of the weights.

    With two devices each runs its copy of the net and the weight gradients are summed by a collective, or the first
    half of the ops is on device 0 and results reach the other half by send and receive, or unsent. In one of two traces
    the program holds tensors beyond their last readers. Some have views, some count more FLOPs than they execute, a few
    are long, and a few have tensors of gigabytes. Shrinks to one op.

    needs: of `sim.policies.base.NEEDS`, those that concern the trace: `chain`, `layers`, `backward`,
        `inference`, `experts`.
    devices: one or two.
    cpu: whether the optimizer, or some ops of each phase, may run on the engine `cpu`.
    unit: bytes of the smallest tensor.
    longest: most forward ops.
    """
    chain = "chain" in needs
    least = 2 if chain or "layers" in needs else 1
    line = draw(st.lists(steps(chain), min_size=least, max_size=longest))
    if "experts" in needs:
        line = [replace(step, weight=step.weight or i % 2 == 0) for i, step in enumerate(line)]
    digits = Digits(draw(st.integers(0, 8 * 2 * 4 * 4 * 3 * 3 * 2 * 2 - 1)))
    backward = digits.pick((True,) * 7 + (False,)) or bool(needs & {"chain", "layers", "backward", "history", "cpu"})
    backward = backward and "inference" not in needs
    update = (digits.pick((False, True)) or "cpu" in needs) and backward
    layers = digits.pick((0, 1, 2, 3))
    per_layer = layers or int("layers" in needs or chain)
    measured = digits.pick((True, True, True, False)) or chain
    on_cpu = digits.pick(("", "update", "some")) if cpu and "cpu" not in needs else ""
    style = digits.pick(("data", "pipeline", "unsent")) if devices > 1 else "one"
    states = digits.pick((False, True))
    product = digits.pick(("matmul", "conv"))
    # not drawn, as below: what the seeds give stays the same, except for these
    rare = Digits(crc32(repr(line).encode()))
    views, counts = rare.pick((False, False, False, True)), rare.pick((False, True))
    large, is_long = rare.pick((1,) * 15 + (LARGE,)), rare.pick((False,) * 29 + (True,))
    if unit == 1 and not needs & {"slc"}:  # whose region holds some tens of bytes
        unit = large
    if is_long and longest > 8:
        line = line * (MANY // len(line))
    b = TraceBuilder({"model": "random", "batch": 4, "samples": 4})
    nets = []
    for device in range(devices if style == "data" else 1):
        nets.append(
            _Net(b, f"d{device}." if style == "data" else "", device, style, unit, per_layer, measured, product)
        )
        nets[-1].views, nets[-1].counts = views and style != "pipeline" and not chain, counts
    for net in nets:
        net.of_experts = "experts" in needs
        net.on_cpu = on_cpu == "some"
        net.split = len(line) // 2 if devices > 1 and style != "data" else len(line)
        for step in line:
            net.forward(step, cut=len(net.tape) == net.split)
        if backward:
            net.backward()
    if style == "data" and backward:
        _reduce(b, nets)
    for net in nets:
        if update:
            net.update("cpu" if on_cpu else "", states=states)
    # not drawn: what the seeds give stays the same, except for release points
    hold = Digits(sum(i * (step.size + step.took) for i, step in enumerate(line, 1)))
    every, longer = hold.pick((0, 0, 1, 3)), hold.pick(range(8))
    if backward and not update:
        last = nets[-1].last
        kept = [grad for net in nets for _, grad in net.gradients] or sorted({last, nets[-1].view_of.get(last, last)})
        return held(b.build(outputs=kept, carry=()), every, longer)
    return held(b.build(), every, longer)


def held(trace: Trace, every: int, longer: int) -> Trace:
    """The same trace with one in `every` tensors (0: none) held by the program for some ops beyond its last use."""
    points = [
        (t, min(len(trace.ops) - 1, int(trace.last_use[t]) + longer))
        for t in (range(0, len(trace.tensors), every) if every else ())
        if trace.producer[t] >= 0 and trace.replaced_by[t] < 0 and t not in trace.view_of
    ]
    return with_releases(trace, points) if points else trace


def _reduce(b: TraceBuilder, nets: list[_Net]) -> None:
    """Sum the weight gradients of all devices, in place."""
    for k in range(len(nets[0].gradients)):
        for net in nets:
            weight, grad = net.gradients[k]
            total = b.tensor(f"{net.name}sum{k}", b.bytes_of(grad), "gradient", replaces=grad)
            fields = {"phase": "backward", "device": net.device, "group": f"all{k}"}
            b.op(f"{net.name}reduce{k}", "collective", reads=[grad], writes=[total], **fields)  # type: ignore[arg-type]
            net.gradients[k] = weight, total


@dataclass
class _Net:
    """One net under construction."""

    b: TraceBuilder
    name: str
    device: int
    style: str
    unit: int
    per_layer: int
    measured: bool
    product: str
    split: int = 0
    on_cpu: bool = False
    of_experts: bool = False
    views: bool = False
    counts: bool = False
    tape: list[tuple[Step, list[int], list[int], int | None, list[int]]] = field(default_factory=list)
    gradients: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last = self.b.tensor(f"{self.name}x", 16 * self.unit, "input")
        self.constant = {self.last}
        self.alive = [self.last]
        self.saved: set[int] = set()
        self.sent: dict[int, int] = {}
        self.home: dict[int, int] = {}  # weight -> the device that has it
        self.view_of: dict[int, int] = {}  # view -> the tensor whose storage it shares

    # ---- forward -----------------------------------------------------------------------------

    def forward(self, step: Step, cut: bool) -> None:
        b, i = self.b, len(self.tape)
        if cut and i:
            self.device = 1
        reads = [self.alive[-1]] + [self.alive[-1 - d % len(self.alive)] for d in step.back]
        reads = [self.here(t) for t in dict.fromkeys(reads)]
        old = reads[0]
        if self.views and step.size in VIEWED:
            self.view(step, old)
            return
        overwrites = step.overwrites and old in self.alive and old not in self.saved and old not in self.constant
        saved = [t for t in reads if step.saves_input and not (overwrites and t == old)]
        size = b.bytes_of(old) if overwrites else step.size * self.unit
        function = self.function(step, len(reads))
        zeros = (step.size + step.took) % 5 / 4 if function == "relu" else None
        replaces = old if overwrites else None
        made = [b.tensor(f"{self.name}y{i}", size, layer=self.layer(i), zeros=zeros, replaces=replaces)]
        weight = None
        if step.weight:
            named = f"{self.name}expert{i}.w" if self.of_experts else f"{self.name}w{i}"
            weight = b.tensor(named, (1 + step.size // 2) * self.unit, "weight", layer=self.layer(i))
            self.home[weight] = self.device
        if step.mask:
            made.append(b.tensor(f"{self.name}m{i}", (1 + step.size // 4) * self.unit, layer=self.layer(i)))
        inputs = [*reads, weight] if weight is not None else reads
        fields: dict[str, object] = {"layer": self.layer(i), "random": step.mask, "workspace": step.work * self.unit}
        fields["function"] = function
        if step.work:
            quick = Implementation("quick", QUICKER, 3 * step.work * self.unit)
            fields["alternatives"] = (quick, Implementation("lean", LEANER, 0))
        if self.counts and step.saves_output and not self.measured:
            fields["counted"] = 40 * step.took  # twice what it executes, as under a causal mask
        self.op(self.forward_name(i, step), self.kind(step), inputs, made, step.took, **fields)
        if step.saves_output or not saved:
            saved.append(made[0])
        saved += made[1:]
        self.saved.update(saved)
        if overwrites:
            self.alive.remove(old)
        self.alive.append(made[0])
        self.last = made[0]
        self.tape.append((step, reads, made, weight, saved))

    def view(self, step: Step, tensor: int) -> None:
        """A forward op whose result is a view of what it reads, which is then overwritten no more."""
        b, i, storage = self.b, len(self.tape), self.view_of.get(tensor, tensor)
        made = b.tensor(f"{self.name}y{i}", 0, layer=self.layer(i))
        reads = list(dict.fromkeys((tensor, storage)))
        fields: dict[str, object] = {"layer": self.layer(i), "views": [reads.index(storage)]}
        self.op(self.forward_name(i, step), "other", reads, [made], 0, **fields)
        self.view_of[made] = storage
        self.saved |= {made, storage}
        self.alive.append(made)
        self.last = made
        self.tape.append((step, [tensor], [made], None, []))

    def here(self, tensor: int) -> int:
        """A tensor as this device reads it: sent to it once if it was produced on the other one."""
        if self.style != "pipeline" or not self.device or tensor in self.sent.values() or not self.foreign(tensor):
            return tensor
        if tensor not in self.sent:
            self.sent[tensor] = self.send(tensor, 0, 1, "forward")
        return self.sent[tensor]

    def foreign(self, tensor: int) -> bool:
        return tensor in self.constant or any(tensor in made for _, _, made, _, _ in self.tape[: self.split])

    def send(self, tensor: int, start: int, end: int, phase: str) -> int:
        b = self.b
        role = "activation" if phase == "forward" else "temporary"
        got = b.tensor(f"{self.name}got{tensor}", b.bytes_of(tensor), role)
        group = f"send{tensor}"
        b.op(f"{self.name}send{tensor}", "send", reads=[tensor], phase=phase, device=start, group=group)
        b.op(f"{self.name}recv{tensor}", "recv", writes=[got], phase=phase, device=end, group=group)
        return got

    # ---- backward ----------------------------------------------------------------------------

    def backward(self) -> None:
        b = self.b
        top = self.last
        gradient = {
            top: b.tensor(f"{self.name}loss.d", b.bytes_of(top), "temporary", layer=self.layer(len(self.tape) - 1))
        }
        self.op("loss", "loss", [top], [gradient[top]], 1, phase="backward", layer=self.layer(len(self.tape) - 1))
        back = {got: origin for origin, got in self.sent.items()}
        for i, (step, reads, made, weight, saved) in reversed(list(enumerate(self.tape))):
            if self.style != "data" and i == self.split - 1 and self.split < len(self.tape):
                self.device = 0
                if self.style == "pipeline":
                    for t in list(gradient):
                        if t in back:
                            sent = self.send(gradient.pop(t), 1, 0, "backward")
                            self.take(gradient, back[t], sent, i)
            come = [gradient[t] for t in made if t in gradient]
            targets = [t for t in reads if t not in self.constant and back.get(t) not in self.constant]
            if not come or not (targets or weight is not None):
                continue
            layer = self.layer(i)
            fresh = [
                b.tensor(f"{self.name}d{i}.{k}", b.bytes_of(t), "temporary", layer=layer) for k, t in enumerate(targets)
            ]
            writes = list(fresh)
            if weight is not None:
                writes.append(b.tensor(f"{self.name}dw{i}", b.bytes_of(weight), "gradient", layer=layer))
                self.gradients.append((weight, writes[-1]))
            inputs = [*come, *saved, *([weight] if weight is not None else [])]
            name = f"{self.forward_name(i, step)}.bwd"
            function = self.function(step, len(reads))
            more: dict[str, object] = {"phase": "backward", "layer": layer, "function": function}
            self.op(name, self.kind(step), inputs, writes, 2 * step.took, **more)
            for t, new in zip(targets, fresh, strict=True):
                self.take(gradient, t, new, i)

    def take(self, gradient: dict[int, int], tensor: int, new: int, i: int) -> None:
        """A tensor's first gradient, or one more that is added to it in place."""
        if tensor not in gradient:
            gradient[tensor] = new
            return
        b, old = self.b, gradient[tensor]
        total = b.tensor(f"{self.name}sum{new}", b.bytes_of(old), "temporary", layer=self.layer(i), replaces=old)
        self.op(f"add{new}", "elementwise", [old, new], [total], 1, phase="backward", layer=self.layer(i))
        gradient[tensor] = total

    # ---- update ------------------------------------------------------------------------------

    def update(self, engine: str, *, states: bool) -> None:
        b = self.b
        for weight, grad in self.gradients:
            size = b.bytes_of(weight)
            new = b.tensor(f"{self.name}w{weight}.new", size, "weight", replaces=weight)
            reads, writes = [weight, grad], [new]
            if states:
                state = b.tensor(f"{self.name}w{weight}.m", 2 * size, "optimizer_state")
                reads.append(state)
                writes.append(b.tensor(f"{self.name}w{weight}.m.new", 2 * size, "optimizer_state", replaces=state))
            self.device = self.home[weight]
            self.op(f"step{weight}", "optimizer", reads, writes, 10, phase="update", engine=engine)

    def op(self, name: str, kind: str, reads: list[int], writes: list[int], took: int, **fields: object) -> None:
        cost: dict[str, object] = {"duration": took} if self.measured else {"flops": 20 * took}
        if self.on_cpu and took == 30:  # one op in five, and not always its backward
            cost["engine"] = "cpu"
        reads = [*reads, *(self.view_of[t] for t in reads if t in self.view_of)]
        self.b.op(
            f"{self.name}{name}", kind, reads=list(dict.fromkeys(reads)), writes=writes, device=self.device,
            splits=("batch",) if kind != "optimizer" else (), **{**cost, **fields},  # type: ignore[arg-type]
        )  # fmt: skip

    def layer(self, i: int) -> int:
        return i // self.per_layer if self.per_layer else -1

    def function(self, step: Step, reads: int) -> str:
        """Ops of one operand without a weight are ReLUs, or with a mask poolings, which save where the maxima were."""
        if step.weight or reads != 1:
            return ""
        return "max_pool" if step.mask else "relu"

    def kind(self, step: Step) -> str:
        return self.product if step.weight else "elementwise"

    def forward_name(self, i: int, step: Step) -> str:
        """An op that saves its output may be named as the core of an attention: some policies look for that name."""
        return f"h{self.layer(i)}.attn.core.f{i}" if step.saves_output and self.per_layer else f"f{i}"
