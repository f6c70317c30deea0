"""Writes docs/planning.md: how long exact planners take, by size, and what that makes of the survey's models.

python scripts/make_planning.py             write the page from docs/planning.json
python scripts/make_planning.py --check     say whether the page is current; exit status 1 where it is not
python scripts/make_planning.py --measure   measure whatever the data lacks, a quarter of an hour of processor time

A planner is run on chains of stages of unequal times and sizes, ever longer ones, three of each length, until one takes
longer than `LIMIT_S`. Only plans that are proven best, or that a dynamic program has found, count. Two laws are fitted
to the logarithms of the times by least squares, t = a n^b and t = a e^(b n); the intervals are those of a further
observation, from Student's distribution, by the usual formula of linear regression.
"""

from __future__ import annotations

import json
import math
import platform
import random
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_demo import replaced

ROOT = Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "docs" / "planning.json", ROOT / "docs" / "planning.md"
LIMIT_S, GPT_S = 40, 150
"""Seconds that one search may take, of chains and of GPTs; after a size at which one has not ended, no larger one is
tried."""
LEAST_S = 0.02
"""Lengths at which a planner takes less than this on average are no part of a fit: what it does once counts there."""
SHARES = (0.45, 0.55, 0.65)
"""Of the three chains of each length: the budget, as a part of what keeping everything needs."""
GPT_SHARES = (0.75, 0.85, 0.95)
"""The same of the GPTs, of which the weights and their states are a large part."""
LAYERS = {"rotor": (24, 96), "checkmate": (1, 2), "moccasin": (1, 2), "poet": (1,), "autotm": (2,)}
LENGTHS = (3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128, 192)
MIB = 1 << 20
ALL = f"max_ops=100000, time_limit={LIMIT_S}"
PLANNERS: Mapping[str, tuple[str, str]] = {
    "rotor": ("dynamic program", "rotor"),
    "checkmate": ("integer program", f"checkmate(method=milp, node_limit=1000000000, {ALL})"),
    "moccasin": ("constraint program", f"moccasin(work_limit=1000000, {ALL})"),
    "poet": ("integer program with copies", f"poet({ALL})"),
    "autotm": ("integer program of copies", f"autotm({ALL})"),
}
BY_STAGE = ("rotor",)
"""Planners whose published form plans over a chain of stages; the others plan over single ops."""


class Model(NamedTuple):
    """A model of a size that the survey names: layers, and what a planner has to plan over."""

    name: str
    layers: int

    @property
    def stages(self) -> int:
        """Stages of the chain of a GPT: attention and MLP of each layer, and five beside them."""
        return 2 * self.layers + 5

    @property
    def ops(self) -> int:
        """Forward and backward ops of a GPT in the program's traces."""
        return 50 * self.layers + 24


MODELS = (Model("1.3 B (GPT-3 XL)", 24), Model("175 B (GPT-3)", 96), Model("1 T", 128))
"""The lower ends of the three classes of the survey's Table 2; layers: Brown et al. 2020, table 2.1; Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, table 1."""
FINDINGS = (
    """**Dynamic programs: "up to months" is bounded from above.** `rotor` grows as n^{power:.1f}, near the n^3 of its
    paper. Over the stages of a model of {large} it takes {of}, over its single ops {by_op}. A month is what a chain of
    some {slots:,} stages would take, {more:.1f} times as many as that model has forward ops.""",
    """**Integer programs: "hours to days" holds over stages of the smallest class, and is too little for single
    ops.** By the power law, which is the milder one, `checkmate` takes {coarse} over the stages of {small}; over its
    ops, scaled to what layers of a GPT took, {fine}. It comes to a day at some {day} ops, which are {layers:.0f}
    layers. So who solves programs of that kind at scale does it block by block, or rounds their relaxation.""",
    """**It depends on the program, not on its being one.** Which tensor lies where at which time (`autotm`) is an
    integer program, too; over the ops of {large} it takes {placing} by the power law.""",
)
UNITS = (("years", 365.25 * 86400), ("days", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3))


# ---- measuring ----------------------------------------------------------------------------------


