"""The instants of a run: what happens at one nanosecond, step by step; and how a run ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from sim.errors import Deadlock, TiersimError
from sim.hardware.platform import Platform
from sim.plan import Plan, Recompute
from tests.engine.reference.computing import Computing, Work
from tests.engine.reference.copying import Copies, Copying, Job
from tests.engine.reference.devices import Device, Steps, Waiting
from tests.engine.reference.durations import NANO, crossings
from tests.engine.reference.sharing import fair
from tests.engine.reference.store import Store


@dataclass(frozen=True)
class Outcome:
    """What came of a run: rows as the log has them, with names; `error` where it was refused."""

    end: int
    intervals: list[tuple[int, int, int, str, str, int, int, str, int]]
    changes: list[tuple[int, str, int, int, int, str]]
    counters: Counter[str]
    error: TiersimError | None = None


def simulate(plan: Plan, platform: Platform) -> Outcome:
    """Run a plan from its first instant to its last."""
    clock = Clock(plan, platform)
    error = None
    try:
        clock.run()
    except TiersimError as refusal:
        error = refusal
    store = clock.store
    return Outcome(store.now, store.intervals, store.changes, store.counters, error)


@dataclass(eq=False)
class Program:
    """A device's steps so far: what it waits for now, and since when."""

    device: Device
    steps: Steps
    waits: Waiting | None = None
    since: int = 0
    is_done: bool = False


