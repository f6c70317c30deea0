"""All figures of one run in one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import numpy as np

from sim.analysis.figure import Figure, Reference
from sim.analysis.lanes import CODEC, RECOMPUTE, RUN, energy_j
from sim.analysis.overlap import overlap
from sim.analysis.peak_memory import fullest_home, home_peak, mean_bytes, peak_bytes
from sim.analysis.registry import declared_figures
from sim.analysis.stalls import stalls
from sim.analysis.traffic import traffic
from sim.errors import ProfileError
from sim.hardware.cost import peak_dtype
from sim.hardware.platform import counts_again
from sim.log import EventLog
from sim.trace.columns import distinct

__all__ = ["Reference", "Summary", "samples_in", "summarize"]

SAMPLES = ("samples", "batch")
"""The keys of a trace's `meta` that say how many samples it has, the first that is there."""


@dataclass(frozen=True)
class Summary:
    """One run in figures; None where a figure cannot be known. Bytes, ns, and rates per second.

    Each field's annotation tells its meaning. compute_ns, recompute_ns, codec_ns, stall_ns and idle_ns add up to
    makespan_ns times devices.

    more: figures that other analyses declare, see `sim.analysis.figures`.
    """

    peak_bytes: Annotated[
        int, Figure("bytes", "peak memory", "most bytes that the home tier of any device held", 10, (2, "peak"))
    ]
    mean_bytes: Annotated[
        int, Figure("bytes", "memory averaged over time", "of the home tier of the fullest device", 14)
    ]
    peak_by_tier: Annotated[dict[str, int], Figure("bytes", "peak of each tier", "most bytes that each tier held", 12)]
    reserved_bytes: Annotated[
        dict[str, int],
        Figure("bytes", "reserved by allocators", "the most that caching allocators reserved, by tier", 13),
    ]
    capacity_bytes: Annotated[
        int, Figure("bytes", "capacity", "of the home tier of the fullest device, or the budget in its place", 11)
    ]
    fits: Annotated[bool, Figure("flag", "fits", "it ended, and no tier held more than its capacity", 1, (0, "fits"))]
    complete: Annotated[bool, Figure("flag", "ran to its end", "whether every op ran", 2)]
    devices: Annotated[int, Figure("number", "devices", "devices of the trace", 61)]
    makespan_ns: Annotated[int, Figure("time", "time of an iteration", "until all is idle", 20, (3, "time"))]
    compute_ns: Annotated[int, Figure("time", "computing", "first runs of ops, on main lanes, summed over devices", 21)]
    recompute_ns: Annotated[
        int, Figure("time", "recomputing", "recomputed ops, on main lanes, summed over devices", 22)
    ]
    codec_ns: Annotated[int, Figure("time", "encoding and decoding", "on main lanes, summed over devices", 23)]
    stall_ns: Annotated[
        dict[str, int], Figure("time", "stalls", "waiting, by cause, on main lanes, summed over devices", 24)
    ]
    idle_ns: Annotated[int, Figure("time", "idle", "the rest of the devices' time", 25)]
    recompute_overhead: Annotated[
        float | None, Figure("change", "recomputing against computing", "recompute_ns over compute_ns", 30)
    ]
    moved_bytes: Annotated[dict[str, int], Figure("bytes", "moved", "bytes on the wire, by link", 34, (8, "moved"))]
    overlap: Annotated[
        float | None, Figure("percent", "transfer time hidden", "fraction of it during which devices compute", 35)
    ]
    overlap_by_link: Annotated[
        dict[str, float | None],
        Figure("percent", "overlap by link", "fraction of each link's bytes that moved while devices computed"),
    ]
    samples_per_s: Annotated[
        float | None, Figure("number", "samples per second", "samples of the trace over the time", 50)
    ]
    tokens_per_s: Annotated[
        float | None, Figure("number", "tokens per second", "tokens of the trace over the time", 51, (10, "tokens/s"))
    ]
    mfu: Annotated[
        float | None,
        Figure(
            "percent",
            "MFU",
            "model FLOPs over what all main engines could do at the peak of the type that most FLOPs have",
            52,
        ),
    ]
    hfu: Annotated[
        float | None, Figure("percent", "HFU", "the same for all FLOPs executed on them, recomputed ones included", 53)
    ]
    saved_fraction: Annotated[
        float | None, Figure("percent", "memory saved against keep_all", "of the peak of keep_all", 15, (9, "saved"))
    ]
    mean_saved_fraction: Annotated[
        float | None, Figure("percent", "average memory saved against keep_all", "of the mean of keep_all", 16)
    ]
    overhead: Annotated[
        float | None,
        Figure(
            "change",
            "overhead against unlimited memory",
            "against the time with unlimited memory and the same freedoms",
            31,
            (5, "vs unlimited"),
        ),
    ]
    unlimited_ns: Annotated[
        int | None, Figure("time", "time with unlimited memory", "of the fastest run that it allows", 32)
    ]
    unlimited_run: Annotated[
        str | None, Figure("text", "unlimited memory with", "what that run is: keep_all, or a freedom", 33)
    ]
    energy_j: Annotated[
        float | None,
        Figure(
            "number", "energy (J)", "engines while busy and bytes on links, where the profile prices all of them", 60
        ),
    ]
    counters: Annotated[
        dict[str, int], Figure("number", "counters", "what the engine counted, such as ignored actions")
    ]
    more: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON values: integers, floats, text, None, and records of them."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        more = found.pop("more")
        return {**{key: dict(value) if isinstance(value, dict) else value for key, value in found.items()}, **more}


