"""Random traces, platforms and budgets for hypothesis: small, legal, and with every feature now and then."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from sim.conformance.random_traces import held
from sim.hardware.platform import Engine, Link, Member, Platform, Pool, Tier
from sim.trace import Trace, TraceBuilder

SIZES = (64, 1, 512, 100, 1000, 4096, 0)
TIMES = (100, 10, 1000, 1, 0)

_STEP = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),  # how far back it reads
    st.integers(0, 31),  # flags: weight, in place, second output, random, reads are saved
    st.integers(0, len(SIZES) - 1),
    st.integers(0, len(TIMES) - 1),
    st.integers(0, 3),  # workspace
)


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    max_steps: int = 7,
    backward: bool = True,
    update: bool | None = None,
    cpu: bool | None = None,
    in_place: bool = True,
    measured: bool | None = None,
) -> Trace:
    """A forward graph, its backward with sums of gradients, and in-place updates of weights and states.

    update: whether weights are updated; cpu: whether some ops run on an engine called `cpu`; measured:
    whether ops have durations, else FLOPs; None lets chance decide. Now and then the program holds tensors
    beyond their last readers. Shrinks to a single op.
    """
    steps = draw(st.lists(_STEP, min_size=1, max_size=max_steps))
    flags = draw(st.integers(0, 15))
    hold = draw(st.integers(0, 63))
    with_update = bool(flags & 1) if update is None else update
    on_cpu = bool(flags & 2) if cpu is None else cpu
    has_times = not flags & 4 if measured is None else measured
    keeps_loss = bool(flags & 8)
    grower = _Grower(has_times, on_cpu)
    for step in steps:
        grower.forward(*step, in_place=in_place)
    if backward:
        grower.backward()
    if with_update:
        grower.update()
    return held(grower.build(keeps_loss), hold % 4, hold // 4)


class _Grower:
    def __init__(self, has_times: bool, on_cpu: bool) -> None:
        self.b = TraceBuilder({"model": "random", "batch": 12})
        self.has_times, self.on_cpu = has_times, on_cpu
        self.alive = [self.b.tensor("x", 512, "input")]
        self.constant = {self.alive[0]}
        self.saved: set[int] = set()
        self.tape: list[tuple[str, list[int], list[int], list[int], int | None, int]] = []
        self.gradients: list[tuple[int, int]] = []
        self.count = 0

    def cost(self, which: int) -> dict[str, int]:
        return {"duration": TIMES[which]} if self.has_times else {"flops": 10 * TIMES[which]}

    def engine(self) -> str:
        self.count += 1
        return "cpu" if self.on_cpu and self.count % 3 == 0 else ""

    def forward(self, back: list[int], flags: int, size: int, took: int, work: int, *, in_place: bool) -> None:
        b, name, layer = self.b, f"f{len(self.tape)}", len(self.tape) // 2
        reads = list(dict.fromkeys(self.alive[-1 - (d % len(self.alive))] for d in back))
        weight = b.tensor(f"{name}.w", SIZES[(size + 2) % 6], "weight", layer=layer) if flags & 1 else None
        first = reads[0]
        overwrites = in_place and flags & 2 and first not in self.saved and first not in self.constant
        bytes = b.bytes_of(first) if overwrites else SIZES[size]
        made = [b.tensor(f"{name}.y", bytes, layer=layer, replaces=first if overwrites else None)]
        if flags & 4:
            made.append(b.tensor(f"{name}.z", SIZES[(size + 1) % 7], layer=layer))
        kept = [t for t in reads if flags & 16 and not (overwrites and t == first)]
        kept += made[:1] if flags & 8 else []
        self.saved.update(kept)
        b.op(
            name,
            "matmul" if weight is not None else "elementwise",
            reads=[*reads, *([weight] if weight is not None else [])],
            writes=made,
            layer=layer,
            workspace=(0, 0, 32, 512)[work],
            engine=self.engine(),
            random=bool(flags & 8),
            splits=("batch",),
            **self.cost(took),
        )
        if overwrites:
            self.alive.remove(first)
        self.alive += made
        self.tape.append((name, reads, made, kept, weight, took))

    def backward(self) -> None:
        b, split = self.b, {"splits": ("batch",)}
        top = self.tape[-1][2][0]
        gradient = {top: b.tensor("loss.d", b.bytes_of(top), "temporary")}
        b.op("loss", "loss", phase="backward", reads=[top], writes=[gradient[top]], **self.cost(1), **split)
        for k, (name, reads, made, kept, weight, took) in reversed(list(enumerate(self.tape))):
            come = [gradient[t] for t in made if t in gradient]
            fresh = {
                t: b.tensor(f"{name}.d{i}", b.bytes_of(t), "temporary", layer=k // 2)
                for i, t in enumerate(reads)
                if t not in self.constant
            }
            if not come or not (fresh or weight is not None):
                continue
            writes = list(fresh.values())
            if weight is not None:
                writes.append(b.tensor(f"{name}.dw", b.bytes_of(weight), "gradient", layer=k // 2))
                self.gradients.append((weight, writes[-1]))
            b.op(
                f"{name}.b",
                "matmul",
                phase="backward",
                reads=[*come, *kept, *([weight] if weight is not None else [])],
                writes=writes,
                layer=k // 2,
                engine=self.engine(),
                **self.cost((took + 2) % 5),
                **split,
            )
            for t, new in fresh.items():
                gradient[t] = self.add(gradient[t], new, name) if t in gradient else new

    def add(self, old: int, new: int, name: str) -> int:
        total = self.b.tensor(f"{name}.sum{new}", self.b.bytes_of(old), "temporary", replaces=old)
        fields = {**self.cost(3), "splits": ("batch",)}
        self.b.op(f"{name}.add{new}", phase="backward", reads=[old, new], writes=[total], **fields)
        return total

    def update(self) -> None:
        b = self.b
        for i, (weight, grad) in enumerate(self.gradients):
            new = b.tensor(f"w{i}.new", b.bytes_of(weight), "weight", replaces=weight)
            reads, writes = [weight, grad], [new]
            if i % 2:
                state = b.tensor(f"w{i}.m", 2 * b.bytes_of(weight), "optimizer_state")
                reads.append(state)
                writes.append(b.tensor(f"w{i}.m.new", b.bytes_of(state), "optimizer_state", replaces=state))
            engine = "cpu" if self.on_cpu else ""
            b.op(f"w{i}.step", "optimizer", phase="update", reads=reads, writes=writes, engine=engine, **self.cost(1))

    def build(self, keeps_loss: bool) -> Trace:
        plain = self.b.build()
        if not keeps_loss:
            return plain
        kept = [grad for _, grad in self.gradients] or [len(plain.tensors) - 1]
        extra = [t for t in kept if plain.replaced_by[t] < 0 and t not in plain.outputs]
        return self.b.build(outputs=(*plain.outputs, *extra), carry=plain.carry)


# ---- platforms ---------------------------------------------------------------------------------

_RATES = (10**9, 10**8, 3 * 10**9, 10**10, 7 * 10**7)


@st.composite
def platforms(draw: st.DrawFn, *, capacity: int | None = None, host: bool | None = None, cpu: bool = True) -> Platform:
    """A device with its `hbm`, mostly a `host` with links both ways, sometimes an `nvme` behind that.

    capacity: bytes of the device's tier (default: a lot, or little). host: whether there is one. cpu:
    whether an engine `cpu` works there; without a host it works on the device's own memory.
    """
    rates = draw(st.tuples(*[st.integers(0, len(_RATES) - 1)] * 4))
    shape = draw(st.integers(0, 255))
    tiers = 1 if host is False else (2 if host else 1) + (shape & 3 > 0 if host is None else shape & 1)
    size = (1 << 40, 1 << 12, 1 << 14)[(shape >> 2) % 3] if capacity is None else capacity
    parts = [Tier("hbm", size, size, 10**11, kind="hbm", device=0)]
    links, pools, members = [], [], []
    fixed, copy_engines = (0, 10, 1000, 1)[shape >> 4 & 3], 1 + (shape >> 6 & 1)
    if tiers >= 2:
        parts.append(Tier("host", 1 << 40, 1 << 40, 10**10, kind="ddr"))
        links.append(Link("d2h", "hbm", "host", _RATES[rates[0]], fixed, copy_engines))
        links.append(Link("h2d", "host", "hbm", _RATES[rates[1]], fixed, copy_engines))
    if tiers >= 3:
        parts.append(Tier("nvme", 1 << 42, 1 << 42, 10**9, latency=100, kind="nvme"))
        links.append(Link("h2n", "host", "nvme", _RATES[rates[2]], fixed))
        links.append(Link("n2h", "nvme", "host", _RATES[rates[2]], fixed))
    home = "host" if tiers >= 2 else "hbm"
    engines = [Engine("gpu", 0, "hbm", ("hbm",), {"fp32": 10**11}, launch=shape >> 7)]
    if cpu:
        engines.append(Engine("cpu", -1, home, (home,), {"fp32": 10**10}, main=False))
    style = rates[3] % 4
    if links and style == 1:  # duplex: each direction loses a part of its rate to the other
        members = [Member("d2h", factor=Fraction(4, 5)), Member("h2d", factor=Fraction(2, 3))]
        pools.append(Pool("pcie", tuple(members)))
    elif links and style == 2:  # half duplex, copies below charge it too
        members = [Member("d2h"), Member("h2d", Fraction(3))]
        pools.append(Pool("bus", tuple(members), rate=10**9))
    elif links and style == 3:  # the host's memory, shared by copies and its engine
        members = [Member(link.name, Fraction(2)) for link in links] + ([Member("cpu")] if cpu else [])
        pools.append(Pool("ddr", tuple(members), rate=2 * 10**9))
    return Platform("random", tuple(parts), tuple(engines), tuple(links), tuple(pools))


def keep_all_peak(trace: Trace) -> int:
    """Bytes that a run needs at most if every tensor is freed once it is let go, all in one tier."""
    size, replaces, last = trace.tensor_columns.bytes, trace.tensor_columns.replaces, trace.held_until
    live = peak = int(size[trace.producer < 0].sum())
    kept = {*trace.outputs}
    for op in trace.ops:
        live += sum(int(size[t]) for t in op.writes if replaces[t] < 0)
        peak = max(peak, live + op.workspace)
        for t in {*op.reads, *op.writes, *op.releases}:
            if last[t] == op.id and t not in kept and trace.replaced_by[t] < 0 and _owned(trace, t):
                live -= int(size[t])
    return peak


def _owned(trace: Trace, tensor: int) -> bool:
    """Whether its storage was taken while the trace ran."""
    while trace.tensor_columns.replaces[tensor] >= 0:
        tensor = int(trace.tensor_columns.replaces[tensor])
    return bool(trace.producer[tensor] >= 0)


def floor_bytes(trace: Trace) -> int:
    """No plan without moves runs in less: what exists from the start, and the neediest op beside it."""
    size, producer, replaces = trace.tensor_columns.bytes, trace.producer, trace.tensor_columns.replaces
    there = int(size[producer < 0].sum())
    need = [
        op.workspace
        + sum(int(size[t]) for t in op.writes if replaces[t] < 0)
        + sum(int(size[t]) for t in set(op.reads) if _owned(trace, t))
        for op in trace.ops
    ]
    return there + max(need, default=0)


@st.composite
def budgets(draw: st.DrawFn, trace: Trace) -> int:
    """Bytes from ample down to just below what the neediest op takes."""
    return budget_at(trace, draw(st.integers(0, 11)))


def budget_at(trace: Trace, step: int) -> int:
    """Bytes: 0 is ample, 10 what the neediest op takes, 11 just below that."""
    top, floor = keep_all_peak(trace), floor_bytes(trace)
    return max(1, top - (top - floor) * step // 10 - (step == 11))
