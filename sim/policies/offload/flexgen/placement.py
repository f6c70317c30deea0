"""Where weights, cache and hidden states reside: FlexGen's linear program, on the figures of a trace and a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sim.errors import ProfileError
from sim.hardware.platform import Platform
from sim.policies.offload.flexgen.job import Job
from sim.solvers.linear import INFEASIBLE, LinearProgram

WHAT = ("weights", "cache", "hidden")
TIE = 1e-6
"""Weight of the time of all copies beside that of a block: of equal plans the one that copies least."""


@dataclass(frozen=True)
class Shares:
    """What the program chose for blocks of so many batches.

    batches: of a block.
    ns: its time by the cost model.
    parts: per `WHAT` the fractions on the device, on the host and on the drive.
    on_cpu: whether attention to a cache that is not on the device runs on the host's processor.
    """

    batches: int
    ns: float
    parts: Mapping[str, tuple[float, ...]]
    on_cpu: bool


@dataclass(frozen=True)
class Figures:
    """Averages per batch that the program is made of, per phase (prefill, decode): bytes and ns.

    read: weights that a block reads. written, fetched: of the cache. hidden: bytes between visits.
    compute: ns of all other ops. attention, attention_cpu: ns of those that read the cache, on either processor.
    total, visit: bytes of all weights, and of a visit at most. cache: bytes at the end. peak: see `Batch`.
    passing: bytes of the cache of a layer at the end. between: hidden bytes at once.
    """

    read: tuple[float, float]
    written: tuple[float, float]
    fetched: tuple[float, float]
    hidden: tuple[float, float]
    compute: tuple[float, float]
    attention: float
    attention_cpu: float
    total: int
    visit: int
    cache: float
    peak: int
    passing: float
    between: float


def cpu_engine(platform: Platform, host: str) -> int:
    """Position of the engine `cpu` if the host is its home, else -1."""
    try:
        engine = platform.engine_for(0, "cpu")
    except ProfileError:
        return -1
    return engine if platform.engines[engine].home == host else -1


def figures(job: Job, cpu: int) -> Figures:
    """The averages of a job. cpu: see `cpu_engine`."""
    count = len(job.batches)
    sums = {key: [0.0, 0.0] for key in ("read", "written", "fetched", "hidden", "compute")}
    attention = attention_cpu = cache = passing = between = 0.0
    visit = 0
    for batch in job.batches:
        phase = [min(step, 1) for step in batch.step]
        for v, bytes in enumerate(job.weight_bytes(batch)):
            sums["read"][phase[v]] += bytes
            visit = max(visit, bytes)
        late = set(job.attention(batch))
        for v, ops in enumerate(batch.visits):
            sums["compute"][phase[v]] += sum(job.op_ns(op) for op in ops if op not in late)
        attention += sum(map(job.op_ns, late))
        attention_cpu += job.cpu_ns(sorted(late), cpu) if cpu >= 0 else 0
        layers: dict[int, int] = {}
        for t, (made, *read) in batch.cache.items():
            sums["written"][phase[made]] += job.size[t]
            for v in read:
                sums["fetched"][phase[v]] += job.size[t]
            layers[batch.layers[made]] = layers.get(batch.layers[made], 0) + job.size[t]
        cache += sum(layers.values())
        passing += max(layers.values(), default=0)
        steps: dict[int, int] = {}
        for t, (made, _) in batch.hidden.items():
            sums["hidden"][phase[made]] += job.size[t]
            steps[made] = steps.get(made, 0) + job.size[t]
        between += max(steps.values(), default=0)
    mean = {key: (pre / count, post / count) for key, (pre, post) in sums.items()}
    return Figures(
        **mean,
        attention=attention / count,
        attention_cpu=attention_cpu / count,
        total=sum(job.size[t] for weights in job.weights.values() for t in weights),
        visit=visit,
        cache=cache / count,
        peak=max(batch.peak for batch in job.batches),
        passing=passing / count,
        between=between / count,
    )


def placed(
    f: Figures, job: Job, tiers: Sequence[str], batches: int, on_cpu: bool, share: float, fixed: Sequence[float] = ()
) -> Shares | None:
    """The placement with the least time per block of so many batches; None where none fits.

    The time of each phase is the largest of those of its copies, per direction and link, and of its computation
    (section 4.3 of the paper): they all overlap.

    tiers: device, host and, where there is one, the drive.
    share: part of the device's memory that may be used.
    fixed: fractions on device and host of weights, cache and hidden instead of the best ones.
    """
    platform, k = job.problem.platform, batches
    program = LinearProgram()
    column = {what: [program.column() for _ in range(3)] for what in WHAT}
    for i, what in enumerate(WHAT):
        program.row([(c, 1.0) for c in column[what]], 1.0, 1.0)
        if len(tiers) < 3:
            program.row([(column[what][2], 1.0)], 0.0, 0.0)
        for c, part in zip(column[what], fixed[2 * i : 2 * i + 2]):
            program.row([(c, 1.0)], part, part)
    (wg, wc, wd), (cg, cc, cd), (hg, hc, hd) = (column[what] for what in WHAT)
    device, host = tiers[:2]
    up, down = _second_per_byte(platform, host, device), _second_per_byte(platform, device, host)
    copies: dict[int, float] = {}
    for phase in (0, 1):
        time = program.column(0.0, float("inf"), 1.0)
        read, hidden = f.read[phase], k * f.hidden[phase]
        fetched, written = k * f.fetched[phase] * (not (on_cpu and phase)), k * f.written[phase]
        streams = [
            [(wc, read * up), (wd, read * up), (cc, fetched * up), (cd, fetched * up), *_both(hc, hd, hidden * up)],
            [(cc, written * down), (cd, written * down), *_both(hc, hd, hidden * down)],
        ]
        if len(tiers) > 2:
            off, on = _second_per_byte(platform, tiers[2], host), _second_per_byte(platform, host, tiers[2])
            streams.append([(wd, read * off), (cd, k * f.fetched[phase] * off), (hd, hidden * off)])
            streams.append([(cd, written * on), (hd, hidden * on)])
        for terms in streams:
            program.row([(time, 1.0), *((c, -1e9 * factor) for c, factor in terms)], 0.0)
            for c, factor in terms:
                copies[c] = copies.get(c, 0.0) + 1e9 * factor
        work = k * f.compute[phase]
        terms = [(time, 1.0)]
        if phase and on_cpu:
            terms += [(cg, -k * f.attention), (cc, -k * f.attention_cpu), (cd, -k * f.attention_cpu)]
        elif phase:
            work += k * f.attention
        program.row(terms, work)
    program.add_cost({c: TIE * ns for c, ns in copies.items()})
    sizes = (float(f.total), k * f.cache, k * f.between)
    # what is used now and what comes next
    buffers = [min(size, 2 * each) for size, each in zip(sizes, (f.visit, f.passing, f.between), strict=True)]
    spare = share * platform.tier(device).capacity - f.peak - sum(buffers)
    homes = [(c, size - buffer) for c, size, buffer in zip((wg, cg, hg), sizes, buffers, strict=True)]
    program.row(homes, most=spare)
    for level, name in enumerate(tiers[1:], 1):
        parts = [(wc, wd)[level - 1], (cc, cd)[level - 1], (hc, hd)[level - 1]]
        program.row(list(zip(parts, sizes, strict=True)), most=float(platform.tier(name).capacity))
    answer = program.solve()
    if answer.status == INFEASIBLE or answer.x is None:
        return None
    found = {what: tuple(max(0.0, float(answer.x[c])) for c in column[what]) for what in WHAT}
    return Shares(k, float(answer.fun), found, on_cpu)


def _both(first: int, second: int, factor: float) -> list[tuple[int, float]]:
    return [(first, factor), (second, factor)]


def _second_per_byte(platform: Platform, source: str, target: str) -> float:
    """Of the route's slowest link."""
    return float(1 / Fraction(min(platform.links[i].rate for i in platform.route(source, target))))


def spread(sizes: Sequence[int], parts: Sequence[float]) -> list[int]:
    """Per item 0, 1 or 2, so that those so far have about these parts of their bytes, and 0 no more than its part.

    >>> spread([4, 4, 4, 4, 4], (0.4, 0.6, 0.0))
    [1, 1, 0, 1, 0]
    """
    given, seen, found = [0.0, 0.0, 0.0], 0.0, []
    for size in sizes:
        seen += size
        lacking = [part * seen - has for part, has in zip(parts, given, strict=True)]
        level = 0 if lacking[0] + 1e-6 * seen >= size else 2 if lacking[2] > lacking[1] else 1
        given[level] += size
        found.append(level)
    return found
