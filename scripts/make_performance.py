"""Writes docs/performance.md and its figure: how long simulations take, and what peers take for the same work.

python scripts/make_performance.py             write the page and the figure from docs/performance.json
python scripts/make_performance.py --check     say whether the page is current; exit status 1 where it is not
python scripts/make_performance.py --measure   measure all cases, each in processes of its own (ten minutes), then write
python scripts/make_performance.py --measure "w1 96" …   those alone whose name in the data has one of these texts in
    it; the others keep their figures and the day they are from; "compiled" are those of the engine as C
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DATA, PAGE, FIGURE = (ROOT / "docs" / f"performance.{end}" for end in ("json", "md", "png"))
sys.path.insert(0, str(ROOT))
ROUNDS = 2
"""Processes per case, of which the quickest counts: other work on the machine only adds to a time."""
LIMIT_S = 120
"""Seconds after which a process is ended, and larger traces of its kind and policy are not tried."""
DEPTHS = (12, 24, 48, 96, 192, 384, 768)
CURVES: Mapping[str, tuple[tuple[str, float | None], ...]] = {
    "w1": (
        ("keep_all", None),
        ("full_recompute", None),
        ("swap_all", None),
        ("lru_tiering", 0.6),
        ("dtr(heuristic=dtr_eq)", 0.6),
        ("dtr(heuristic=dtr)", 0.6),
    ),
    "gpt2": (("keep_all", None), ("full_recompute", None), ("swap_all", 0.6), ("dtr", 0.6), ("rotor", 0.6)),
}
TITLES = {
    "w1": "W1, a GPT-like stack of L layers: 22 L − 1 ops without an update",
    "gpt2": "GPT-2 medium with 12 to 384 layers: a whole iteration with AdamW in mixed precision",
}
LARGEST = {"w1": 768, "gpt2": 384}
COMPILED = (("w1", 96), ("gpt2", 24))
"""Of which traces the engine as C is measured, too."""
COMMANDS = {
    "tiersim demo": ["demo"],
    "tiersim compare, Llama 2 7B on ascend_910b": ["compare", "--profile", "ascend_910b", "--model", "llama2-7b"],
}


class Peer(NamedTuple):
    """What another program took for the same work, as measured once, on another day and elsewhere.

    case: our case of the same work: kind, size, policy, share.
    seconds: of the peer.
    """

    name: str
    work: str
    case: tuple[str, int, str, float | None]
    seconds: float


def _simrd(layers: int, policy: str, words: str, ms: float) -> Peer:
    case = ("w1", layers, policy, None if policy == "keep_all" else 0.6)
    return Peer("simrd", f"W1, L = {layers}: {words}", case, ms / 1000)


def _rotor(layers: int, seconds: float) -> Peer:
    return Peer("Rotor, C", f"chain of {layers} blocks, 500 slots", ("chain", layers, "rotor(slots=500)", 0.3), seconds)


EQ, EXACT = "dtr(heuristic=dtr_eq)", "dtr(heuristic=dtr)"
PEERS = (
    *(_simrd(n, "keep_all", "nothing evicted", ms) for n, ms in ((12, 4.8), (24, 12.4), (48, 34), (96, 111))),
    *(_simrd(n, EQ, "DTR with classes, 0.6", ms) for n, ms in ((12, 11), (24, 32), (48, 103), (96, 365))),
    *(_simrd(n, EXACT, "DTR in full, 0.6", ms) for n, ms in ((12, 74), (24, 464), (48, 3360), (96, 29500))),
    *(_rotor(n, s) for n, s in ((24, 0.10), (48, 0.58), (192, 13.9))),
)


# ---- measuring ---------------------------------------------------------------------------------


def key(kind: str, size: int, policy: str, share: float | None) -> str:
    """A case as a key of the data."""
    return f"{kind} {size} {policy}{'' if share is None else f' {share}'}"


def run_case(kind: str, size: int, policy: str, share: float | None, root: Path = ROOT) -> dict[str, Any]:
    """The quickest of some processes. root: where the program is."""
    words = [sys.executable, "-m", "benchmarks.simulate", kind, str(size), policy, *([str(share)] if share else [])]
    found = []
    for _ in range(ROUNDS):
        try:
            done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return {"status": "timed out"}
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}:\n{done.stderr}")
        found.append(json.loads(done.stdout))
    best = min(found, key=lambda record: record["cpu_s"])
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in best.items()}


def run_command(words: Sequence[str]) -> dict[str, float]:
    """Wall and processor seconds of a command, its processes included, with the wall time of starting Python."""
    import resource

    with tempfile.TemporaryDirectory() as folder:
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "sim", *words, "-o", folder], cwd=ROOT, capture_output=True, check=False)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2)}


def measure(texts: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """All cases and commands, or those alone that have one of these texts in their name beside the others' figures."""
    cases, given_up = {}, set()
    wanted = [(kind, n, *run) for kind, runs in CURVES.items() for n in DEPTHS if n <= LARGEST[kind] for run in runs]
    for case in dict.fromkeys([*wanted, *(peer.case for peer in PEERS)]):
        curve, name = (case[0], *case[2:]), key(*case)
        if not is_asked(name, texts):
            cases.update({name: known["cases"][name]} if name in known["cases"] else {})
        elif curve not in given_up:
            cases[name] = {**run_case(*case), **when()}
            if cases[name]["status"] == "timed out":
                given_up.add(curve)
            print(name, cases[name], file=sys.stderr)
    commands = {
        name: {**run_command(words), **when()} if is_asked(name, texts) else known["commands"][name]
        for name, words in COMMANDS.items()
    }
    machine = f"{platform.machine()}, {cores()} cores, Python {platform.python_version()}"
    about = {"machine": machine, "rounds": ROUNDS, "limit_s": LIMIT_S}
    compiled = measure_compiled() if is_asked("compiled", texts) else known["compiled"]
    return {**about, "cases": cases, "commands": commands, "compiled": compiled}