def chain_of(stages: int, seed: int) -> Any:
    """A chain whose stages differ in times and sizes by up to three times."""
    from workloads.synthetic import chain

    draw = random.Random(1000 * stages + seed)
    forward = [1000 * draw.randint(50, 150) for _ in range(stages)]
    sizes = [MIB * draw.randint(4, 12) for _ in range(stages + 1)]
    saved = [size + MIB * draw.randint(8, 24) for size in sizes[1:]]
    return chain(forward, [2 * each for each in forward], sizes, saved)


def gpt_of(layers: int) -> Any:
    """A GPT of so many narrow layers; sizes of tensors change nothing of how long a planner takes."""
    from workloads import transformer

    config = {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 512,
        "n_layer": layers,
    }
    return transformer(config, batch=8, sequence=128, precision="mixed_bf16")


def timed(policy: str, trace: Any, share: float) -> dict[str, Any]:
    """Processor time of one plan, and whether it is what the planner looks for. share: of what keeping all needs."""
    from sim import load_profile
    from sim.analysis.peak_memory import home_peak
    from sim.errors import TiersimError
    from sim.experiment import problem_for, reference_run
    from sim.policies import load

    machine = load_profile("a100_40_pcie")
    budget = int(share * home_peak(reference_run(trace, machine)))
    problem, planner = problem_for(trace, machine.with_budget(budget)), load(policy)
    began = time.process_time()
    try:
        notes = dict(planner.plan(problem).notes)
        ended = str(notes.get("status", "planned"))
        ended = "limit" if notes.get("limit") or notes.get("time_limited") else ended
    except TiersimError as error:
        ended = "limit" if "limit of time" in str(error) else "infeasible"
    return {"cpu_s": round(time.process_time() - began, 4), "ended": ended}


def measure() -> None:
    """Measure what the data lacks, and keep it after each run."""
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"planners": {}}
    data |= {"machine": f"{platform.machine()}, Python {platform.python_version()}", "limit_s": LIMIT_S}
    data.setdefault("gpt", {})
    for name, (_, policy) in PLANNERS.items():
        longer = policy.replace(f"time_limit={LIMIT_S}", f"time_limit={GPT_S}")
        for of, key, sizes, trace_of, shares, searched in (
            (data["planners"], "stages", LENGTHS, chain_of, SHARES, policy),
            (data["gpt"], "layers", LAYERS.get(name, ()), lambda layers, seed: gpt_of(layers), GPT_SHARES, longer),
        ):
            rows = of.setdefault(name, [])
            for size in sizes:
                for seed, share in enumerate(shares):
                    if not any((row[key], row["seed"]) == (size, seed) for row in rows):
                        rows.append({key: size, "seed": seed, **timed(searched, trace_of(size, seed), share)})
                        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
                        print(name, rows[-1], file=sys.stderr)
                if any(row["ended"] == "limit" or row["cpu_s"] > LIMIT_S for row in rows if row[key] == size):
                    break


# ---- fitting ------------------------------------------------------------------------------------


class Law(NamedTuple):
    """ln t = a + b x, with x = ln n or n, fitted to some runs.

    spread: standard deviation of the logarithms of the times about it.
    """

    kind: str
    a: float
    b: float
    spread: float
    x: tuple[float, ...]

    def at(self, n: float) -> tuple[float, float, float]:
        """Seconds at a size as natural logarithms: the fit, and the 95 % interval of a further run."""
        from scipy.stats import t

        x, mean, free = scale(self.kind, n), sum(self.x) / len(self.x), len(self.x) - 2
        sum_of_squares = sum((each - mean) ** 2 for each in self.x)
        error = self.spread * math.sqrt(1 + 1 / len(self.x) + (x - mean) ** 2 / sum_of_squares)
        width, middle = float(t.ppf(0.975, free)) * error, self.a + self.b * x
        return middle, middle - width, middle + width


def scale(kind: str, n: float) -> float:
    """The abscissa of a law."""
    return math.log(n) if kind == "power" else n


def size_of(name: str, row: Mapping[str, Any]) -> int:
    """What a planner plans over: stages, or their ops, forward, loss and backward."""
    return int(row["stages"] if name in BY_STAGE else 2 * row["stages"] + 1)


