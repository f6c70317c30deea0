"""Logs made without an engine: one drawn by hand, a seeded step of any length; and their pages in a browser."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest

from sim.analysis import summarize
from sim.hardware.platform import Engine, Fact, Link, Platform, Tier
from sim.log import CAUSE, STALL, WHY, EventLog
from sim.report.footer import Footer
from sim.report.page import RunView, TableView, write_run_page, write_table_page
from sim.trace.builder import TraceBuilder

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
MIB = 2**20
GIB = 2**30


def platform(devices: int = 1, copy_engines: int = 1, capacity: int = 2 * GIB) -> Platform:
    """Devices of one engine and one tier each, a shared host, and a link each way for every device."""
    tiers = [Tier(f"hbm{d}", capacity, 2 * capacity, 10**12, device=d) for d in range(devices)]
    engines = [Engine(f"gpu{d}", d, f"hbm{d}", (f"hbm{d}",), {"fp16": 10**14}) for d in range(devices)]
    links = []
    for d in range(devices):
        links.append(Link(f"d2h{d}", f"hbm{d}", "host", 10**10, copy_engines=copy_engines))
        links.append(Link(f"h2d{d}", "host", f"hbm{d}", 10**10, copy_engines=copy_engines))
    return Platform(
        name="bench",
        tiers=(*tiers, Tier("host", 256 * GIB, 256 * GIB, 10**11, kind="ddr")),
        engines=(*engines, Engine("cpu", -1, "host", ("host",), {"fp32": 10**12}, main=False)),
        links=tuple(links),
        facts=(
            Fact("tiers.hbm0.bandwidth", "1 TB/s", "a datasheet", "vendor"),
            Fact("links.d2h0.rate", "10 GB/s", "nobody knows", "assumed"),
        ),
        budget=capacity,
    )


@dataclass
class Pen:
    """Collects the rows of a log; sorts them by time, releases before takes."""

    intervals: list[tuple[int, ...]] = field(default_factory=list)
    changes: list[tuple[int, ...]] = field(default_factory=list)

    def busy(self, start, end, lane, why, *, device=0, op=-1, tensor=-1, cause="", bytes=0):
        self.intervals.append((start, end, device, lane, WHY[why], op, tensor, STALL[cause], bytes))

    def use(self, time, tier, delta, cause, *, tensor=-1, op=-1):
        self.changes.append((time, tier, delta, tensor, op, CAUSE[cause]))

    def log(self, trace, where, *, complete=True) -> EventLog:
        intervals = np.array(sorted(self.intervals), np.int64).reshape(-1, 9)
        changes = sorted(self.changes, key=lambda row: (row[0], row[2] > 0))
        end = int(intervals[:, 1].max(initial=0))
        return EventLog(
            trace,
            where,
            intervals,
            np.array(changes, np.int64).reshape(-1, 6),
            np.zeros((0, 3), np.int64),
            end,
            complete,
        )


@pytest.fixture(scope="session")
def drawn_log() -> EventLog:
    """By hand, in ns: `x` lies in hbm; f makes `a` (0..10), g makes `y` (10..17); `a` goes to the host (10..30)
    and comes back (40..60, on demand: the device waits 37..60); b reads it (60..67) and runs f again first (17..37).

    Sizes: x 4, a 16, y 8 MiB; f holds 2 MiB of workspace.
    """
    b = TraceBuilder({"model": "drawn"})
    x = b.tensor("x", 4 * MIB, "input")
    a = b.tensor("a", 16 * MIB, layer=3)
    y = b.tensor("y", 8 * MIB, "weight")
    z = b.tensor("z", 1 * MIB, "gradient")
    f = b.op("f", "matmul", reads=[x], writes=[a], layer=3, workspace=2 * MIB)
    g = b.op("g", "norm", reads=[a], writes=[y])
    back = b.op("b", "matmul", reads=[a, y], writes=[z], phase="backward", layer=3)
    pen, where = Pen(), platform(capacity=32 * MIB)
    d2h, h2d = where.lanes.index("d2h0"), where.lanes.index("h2d0")
    pen.use(0, 0, 4 * MIB, "placed", tensor=x)
    pen.busy(0, 10, 0, "run", op=f)
    pen.use(0, 0, 16 * MIB, "made", tensor=a, op=f)
    pen.use(0, 0, 2 * MIB, "workspace", op=f)
    pen.use(10, 0, -2 * MIB, "workspace", op=f)
    pen.busy(10, 17, 0, "run", op=g)
    pen.use(10, 0, 8 * MIB, "made", tensor=y, op=g)
    pen.busy(10, 30, d2h, "move", tensor=a, bytes=16 * MIB)
    pen.use(10, 1, 16 * MIB, "moved in", tensor=a)
    pen.use(30, 0, -16 * MIB, "moved out", tensor=a)
    pen.busy(17, 37, 0, "recompute", op=f)
    pen.busy(37, 60, 0, "stall", op=back, tensor=a, cause="transfer")
    pen.busy(40, 60, h2d, "move", tensor=a, bytes=16 * MIB)
    pen.use(40, 0, 16 * MIB, "moved in", tensor=a)
    pen.use(60, 1, -16 * MIB, "moved out", tensor=a)
    pen.busy(60, 67, 0, "run", op=back)
    pen.use(60, 0, 1 * MIB, "made", tensor=z, op=back)
    pen.use(67, 0, -16 * MIB, "freed", tensor=a, op=back)
    return pen.log(b.build(), where)


def training_log(layers: int, *, seed: int = 0, devices: int = 1, copy_engines: int = 1) -> EventLog:
    """A training step of each device: a third of the activations kept, a third offloaded, a third recomputed."""
    draw = random.Random(seed)
    where = platform(devices, copy_engines)
    b, pen = TraceBuilder({"model": f"step-{layers}", "samples": 4, "tokens": 4096}), Pen()
    for d in range(devices):
        _one_device(b, pen, where, d, layers, draw)
    return pen.log(b.build(), where)


def _one_device(b: TraceBuilder, pen: Pen, where: Platform, d: int, layers: int, draw: random.Random) -> None:
    hbm, host = where.tier_ids[f"hbm{d}"], where.tier_ids["host"]
    d2h, h2d = where.lanes.index(f"d2h{d}"), where.lanes.index(f"h2d{d}")
    unit = max(1, 1500 * MIB // (8 * layers))
    size = [draw.randrange(unit, 4 * unit) for _ in range(layers)]
    took = [draw.randrange(200_000, 900_000) for _ in range(layers)]
    weights = [b.tensor(f"w{d}.{i}", unit // 2, "weight", layer=i) for i in range(layers)]
    moments = [b.tensor(f"m{d}.{i}", unit, "optimizer_state", layer=i) for i in range(layers)]
    acts = [b.tensor(f"x{d}", size[0], "input")]
    acts += [b.tensor(f"h{d}.{i}", size[i], "activation", layer=i) for i in range(layers)]
    for t in (*weights, *moments, acts[0]):
        pen.use(0, hbm, b.bytes_of(t), "placed", tensor=t)
    forward = [
        b.op(
            f"f{d}.{i}", "matmul", reads=[acts[i], weights[i]], writes=[acts[i + 1]], layer=i, device=d, workspace=unit
        )
        for i in range(layers)
    ]
    fates = [draw.choice(("keep", "offload", "recompute")) for _ in range(layers)]
    fates[-1] = "keep"
    lane_free = {d2h: [0] * where.links[0].copy_engines, h2d: [0] * where.links[0].copy_engines}

    def copy(lane: int, at: int, tensor: int) -> tuple[int, int]:
        free = min(range(len(lane_free[lane])), key=lane_free[lane].__getitem__)
        start = max(at, lane_free[lane][free])
        end = start + -(-b.bytes_of(tensor) * len(lane_free[lane]) // 10)
        lane_free[lane][free] = end
        pen.busy(start, end, lane, "move", device=d, tensor=tensor, bytes=b.bytes_of(tensor))
        into, out = (host, hbm) if lane == d2h else (hbm, host)
        pen.use(start, into, b.bytes_of(tensor), "moved in", tensor=tensor)
        pen.use(end, out, -b.bytes_of(tensor), "moved out", tensor=tensor)
        return start, end

    now, home_at = 0, {}

    def run(op: int, i: int, writes: list[int], why: str, factor: int = 1) -> None:
        nonlocal now
        end = now + took[i] * factor
        pen.busy(now, end, d, why, device=d, op=op)
        for t in writes:
            pen.use(now, hbm, b.bytes_of(t), "made", tensor=t, op=op)
        pen.use(now, hbm, unit, "workspace", op=op)
        pen.use(end, hbm, -unit, "workspace", op=op)
        now = end

    for i in range(layers):
        run(forward[i], i, [acts[i + 1]], "run")
        if i and fates[i - 1] == "offload":
            home_at[i] = copy(d2h, now, acts[i])[1]
        elif i and fates[i - 1] == "recompute":
            pen.use(now, hbm, -b.bytes_of(acts[i]), "dropped", tensor=acts[i])
    upper = -1
    fetched: dict[int, int] = {}
    for i in reversed(range(layers)):
        for ahead in (i, i - 1):
            if ahead > 0 and fates[ahead - 1] == "offload" and ahead not in fetched:
                fetched[ahead] = copy(h2d, max(now, home_at[ahead]), acts[ahead])[1]
        if i and fates[i - 1] == "recompute":
            run(forward[i - 1], i - 1, [acts[i]], "recompute")
        grad = b.tensor(f"g{d}.{i}", b.bytes_of(weights[i]), "gradient", layer=i)
        down = b.tensor(f"e{d}.{i}", size[i], "temporary", layer=i)
        reads = [acts[i], weights[i]] + ([upper] if upper >= 0 else [acts[layers]])
        op = b.op(
            f"b{d}.{i}", "matmul", reads=reads, writes=[grad, down], phase="backward", layer=i, device=d, workspace=unit
        )
        if fetched.get(i, 0) > now:
            pen.busy(now, fetched[i], d, "stall", device=d, op=op, tensor=acts[i], cause="transfer")
            now = fetched[i]
        run(op, i, [grad, down], "run", 2)
        for t in (upper, acts[i] if i + 1 <= layers else -1):
            if t >= 0:
                pen.use(now, hbm, -b.bytes_of(t), "freed", tensor=t, op=op)
        upper = down
    pen.use(now, hbm, -b.bytes_of(upper), "freed", tensor=upper)
    pen.use(now, hbm, -b.bytes_of(acts[layers]), "freed", tensor=acts[layers])


@pytest.fixture(scope="session")
def make_log() -> Callable[..., EventLog]:
    return training_log


@pytest.fixture(scope="session")
def step_log() -> EventLog:
    return training_log(24, seed=7)


# ---- pages in a browser --------------------------------------------------------------------------


@pytest.fixture
def visit(browser):
    """Opens a file in a fresh browser without a network; afterwards nothing may have been said or asked for."""
    contexts, said = [], []

    def go(path, *, size=DESKTOP, scheme="light", touch=False, script=None):
        context = browser.new_context(
            viewport=size, color_scheme=scheme, offline=True, has_touch=touch, is_mobile=touch
        )
        contexts.append(context)
        if script is not None:
            context.add_init_script(path=script)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: request.url.partition("#")[0] == path.as_uri() or said.append(f"asked for {request.url}"),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("main[aria-busy=false]")
        return page

    yield go
    for context in contexts:
        context.close()
    assert said == []


def view_of(log, **more):
    about = {"title": "some_policy", "log": log, "summary": summarize(log).as_dict(), "footer": Footer(log.platform)}
    return RunView(**{**about, "fidelity": "equations", "manages": ("activations",), "doc": "What it does.", **more})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def drawn(drawn_log, folder):
    return write_run_page(view_of(drawn_log), folder / "drawn.html")


@pytest.fixture(scope="module")
def step(step_log, folder):
    return write_run_page(view_of(step_log), folder / "step.html")


@pytest.fixture(scope="module")
def short(drawn_log, folder):
    """The run drawn by hand, as if `b` at its end had asked for 40 MiB of the 32 MiB, of which 3 are free."""
    log = replace(drawn_log, complete=False)
    asked = {"refusal": "out_of_memory", "error": "op 'b' needs 40 MiB", "full": ["hbm0"]}
    asked |= {"need_bytes": 40 << 20, "free_bytes": 3 << 20, "fits": False}
    view = view_of(log)
    return write_run_page(replace(view, summary={**view.summary, **asked}), folder / "short.html")


@pytest.fixture(scope="module")
def study(folder):
    """A study of two machines, three batches, four budgets and three policies, one of which fits down to half."""
    rows, draw, whole = [], random.Random(5), 8 * GIB
    for machine, batch, share in product(("a_card", "another"), (2, 4, 16), (100, 90, 75, 50)):
        for policy, least in (("keep_all", 100), ("chen", 75), ("swap_all", 50 if batch < 16 else 60)):
            row = {"id": f"{machine}-{batch}-{share}-{policy}", "policy": policy, "profile": machine, "batch": batch}
            row |= {"budget": "all" if share == 100 else f"{share}%", "status": "ok", "fits": True, "fidelity": "code"}
            row |= {"budget_bytes": whole * share // 100, "unconstrained_peak_bytes": whole, "devices": 1}
            slower = draw.choice([0.02, 0.2, 0.5]) if policy != "keep_all" else 0.0
            figures = {"makespan_ns": int(1e8 * batch * (1 + slower)), "overhead": slower}
            figures["peak_bytes"] = whole * min(share, 99) // 100
            refused = {"status": "infeasible", "fits": False, "error": "it does not fit", "refusal": "out_of_memory"}
            rows.append(row | (figures if share >= least else refused))
    labels = ("profile", "batch", "policy", "budget")
    return write_table_page(TableView("a study", labels, rows), folder / "study.html"), rows


@pytest.fixture(scope="module")
def many(step_log, drawn_log, folder):
    rows = []
    for i in range(250):
        policy, fits = ("keep_all", "dtr", "chen")[i % 3], i % 7 != 3
        row = {"id": f"cell{i:03}", "policy": policy, "batch": i // 3 + 1, "fits": fits, "fidelity": "code"}
        figures = {
            "peak_bytes": (i * 7919 % 997 + 1) * MIB,
            "makespan_ns": (i * 104729 % 1009 + 1) * 10**6,
            "devices": 1,
        }
        rows.append(row | (figures if fits else {"error": "it does not fit", "floor_bytes": 10**9}))
    runs = {"cell000": view_of(step_log, title="the run of cell 0"), "cell004": view_of(drawn_log)}
    view = TableView("a study", ("policy", "batch"), rows, platforms=[step_log.platform], runs=runs, notes=["a note"])
    return write_table_page(view, folder / "many.html"), rows