def measure_compiled() -> dict[str, Any]:
    """Cases with the engine in Python and as C, one after the other."""
    from benchmarks.compiled import compiled_copy

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        root = compiled_copy(Path(folder))
        for kind, size in COMPILED:
            for case in ((kind, size, *run) for run in CURVES[kind]):
                found[key(*case)] = {"python": run_case(*case), "c": run_case(*case, root), **when()}
                print(key(*case), found[key(*case)], file=sys.stderr)
    return found


def is_asked(name: str, texts: Sequence[str]) -> bool:
    """Whether a case or command is to be measured."""
    return not texts or any(text in name for text in texts)


def when() -> dict[str, Any]:
    """The day, and the load of the machine."""
    return {"date": time.strftime("%Y-%m-%d"), "load": round(os.getloadavg()[1])}


def cores() -> int:
    """Processors that this program may use."""
    from sim.sweeps.pool import usable_cpus

    return usable_cpus()


# ---- the page ----------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """Seconds with a unit, to two digits."""
    unit, factor = next((pair for pair in (("s", 1), ("ms", 1e3), ("µs", 1e6)) if value * pair[1] >= 1), ("µs", 1e6))
    return f"{digits(value * factor)} {unit}"


def digits(value: float) -> str:
    """Two digits, whole numbers from ten on."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first columns are text."""
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, marks, *rows)) + "\n"


def curve(data: Mapping[str, Any], kind: str) -> str:
    """Ratios to a bare loop and seconds, a row per depth and a column per policy."""
    rows = []
    for depth in (n for n in DEPTHS if n <= LARGEST[kind]):
        found = [data["cases"].get(key(kind, depth, *run)) for run in CURVES[kind]]
        ops = next((record["ops"] for record in found if record and "ops" in record), 0)
        cells = [
            "–" if not r or r["status"] != "ok" else f"{digits(r['ratio'])} ({seconds(r['cpu_s'])})" for r in found
        ]
        rows.append([str(depth), f"{ops:,}", *cells])
    heads = [f"`{policy}`{f' at {share:.0%}' if share else ''}" for policy, share in CURVES[kind]]
    return table(["layers", "ops", *heads], rows, 0)


def again(data: Mapping[str, Any], depth: int) -> str:
    """Ratios of a further call on the same trace."""
    found = []
    for policy, share in CURVES["w1"]:
        record = data["cases"].get(key("w1", depth, policy, share), {})
        if "again_s" in record:
            found.append(f"`{policy}` {digits(record['again_s'] / record['bare_s'])}")
    return f"Another call on the same W1 trace of {depth} layers, as in a sweep: {', '.join(found)}."


