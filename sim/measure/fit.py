"""Fits the constants of the time model to times of ops and copies, by least squares. Needs no PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    spread: by what fraction the median of its repeats is above the fastest.
    waited: share of the time in which the measuring thread had no core; 0 on a CUDA device.
    """

    kind: str
    dtype: str
    flops: int
    bytes: int
    ns: float
    spread: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class OpFit:
    """Constants of `launch + FLOPs / (efficiency * peak) + bytes / (share * bandwidth)`.

    launch_ns: fixed time per op.
    peak: FLOP/s by type, of the fastest kind.
    efficiency: by (kind, type).
    bandwidth: bytes/s of the fastest memory-bound kind.
    share: of that bandwidth, by kind.
    error: mean relative error of the fit, of the kinds in `residuals` where there are any.
    worst, worst_sample: the largest relative error, and its sample.
    residuals: mean relative error by kind, of kinds with more samples than constants; others are met exactly.
    held_out: median relative error by kind at a sample that the fit did not have; the same kinds.
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
    held_out: Mapping[str, float]


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

    Raises TiersimError where there are no more samples than constants, or no rate can be found from them.
    """
    pairs = sorted({(s.kind, s.dtype) for s in samples if s.flops})
    kinds = sorted({s.kind for s in samples})
    if len(samples) <= 1 + len(pairs) + len(kinds):
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
    constants = _solved(weighted)
    errors = np.abs(weighted @ constants - 1)
    others = np.array([weighted[i] @ _solved(np.delete(weighted, i, axis=0)) for i in range(len(samples))])
    return _constants(samples, constants, columns, streams, errors, np.abs(others - 1))


def _solved(weighted: np.ndarray) -> np.ndarray:
    """The constants of least relative errors, none below 0.

    weighted: shape (samples, constants): what each constant is multiplied by, over the ns of the sample.
    """
    from scipy.optimize import nnls

    size = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)  # the columns differ by a factor of 10^12
    return np.asarray(nnls(weighted / size, np.ones(len(weighted)))[0] / size)


def _stated(samples: Sequence[Sample], pairs: Iterable[tuple[str, str]]) -> dict[str, np.ndarray]:
    """The rows of each kind that has more samples than constants: its own, and the launch that all kinds share."""
    own = Counter(kind for kind, _ in pairs)
    rows = {kind: np.array([s.kind == kind for s in samples]) for kind in sorted({s.kind for s in samples})}
    return {kind: mask for kind, mask in rows.items() if mask.sum() > own[kind] + 2}


def _constants(
    samples: Sequence[Sample],
    constants: np.ndarray,
    columns: Mapping[tuple[str, str], int],
    streams: Mapping[str, int],
    errors: np.ndarray,
    others: np.ndarray,
) -> OpFit:
    """The constants by their names, and how far they are off.

    constants: shape (constants,).
    columns, streams: positions there of ns per FLOP and of ns per byte.
    errors: shape (samples,): relative errors of the fit.
    others: the same, each of a fit without the sample.

    Raises TiersimError where there is no rate.
    """
    speed = {key: 1e9 / constants[column] for key, column in columns.items() if constants[column] > 0}
    rate = {kind: 1e9 / constants[column] for kind, column in streams.items() if constants[column] > 0}
    # a kind's byte rate is a bandwidth only if the kind computes no products
    plain = {kind: value for kind, value in rate.items() if not any(key[0] == kind for key in columns)}
    if not speed or not plain:
        raise TiersimError(
            "the measurements give no rate of computing or of memory: all took the same time, or the machine was busy; "
            "measure again when it is idle"
        )
    peak: dict[str, float] = {}
    for (_, dtype), value in speed.items():
        peak[dtype] = max(peak.get(dtype, 0.0), value)
    bandwidth = max(plain.values())
    worst = int(np.argmax(errors))
    kinds = sorted(streams)
    stated = _stated(samples, columns)
    counted = np.logical_or.reduce([*stated.values()]) if stated else np.ones(len(samples), bool)
    return OpFit(
        launch_ns=float(constants[0]),
        peak=peak,
        efficiency={key: speed[key] / peak[key[1]] for key in speed},
        bandwidth=bandwidth,
        share={kind: min(rate.get(kind, np.inf) / bandwidth, MAX_SHARE) for kind in kinds},
        error=float(errors[counted].mean()),
        worst=float(errors[worst]),
        worst_sample=samples[worst],
        residuals={kind: float(errors[rows].mean()) for kind, rows in stated.items()},
        held_out={kind: float(np.median(others[rows])) for kind, rows in stated.items()},
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