def solved(name: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Size and seconds of the runs that count: of lengths at which none met a limit, from `LEAST_S` on."""
    found: list[tuple[int, float]] = []
    for stages in dict.fromkeys(row["stages"] for row in rows):
        same = [row for row in rows if row["stages"] == stages]
        done = [row for row in same if row["ended"] in ("optimal", "planned", "feasible")]
        late = any(row["ended"] == "limit" for row in same)
        if done and not late and sum(row["cpu_s"] for row in done) >= LEAST_S * len(done):
            found += [(size_of(name, row), row["cpu_s"]) for row in done]
    return found


def fit(kind: str, runs: Sequence[tuple[int, float]]) -> Law:
    """Least squares of the logarithm of the time."""
    x, y = np.array([scale(kind, n) for n, _ in runs]), np.log([seconds for _, seconds in runs])
    b, a = np.polyfit(x, y, 1)
    spread = math.sqrt(float(((y - a - b * x) ** 2).sum()) / (len(runs) - 2))
    return Law(kind, float(a), float(b), spread, tuple(x.tolist()))


def laws(runs: Sequence[tuple[int, float]]) -> list[Law]:
    """Both laws, that first which is nearer to the runs."""
    return sorted((fit(kind, runs) for kind in ("power", "exponential")), key=lambda law: law.spread)


def left_out(kind: str, runs: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Seconds that the law of all but the largest size gives for that: interval, and the geometric mean measured."""
    largest = max(n for n, _ in runs)
    _, low, high = fit(kind, [run for run in runs if run[0] < largest]).at(largest)
    return math.exp(low), math.exp(high), math.exp(float(np.mean([math.log(s) for n, s in runs if n == largest])))


# ---- the page -----------------------------------------------------------------------------------


def said(logarithm: float) -> str:
    """Seconds, given as a natural logarithm, in the unit that fits them."""
    digits = logarithm / math.log(10)
    if digits - math.log10(UNITS[0][1]) > 4:
        return f"10^{digits - math.log10(UNITS[0][1]):.0f} years"
    seconds = math.exp(logarithm)
    unit, length = next(((unit, length) for unit, length in UNITS if seconds >= length), UNITS[-1])
    number = seconds / length
    return f"{number:,.0f} {unit}" if number >= 10 else f"{number:.2g} {unit}"


def between(low: float, high: float) -> str:
    """An interval of seconds, given as logarithms."""
    return f"{said(low)} … {said(high)}"


def measured(data: Mapping[str, Any]) -> str:
    """What was measured, and which law is nearer."""
    lines = ["| planner | what it is | sizes | longest | nearer law | spread | largest size left out |",
             "| --- | --- | --- | ---: | --- | ---: | --- |"]  # fmt: skip
    for name, (what, _) in PLANNERS.items():
        runs = solved(name, data["planners"][name])
        law, of = laws(runs)[0], "stages" if name in BY_STAGE else "ops"
        term = f"n^{law.b:.2f}" if law.kind == "power" else f"e^({law.b:.3f} n)"
        low, high, seen = left_out(law.kind, runs)
        hit = "in" if low <= seen <= high else "**outside**"
        lines.append(
            f"| `{name}` | {what} | {min(n for n, _ in runs)} to {max(n for n, _ in runs)} {of} | "
            f"{said(math.log(max(s for _, s in runs)))} | {term} | × {math.exp(law.spread):.2f} | "
            f"{said(math.log(seen))}, {hit} {between(math.log(low), math.log(high))} |"
        )
    return "\n".join(lines) + "\n"


def extrapolated(data: Mapping[str, Any]) -> str:
    """Seconds at the survey's sizes by both laws."""
    lines = ["| planner | law | " + " | ".join(f"{model.name}, {model.layers} layers" for model in MODELS) + " |",
             "| --- | --- | " + " | ".join("---" for _ in MODELS) + " |"]  # fmt: skip
    for name in PLANNERS:
        of = {law.kind: law for law in laws(solved(name, data["planners"][name]))}
        for by_stage in (True, False):
            shown = {"power law": of["power"]}
            if name not in BY_STAGE:
                shown["exponential law"] = of["exponential"]
                if not by_stage and (law := scaled(of["power"], name, data)) is not None:
                    shown["power law, scaled to the GPTs"] = law
            for kind, law in shown.items():
                cells = [between(*law.at(size_at(name, model, by_stage))[1:]) for model in MODELS]
                what = f"`{name}` over {'stages' if by_stage else 'ops'}"
                lines.append(f"| {what} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def scaled(law: Law, name: str, data: Mapping[str, Any]) -> Law | None:
    """A law times the factor that GPTs take on the geometric mean; where a search met its limit, its time so far."""
    rows = [row for row in data["gpt"].get(name, ()) if row["ended"] != "infeasible"]
    sizes = [size_at(name, Model("", row["layers"]), by_stage=name in BY_STAGE) for row in rows]
    more = [math.log(row["cpu_s"]) - law.at(n)[0] for row, n in zip(rows, sizes, strict=True)]
    return law._replace(a=law.a + sum(more) / len(more)) if more else None


def size_at(name: str, model: Model, by_stage: bool) -> int:
    """What a planner plans over of a model: stages, of which single forward ops may be each one, or their ops."""
    if name in BY_STAGE:
        return model.stages if by_stage else model.ops // 2
    return 2 * model.stages + 1 if by_stage else model.ops


def reached(law: Law, seconds: float) -> int:
    """The size at which a law's fit comes to some seconds."""
    x = (math.log(seconds) - law.a) / law.b
    return round(math.exp(x) if law.kind == "power" else x)


def beside(data: Mapping[str, Any]) -> str:
    """What the laws, which are of chains, give for layers of a GPT, and what those took."""
    lines = ["| planner | a GPT of | took | power law | exponential law |", "| --- | --- | --- | --- | --- |"]
    for name, rows in data["gpt"].items():
        runs = solved(name, data["planners"][name])
        for layers in dict.fromkeys(row["layers"] for row in rows):
            same = [row for row in rows if row["layers"] == layers and row["ended"] != "infeasible"]
            took = ", ".join(f"{'> ' * (row['ended'] == 'limit')}{said(math.log(row['cpu_s']))}" for row in same)
            size = size_at(name, Model("", layers), by_stage=name in BY_STAGE)
            cells = [between(*fit(kind, runs).at(size)[1:]) for kind in ("power", "exponential")]
            of = f"{layers} {'layer' if layers == 1 else 'layers'}: {size} {'stages' if name in BY_STAGE else 'ops'}"
            lines.append(f"| `{name}` | {of} | {took} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def follows(data: Mapping[str, Any]) -> str:
    """What the figures make of the survey's two claims."""
    month, day = 30 * 86400.0, 86400.0
    of = {name: {law.kind: law for law in laws(solved(name, data["planners"][name]))} for name in PLANNERS}
    rotor, program, placing = of["rotor"]["power"], of["checkmate"], of["autotm"]["power"]
    small, large = MODELS[0], MODELS[-1]
    stages, ops = (rotor.at(size_at("rotor", large, by_stage))[1:] for by_stage in (True, False))
    slots, longest = reached(rotor, month), large.ops // 2
    on_gpt = scaled(program["power"], "checkmate", data)
    assert on_gpt is not None
    coarse, fine = program["power"].at(size_at("checkmate", small, True))[1:], on_gpt.at(small.ops)[1:]
    times = {"of": between(*stages), "by_op": between(*ops), "coarse": between(*coarse), "fine": between(*fine)}
    times |= {"placing": between(*placing.at(large.ops)[1:])}
    numbers = {"power": rotor.b, "slots": slots, "more": slots / longest, "small": small.name, "large": large.name}
    numbers |= {"day": reached(on_gpt, day), "layers": reached(on_gpt, day) / 50}
    lines = [line.format(**times, **numbers) for line in FINDINGS]
    return "\n\n".join(textwrap.fill(" ".join(line.split()), 150, break_long_words=False) for line in lines) + "\n"


def page(text: str, data: Mapping[str, Any]) -> str:
    """The page with its tables."""
    about = f"Measured on {data['machine']}; a search had {data['limit_s']} s by the clock, of a GPT {GPT_S}.\n"
    parts = {"measured": measured(data) + "\n" + about, "gpt": beside(data)}
    parts |= {"extrapolated": extrapolated(data), "follows": follows(data)}
    for mark, new in parts.items():
        text = replaced(text, new, mark)
    return text


def main() -> None:
    """Measure where asked, write the page, or check it."""
    if "--measure" in sys.argv:
        measure()
    text = PAGE.read_text(encoding="utf-8")
    new = page(text, json.loads(DATA.read_text(encoding="utf-8")))
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {PAGE.name if new != text else 'none'}")
    sys.exit(new != text and "--check" in sys.argv)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