def compiled(data: Mapping[str, Any]) -> str:
    """The engine in Python and as C: ratios of a further call on the same trace."""
    rows = []
    for kind, size in COMPILED:
        for policy, share in CURVES[kind]:
            record = data["compiled"][key(kind, size, policy, share)]
            python, c = (record[way]["again_s"] / record[way]["bare_s"] for way in ("python", "c"))
            trace = f"{'W1' if kind == 'w1' else 'GPT-2 medium'}, {size} layers"
            rows.append([trace, f"`{policy}`{f' at {share:.0%}' if share else ''}", digits(python), digits(c),
                         digits(python / c)])  # fmt: skip
    return table(["trace", "policy", "Python", "C", "Python over C"], rows, 2)


def noise(data: Mapping[str, Any]) -> str:
    """How far apart the two measurements are of a further call in Python."""
    apart = []
    for case, record in data["compiled"].items():
        first, python = data["cases"].get(case, {}), record["python"]
        if "again_s" in first:
            apart.append(abs(first["again_s"] / first["bare_s"] / (python["again_s"] / python["bare_s"]) - 1))
    return (
        "Further calls in Python were measured twice, for this table and with the first calls above: the two ratios "
        f"are up to {max(apart):.0%} apart, so that a factor below {1 + max(apart):.2g} says nothing."
    )


def peers(data: Mapping[str, Any]) -> str:
    """What peers took, and what `simulate()` takes."""
    rows = []
    for peer in PEERS:
        record = data["cases"].get(key(*peer.case))
        if not record or record["status"] != "ok":
            continue
        ours, ops = record["cpu_s"], record["ops"]
        per_op = f"{digits(peer.seconds / ops * 1e6)} → {digits(ours / ops * 1e6)}"
        rows.append([peer.name, peer.work, seconds(peer.seconds), seconds(ours), digits(peer.seconds / ours), per_op])
    return table(["peer", "work", "peer\\*", "tiersim", "peer over tiersim", "µs per op"], rows, 2)


def page(data: Mapping[str, Any]) -> str:
    """The page."""
    commands = [[f"`{name}`" if "," not in name else name, f"{r['wall_s']:.1f} s", f"{r['cpu_s']:.1f} s"]
                for name, r in data["commands"].items()]  # fmt: skip
    curves = "\n".join(f"### {TITLES[kind]}\n\n{curve(data, kind)}" for kind in CURVES)
    return TEXT.format(
        machine=data["machine"],
        days=days(data),
        rounds="one process" if data["rounds"] == 1 else f"{data['rounds']} processes",
        limit=data["limit_s"],
        curves=curves,
        again=again(data, 96),
        compiled=compiled(data),
        noise=noise(data),
        compiled_on=max(record["date"] for record in data["compiled"].values()),
        peers=peers(data),
        commands=table(["command", "wall", "processor"], commands),
    )


def days(data: Mapping[str, Any]) -> str:
    """When figures were measured, and under which loads; the day of most, then which are of another."""
    records = {**data["cases"], **data["commands"]}
    by_day: dict[str, list[str]] = {}
    for name, record in records.items():
        by_day.setdefault(record["date"], []).append(name)
    main, *others = sorted(by_day, key=lambda day: (-len(by_day[day]), day))

    def loads(day: str) -> str:
        found = sorted({record["load"] for record in records.values() if record["date"] == day})
        return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"

    lines = [f"on {main}, with a load of {loads(main)}"]
    lines += [f"on {day}, with a load of {loads(day)}: {', '.join(f'`{name}`' for name in by_day[day])}"
              for day in others]  # fmt: skip
    return "; ".join(lines)


