"""From times of ops and copies to the constants of the time model, by least squares. No PyTorch needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim.errors import TiersimError

MAX_SHARE = 10.0
"""Largest share of a tier's bandwidth that is believed: beyond it the byte part of an op is nothing."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One op of some size: its kind and type, FLOPs, bytes of its operands, and the nanoseconds that it took."""

    kind: str
    dtype: str
    flops: int
    bytes: int
    ns: float


@dataclass(frozen=True)
class OpFit:
    """Constants of `launch + FLOPs / (efficiency * peak) + bytes / (share * bandwidth)`.

    launch_ns; peak: FLOP/s by type, the fastest kind's; efficiency: by (kind, type); bandwidth: bytes/s of the
    fastest stream; share: by kind. error: mean relative error of the fit; worst: the largest, and its sample.
    """

    launch_ns: float
    peak: Mapping[str, float]
    efficiency: Mapping[tuple[str, str], float]
    bandwidth: float
    share: Mapping[str, float]
    error: float
    worst: float
    worst_sample: Sample
    residuals: Mapping[str, float]


@dataclass(frozen=True)
class LinkFit:
    """Constants of `fixed + bytes / rate`: ns and bytes/s, with the mean relative error."""

    fixed_ns: float
    rate: float
    error: float


def fit_ops(samples: Sequence[Sample]) -> OpFit:
    """All kinds in one fit, for they share `launch`; each sample counts by its relative error.

    Raises TiersimError where there are too few samples, or no rate can be found from them.
    """
    from scipy.optimize import nnls

    pairs = sorted({(s.kind, s.dtype) for s in samples if s.flops})
    kinds = sorted({s.kind for s in samples})
    if len(samples) < 1 + len(pairs) + len(kinds):
        raise TiersimError(f"{len(samples)} measurements are too few for {1 + len(pairs) + len(kinds)} constants")
    columns = {key: 1 + i for i, key in enumerate(pairs)}
    streams = {kind: 1 + len(pairs) + i for i, kind in enumerate(kinds)}
    matrix = np.zeros((len(samples), 1 + len(pairs) + len(kinds)))
    ns = np.array([s.ns for s in samples])
    matrix[:, 0] = 1
    for row, sample in enumerate(samples):
        if sample.flops:
            matrix[row, columns[sample.kind, sample.dtype]] = sample.flops
        matrix[row, streams[sample.kind]] = sample.bytes
    weighted = matrix / ns[:, None]
    size = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)  # columns of FLOPs and of 1 differ by 10^12
    found = nnls(weighted / size, np.ones(len(samples)))[0] / size
    off = np.abs(matrix @ found / ns - 1)
    return _constants(samples, found, columns, streams, off)


def _constants(
    samples: Sequence[Sample],
    found: np.ndarray,
    columns: Mapping[tuple[str, str], int],
    streams: Mapping[str, int],
    off: np.ndarray,
) -> OpFit:
    speed = {key: 1e9 / found[at] for key, at in columns.items() if found[at] > 0}
    rate = {kind: 1e9 / found[at] for kind, at in streams.items() if found[at] > 0}
    # a kind's own byte part is a stream only where it does no products
    plain = {kind: value for kind, value in rate.items() if not any(key[0] == kind for key in columns)}
    if not speed or not plain:
        raise TiersimError("the measurements give no rate of computing or of memory: all took the same time")
    peak: dict[str, float] = {}
    for (_, dtype), value in speed.items():
        peak[dtype] = max(peak.get(dtype, 0.0), value)
    bandwidth = max(plain.values())
    worst = int(np.argmax(off))
    kinds = sorted(streams)
    return OpFit(
        launch_ns=float(found[0]),
        peak=peak,
        efficiency={key: speed[key] / peak[key[1]] for key in speed},
        bandwidth=bandwidth,
        share={kind: min(rate.get(kind, np.inf) / bandwidth, MAX_SHARE) for kind in kinds},
        error=float(off.mean()),
        worst=float(off[worst]),
        worst_sample=samples[worst],
        residuals={kind: float(off[[s.kind == kind for s in samples]].mean()) for kind in kinds},
    )


def fit_copies(sizes: Sequence[int], ns: Sequence[float]) -> LinkFit:
    """Fixed time and rate of copies of these sizes. Raises TiersimError with fewer than two sizes."""
    from scipy.optimize import nnls

    if len(set(sizes)) < 2:
        raise TiersimError("a copy's fixed time and rate need two sizes at least")
    time = np.array(ns, float)
    matrix = np.stack([np.ones(len(sizes)), np.array(sizes, float)], axis=1)
    weighted = matrix / time[:, None]
    size = np.linalg.norm(weighted, axis=0)
    fixed, slope = nnls(weighted / size, np.ones(len(sizes)))[0] / size
    if slope <= 0:
        raise TiersimError("copies of all sizes took the same time: no rate can be fitted")
    off = np.abs(matrix @ np.array([fixed, slope]) / time - 1)
    return LinkFit(float(fixed), float(1e9 / slope), float(off.mean()))
