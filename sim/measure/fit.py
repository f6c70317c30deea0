"""Fits the constants of the time model to times of ops and copies, by least squares. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim.errors import TiersimError

MAX_SHARE = 10.0
"""The largest plausible share of a tier's bandwidth; beyond it the byte part of an op is negligible."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured op.

    kind, dtype: as in `sim.trace.Op`.
    flops: floating-point operations.
    bytes: of its operands.
    ns: measured duration.
    """

    kind: str
    dtype: str
    flops: int
    bytes: int
    ns: float


@dataclass(frozen=True)
class OpFit:
    """Constants of `launch + FLOPs / (efficiency * peak) + bytes / (share * bandwidth)`.

    launch_ns: fixed time per op.
    peak: FLOP/s by type, of the fastest kind.
    efficiency: by (kind, type).
    bandwidth: bytes/s of the fastest memory-bound kind.
    share: of that bandwidth, by kind.
    error: mean relative error of the fit.
    worst, worst_sample: the largest relative error, and its sample.
    residuals: mean relative error by kind.
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
    """Constants of `fixed + bytes / rate`.

    fixed_ns: ns per copy.
    rate: bytes/s.
    error: mean relative error of the fit.
    """

    fixed_ns: float
    rate: float
    error: float


def fit_ops(samples: Sequence[Sample]) -> OpFit:
    """Fit all kinds together, because they share `launch`; each sample counts by its relative error.

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
    size = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)  # the columns differ by a factor of 10^12
    constants = nnls(weighted / size, np.ones(len(samples)))[0] / size
    errors = np.abs(matrix @ constants / ns - 1)
    return _constants(samples, constants, columns, streams, errors)


def _constants(
    samples: Sequence[Sample],
    constants: np.ndarray,
    columns: Mapping[tuple[str, str], int],
    streams: Mapping[str, int],
    errors: np.ndarray,
) -> OpFit:
    speed = {key: 1e9 / constants[column] for key, column in columns.items() if constants[column] > 0}
    rate = {kind: 1e9 / constants[column] for kind, column in streams.items() if constants[column] > 0}
    # a kind's byte rate is a bandwidth only if the kind computes no products
    plain = {kind: value for kind, value in rate.items() if not any(key[0] == kind for key in columns)}
    if not speed or not plain:
        raise TiersimError("the measurements give no rate of computing or of memory: all took the same time")
    peak: dict[str, float] = {}
    for (_, dtype), value in speed.items():
        peak[dtype] = max(peak.get(dtype, 0.0), value)
    bandwidth = max(plain.values())
    worst = int(np.argmax(errors))
    kinds = sorted(streams)
    return OpFit(
        launch_ns=float(constants[0]),
        peak=peak,
        efficiency={key: speed[key] / peak[key[1]] for key in speed},
        bandwidth=bandwidth,
        share={kind: min(rate.get(kind, np.inf) / bandwidth, MAX_SHARE) for kind in kinds},
        error=float(errors.mean()),
        worst=float(errors[worst]),
        worst_sample=samples[worst],
        residuals={kind: float(errors[[s.kind == kind for s in samples]].mean()) for kind in kinds},
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
    errors = np.abs(matrix @ np.array([fixed, slope]) / time - 1)
    return LinkFit(float(fixed), float(1e9 / slope), float(errors.mean()))