def summarize(log: EventLog, reference: Reference | EventLog | None = None) -> Summary:
    """The figures of a run.

    reference: what unlimited memory allows, or just the run that keeps everything.
    """
    if isinstance(reference, EventLog):
        reference = Reference(reference, reference.end)
    platform, peaks, time = log.platform, peak_bytes(log), stalls(log)
    home, hidden = fullest_home(log), overlap(log)
    mfu, hfu = _utilisations(log)
    mean = mean_bytes(log)
    on_lanes = time.compute_ns + time.recompute_ns + time.codec_ns + time.stall_ns
    saved = mean_saved = overhead = None
    if reference is not None:
        saved = _saved(peaks[home.name], home_peak(reference.log))
        mean_saved = _saved(mean, mean_bytes(reference.log)) if log.complete else None
        unlimited = reference.makespan_ns
        overhead = log.end / unlimited - 1 if unlimited and log.complete else None
    return Summary(
        peak_bytes=peaks[home.name],
        mean_bytes=mean,
        peak_by_tier=peaks,
        reserved_bytes=_reserved(log),
        capacity_bytes=home.capacity,
        fits=log.complete and all(peaks[tier.name] <= tier.capacity for tier in platform.tiers),
        complete=log.complete,
        devices=log.trace.devices,
        makespan_ns=log.end,
        compute_ns=time.compute_ns,
        recompute_ns=time.recompute_ns,
        codec_ns=time.codec_ns,
        stall_ns=time.by_cause,
        idle_ns=log.end * log.trace.devices - on_lanes,
        recompute_overhead=time.recompute_overhead,
        moved_bytes={link.link: link.bytes for link in traffic(log) if not counts_again(link.link)},
        overlap=hidden.fraction,
        overlap_by_link=dict(hidden.by_link),
        samples_per_s=_per_second(log, *SAMPLES),
        tokens_per_s=_per_second(log, "tokens"),
        mfu=mfu,
        hfu=hfu,
        saved_fraction=saved,
        mean_saved_fraction=mean_saved,
        overhead=overhead,
        unlimited_ns=None if reference is None else reference.makespan_ns,
        unlimited_run=None if reference is None else reference.name,
        energy_j=energy_j(log),
        counters={name: int(count) for name, count in sorted(log.counters.items())},
        more={key: each.of(log, reference) for _, key, each in declared_figures() if each.of is not None},
    )


def _saved(held: int, before: int) -> float | None:
    return 1 - held / before if before else None


def _reserved(log: EventLog) -> dict[str, int]:
    tiers, delta = log.reserved[:, 1], log.reserved[:, 2]
    return {log.platform.tiers[i].name: int(np.cumsum(delta[tiers == i]).max()) for i in distinct(tiers).tolist()}


def _per_second(log: EventLog, *keys: str) -> float | None:
    """Samples or tokens per second: the first of these keys that the trace's `meta` has; None if it has none."""
    amount = _amount(log.trace.meta, *keys)
    return amount * 1e9 / log.end if amount is not None and log.end and log.complete else None


def _amount(meta: Mapping[str, Any], *keys: str) -> float | None:
    return next((float(meta[key]) for key in keys if isinstance(meta.get(key), (int, float))), None)


def samples_in(meta: Mapping[str, Any]) -> float | None:
    """The samples of a trace, as its `meta` says; None if it does not."""
    return _amount(meta, *SAMPLES)


def _utilisations(log: EventLog) -> tuple[float | None, float | None]:
    """Model and hardware FLOPs over what the main engines could have done in the makespan.

    Both as they are counted, masked scores included, which causal kernels skip: so both compare with printed figures.
    """
    c = log.trace.op_columns
    engines = [log.platform.engine_for(device) for device in distinct(c.device).tolist()]
    if not log.end or not log.complete or not c.flops.any():
        return None, None
    types, which = log.trace.op_types
    main_type = types[int(np.argmax(np.bincount(which, weights=c.flops)))]
    try:
        units = [log.platform.engines[i] for i in engines]
        peak = sum(unit.peak[peak_dtype(unit, main_type)] for unit in units)
    except ProfileError:
        return None, None
    possible = peak * (log.end / 1e9)
    origin = log.trace.origin
    ranks = origin.symmetric if origin is not None else 1
    why, op, lane = log.interval("why"), log.interval("op"), log.interval("lane")
    ran = ((why == RUN) | (why == RECOMPUTE) | (why == CODEC)) & (op >= 0) & np.isin(lane, engines)
    executed = sum(log.trace.counted_flops[op[ran]].tolist())  # may be more than 64 bits hold
    model = log.trace.meta.get("model_flops")
    return (model / (possible * ranks) if isinstance(model, (int, float)) else None), executed / possible