class Clock:
    """Works off one instant after the other."""

    def __init__(self, plan: Plan, platform: Platform) -> None:
        self.store = Store(plan, platform)
        self.copies = Copies(self.store)
        self.computing = Computing(self.store, self.copies)
        count = 1 + max((op.device for op in self.store.ops), default=0)
        devices = [Device(i, self.store, self.copies, self.computing) for i in range(count)]
        self.programs = [Program(device, device.walk()) for device in devices]
        self.closing: Program | None = None
        for action in plan.actions:
            if isinstance(action, Recompute):
                self.store.runs_to_come.append(plan.trace.op_id(action.op))

    def run(self) -> None:
        """To the end, or to an error."""
        self.store.place()
        while True:
            while self.one_thing():
                pass
            if self.closing is not None and self.closing.is_done:
                return
            if not self.advance():
                raise self.stuck()

    # ---- one instant -------------------------------------------------------------------------

    def one_thing(self) -> bool:
        """The first thing of the lowest step that has any; False when nothing is left at this instant."""
        steps = (
            self.end_of_an_op,
            self.end_of_a_copy,
            self.a_move_that_follows,
            self.actions_after_an_op,
            self.releases_of_an_op,
            self.a_device_goes_on,
            self.settling,
        )
        return any(step() for step in steps)

    def end_of_an_op(self) -> bool:
        """By op id; the members of a group together."""
        computing, now = self.computing, self.store.now
        ends: list[tuple[int, object]] = []
        for name, work in computing.running.items():
            if work.flows_from <= now and work.left <= 0:
                ends.append((work.op, name))
        for job, members, bytes in computing.groups:
            if self.chunk_is_over(job) and not job.bytes:
                ends.append((members[0].op, (members, job, bytes)))
        for members in computing.met_here:
            ends.append((members[0].op, (members, None, 0)))
        if not ends:
            return False
        _, first = min(ends, key=lambda end: end[0])
        if isinstance(first, str):
            computing.end_on_engine(first)
        else:
            computing.end_group(*first)  # type: ignore[misc]
        return True

    def chunk_is_over(self, job: Job) -> bool:
        return job.has_links and job.flows_from <= self.store.now and job.left <= 0

    def end_of_a_copy(self) -> bool:
        """By tensor id; and the end of a chunk, after which the job joins its queues again."""
        over = [job for job in self.copies.jobs if self.chunk_is_over(job)]
        copies = [job.what for job in over if isinstance(job.what, Copying)]
        if copies:
            self.copies.end(min(copies, key=lambda copy: copy.tensor))
            return True
        for job in over:
            if job.bytes:
                job.has_links = False
                return True
        return False

    def a_move_that_follows(self) -> bool:
        """By tensor id."""
        if not self.copies.to_follow:
            return False
        first = min(self.copies.to_follow, key=lambda copy: copy.tensor)
        self.copies.to_follow.remove(first)
        self.copies.follow(first)
        return True

    def actions_after_an_op(self) -> bool:
        """By op id; where one may hold the device, it is the device that carries them out, till it waits."""
        if not self.computing.anchors:
            return False
        work = min(self.computing.anchors, key=lambda w: w.op)
        self.computing.anchors.remove(work)
        program = self.programs[work.device]
        if program.device.holds(work.op):
            self.computing.frees.remove(work)  # they come when the anchor is finished
            self.go_on(program)
            return True
        for action in program.device.planned("after", work.op):
            program.device.carry_out(action, work.op)  # type: ignore[arg-type]
        return True

    def releases_of_an_op(self) -> bool:
        """By op id."""
        if not self.computing.frees:
            return False
        work = min(self.computing.frees, key=lambda w: w.op)
        self.computing.frees.remove(work)
        self.computing.tidy(work)
        return True

    def a_device_goes_on(self) -> bool:
        """By index: as far as it can without time passing."""
        for program in self.programs:
            if not program.is_done and (program.waits is None or program.waits.is_over()):
                self.go_on(program)
                return True
        if self.closing is None and all(program.is_done for program in self.programs):
            first = self.programs[0].device
            self.closing = Program(first, first.close())
            self.programs.append(self.closing)
            return True
        return False

    def go_on(self, program: Program) -> None:
        """Until it waits for something that has not happened yet."""
        store = self.store
        waits = program.waits
        if waits is not None and waits.cause and store.now > program.since:
            lane = self.computing.main(program.device.index).name
            device = program.device.index
            store.row(program.since, store.now, device, lane, "stall", waits.op, waits.tensor, waits.cause, 0)
        program.waits = next(program.steps, None)
        program.since = store.now
        program.is_done = program.waits is None

    # ---- settling ----------------------------------------------------------------------------

    def settling(self) -> bool:
        """Space, engines, links, bandwidth."""
        if self.wake_for_space():
            return True
        did = self.admit_moves()
        for engine in self.store.platform.engines:
            did = self.computing.start_next(engine) or did
        did = self.start_jobs() or did
        self.share()
        return did

    def wake_for_space(self) -> bool:
        """Where bytes were given back the device that waits first asks again; else one that fits may pass another."""
        store, requests = self.store, self.copies.requests
        woken = [requests[tier][0] for tier in store.tiers if tier in store.stirred and requests[tier]]
        store.stirred.clear()
        if not woken:
            for tier in store.tiers:
                free, leaving = store.free(tier), self.copies.leaving(tier)
                if len(requests[tier]) < 2:
                    continue
                hopeful = [request for request in requests[tier] if request.bytes <= free + leaving]
                if hopeful and hopeful[0].bytes <= free:
                    woken.append(hopeful[0])
        for request in woken:
            request.is_woken = True
        return bool(woken)

    def admit_moves(self) -> bool:
        """First come, first served, while the first fits and no device waits for space in that tier."""
        did = False
        for tier in self.store.tiers:
            while not self.copies.requests[tier]:
                queue = [copy for copy in self.copies.outside if copy.target == tier]
                if not queue or queue[0].size > self.store.free(tier):
                    break
                self.copies.admit(queue[0], queue[0].op)
                did = True
        return did

    def start_jobs(self) -> bool:
        """Each that is first in the queues of all its links and finds every one free."""
        links, did = self.store.platform.links, False
        taken: set[int] = set()
        for job in sorted((j for j in self.copies.jobs if not j.has_links), key=lambda j: j.place_in_queue):
            busy = Counter(i for other in self.copies.jobs if other.has_links for i in other.links)
            if not taken.intersection(job.links) and all(busy[i] < links[i].copy_engines for i in job.links):
                self.start(job)
                did = True
            else:
                taken.update(job.links)
        return did

    def start(self, job: Job) -> None:
        """A job has its links; it pays the fixed time once."""
        fixed = 0
        if job.began < 0:
            job.began = self.store.now
            own = sum(self.store.platform.links[i].fixed for i in job.links)
            fixed = own if job.fixed is None else job.fixed
        part = min(job.bytes, job.chunk) if job.chunk else job.bytes
        job.bytes -= part
        job.has_links = True
        job.flows_from, job.left = self.store.now + fixed, Fraction(part)

    def flowing(self) -> list[Job | Work]:
        """All that uses bandwidth now."""
        found: list[Job | Work] = [job for job in self.copies.jobs if job.has_links]
        found += self.computing.running.values()
        return [flow for flow in found if flow.flows_from <= self.store.now and flow.left > 0]

    def share(self) -> None:
        """Fair rates of all flows."""
        platform, flows = self.store.platform, self.flowing()
        names: list[list[str]] = []
        for flow in flows:
            if isinstance(flow, Job):
                names.append([platform.links[i].name for i in flow.links])
            else:
                names.append([self.computing.engine(flow.op).name])
        active = {name for used in names for name in used}
        limits: dict[str, Fraction] = {}
        for p, pool in enumerate(platform.pools):
            if pool.rate is not None:
                limits[f"pool {p}"] = Fraction(pool.rate)
        own, charges = [], []
        for flow, used in zip(flows, names):
            charge: dict[str, Fraction] = {}
            slowest: list[Fraction] = []
            for name in used:
                factor = Fraction(1)
                for p, _, charged, slowed in crossings([name], platform):
                    members = {member.name for member in platform.pools[p].members}
                    if active & members - {name}:
                        factor *= slowed
                    if platform.pools[p].rate is not None:
                        charge[f"pool {p}"] = charge.get(f"pool {p}", Fraction(0)) + charged
                rate = self.rate_of(flow, name) * factor
                slowest.append(rate)
                if isinstance(flow, Job):
                    limits[f"link {name}"] = rate
                    charge[f"link {name}"] = Fraction(1)
            own.append(min(slowest))
            charges.append(charge)
        for flow, rate in zip(flows, fair(own, charges, limits)):
            flow.rate = rate

    def rate_of(self, flow: Job | Work, name: str) -> Fraction:
        if isinstance(flow, Job):
            return next(Fraction(link.rate) for link in self.store.platform.links if link.name == name)
        from tests.engine.reference.durations import parts_of

        return parts_of(self.store.trace, self.store.platform, flow.op).rate

    # ---- time --------------------------------------------------------------------------------

    def advance(self) -> bool:
        """To the next instant at which something ends or begins to flow; False where there is none."""
        now = self.store.now
        soon = []
        for flow in (*self.computing.running.values(), *(job for job in self.copies.jobs if job.has_links)):
            if flow.flows_from > now:
                soon.append(flow.flows_from)
            elif flow.left > 0:
                soon.append(now + ceil(flow.left * NANO / flow.rate))
        soon += [program.device.alarm for program in self.programs if program.device.alarm > now]
        if not soon:
            return False
        then = min(soon)
        for flow in self.flowing():
            flow.left = max(Fraction(0), flow.left - flow.rate * (then - now) / NANO)
        self.store.now = then
        return True

    # ---- the end -----------------------------------------------------------------------------

    def stuck(self) -> TiersimError:
        """Why nothing can happen any more."""
        for program in self.programs:
            request = program.device.request
            if request is not None:
                return self.store.too_little(request.tier, request.bytes, request.op)
        if self.closing is not None:
            for copy in sorted(self.copies.outside, key=lambda copy: copy.tensor):
                if copy.size > self.store.free(copy.target):
                    return self.store.too_little(copy.target, copy.size, copy.op)
        return Deadlock("nothing can happen any more")