TEXT = """\
# How fast it is

Every time is one of `simulate()` as a user calls it: on a shipped profile (`a100_40_pcie`), planning included, the
first call on its trace in a fresh process, after one of the same policy on two layers, which loads what it needs; and
nothing done to Python's garbage collector. Processor time, the least of {rounds}.
`python scripts/make_performance.py --measure` repeats all measurements; `benchmarks/simulate.py` is one case.

Measured on {machine}: {days}. Seconds depend on the machine and on its other work; the *ratio*,
to a bare SimPy loop of `timeout`s, one per op, in the same process, depends on them less. A ratio below 1 is possible,
since a run that is a straight sequence is computed as arrays.

## Growth

Ratio to the bare loop, and processor time. A percentage is the budget, of what keeping everything needs. –:
infeasible, or not done within {limit} s, after which larger ones were not tried.

![Time per op over the number of ops](performance.png)

{curves}
{again}

Below some thousand ops a pass of Python's collector over all that is loaded (some 15 ms), which a bare loop never sets
off, can be much of a figure.

Left out of each figure: starting Python and imports, building or reading the trace, reading the profile, figures of
the summary (analyses, the run with unlimited memory), tables and plots. Included: preparing the trace for the
machine, planning, replay, the log.

## The engine as C

The parts of the engine that go through events or ops one by one (`event_path` and `copy_path` of `sim/engine`), and
the evictors of online policies (`sim/eviction`), can be compiled by [mypyc](https://mypyc.readthedocs.io), from the
same source and to the same logs, byte for byte; classes of Python may derive from compiled evictors. It is optional,
takes a C compiler and two or three minutes, and is built from a source distribution, so that nothing compiled is left
in the working tree:

```bash
pip install build
HATCH_BUILD_HOOK_ENABLE_MYPYC=1 python -m build
pip install --force-reinstall dist/tiersim-*.whl
```

`tiersim --version` says which engine it is. Ratios to the bare loop of another call on the same trace, planning
included, both measured in turn on {compiled_on}. Runs that are a straight sequence are NumPy's in either; policies
but for their evictors, plans and SimPy itself stay Python:

{compiled}

{noise}
A policy that moves or is asked gains; how much depends on how much of its time is its own.

## Peers

The same work elsewhere. \\*: second-hand, measured once on another day and on a machine with other work, not by the
program that made this page; a factor below two says nothing. A peer above 1 is slower than tiersim.

{peers}
What the figures exclude on the peers' side: simrd (the simulator of Dynamic Tensor Rematerialization, in Python)
has no transfers, no second tier, no log of intervals and no planning; its time is that of the replay. Rotor's C
program fills its table and returns the sequence; that is compared with our whole `simulate()`: the table in NumPy,
the plan, the replay and the log. `dtr` agrees with simrd's printed results to the nanosecond, and `rotor` with
published optima (see their tests).

## Commands

From the shell's prompt to the end, the start of Python, all processes and the files of `-o` included. Wall time is
for two free cores only if the load above is small; processor time is that of all processes together.

{commands}
"""


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Microseconds per op over ops, a panel per kind."""
    from sim.report.colours import policy_colour, policy_marker
    from sim.report.draw import FONT, new_figure, save_figure

    figure = new_figure(9, 3.8)
    for i, (kind, runs) in enumerate(CURVES.items()):
        axes = figure.add_subplot(1, 2, i + 1)
        drawn: set[str] = set()
        for policy, share in runs:
            name = policy.partition("(")[0]
            style = {
                "color": policy_colour(name),
                "marker": policy_marker(name),
                "linestyle": "--" if name in drawn else "-",
            }
            drawn.add(name)
            records = [data["cases"].get(key(kind, n, policy, share)) for n in DEPTHS]
            points = [(r["ops"], r["cpu_s"] / r["ops"] * 1e6) for r in records if r and r["status"] == "ok"]
            axes.plot(*zip(*points), markersize=4, linewidth=1, label=policy, **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("ops", fontsize=FONT)
        axes.set_ylabel("µs per op", fontsize=FONT)
        axes.set_title({"w1": "W1", "gpt2": "GPT-2 medium"}[kind], fontsize=FONT)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False, fontsize=7)  # on no line
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    save_figure(figure, path)


def main() -> None:
    """Write the page, or check it."""
    if "--measure" in sys.argv:
        texts = sys.argv[sys.argv.index("--measure") + 1 :]
        known = json.loads(DATA.read_text(encoding="utf-8")) if texts else {}
        DATA.write_text(json.dumps(measure(texts, known), indent=1) + "\n", encoding="utf-8")
    data = json.loads(DATA.read_text(encoding="utf-8"))
    stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page(data)
    if "--check" in sys.argv:
        print("stale: docs/performance.md" if stale else "current")
        sys.exit(stale)
    PAGE.write_text(page(data), encoding="utf-8")
    draw(data, FIGURE)
    print("written: docs/performance.md")


if __name__ == "__main__":
    main()
