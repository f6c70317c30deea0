"""A saved run, simulated once more: only what is shipped or installed unasked, and only if its figures are the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.commands.options import JSON, OUT, budget_of, files_of, job_of, limit_of, parameters, workload
from sim.commands.runs import COMPARED, LIMITS, RUN
from sim.commands.saved import check_repeated
from sim.limits import calling

if TYPE_CHECKING:
    from sim.experiment import Result
    from sim.foreign import Named, Trust
    from sim.hardware.platform import Platform
    from sim.trace.graph import Trace

ASKED = {option.name: option.kind for option in (*RUN, *COMPARED) if option not in (OUT, JSON, *LIMITS)}
"""The type of each option that a folder may mention."""


def read_saved(path: Path, *needed: str) -> dict[str, Any]:
    """What a file of results holds. Raises TiersimError where it is not one, or has none of the keys needed."""
    from sim.errors import TiersimError
    from sim.foreign import parse_json, part_of
    from sim.regular_files import read_file
    from workloads.steps import is_reference

    try:
        found = parse_json(read_file(part_of(path.parent, path.name)))
    except ValueError as error:
        raise TiersimError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict) or not all(key in found for key in needed):
        raise TiersimError(f"{path}: expected the keys {', '.join(needed)}; `tiersim run -o` writes them")
    for key in ("workload", "left_out"):
        if key in needed and not isinstance(found[key], dict):
            raise TiersimError(f"{path}: {key}: expected an object")
    asked = found["asked"]
    if not isinstance(asked, dict) or not isinstance(asked.get("profile"), str):
        raise TiersimError(f"{path}: asked: expected the options of the run, 'profile' among them")
    for key, kind in ASKED.items():
        value = asked.get(key)
        words = value if kind is list and isinstance(value, list) else []
        if not (value is None or type(value) is kind) or not all(isinstance(word, str) for word in words):
            raise TiersimError(f"{path}: asked.{key}: expected {kind.__name__}, not {value!r}")
    for key in (
        () if asked.get("trace") else ("model",) if is_reference(asked.get("model")) else ("model", "batch", "seq")
    ):
        if asked.get(key) is None:
            raise TiersimError(f"{path}: asked.{key}: is missing, and no trace is named")
    return found


def options_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a saved run, None where it does not mention one."""
    return {key: asked.get(key) for key in (*ASKED, *asked)}


def trust_of(folder: Path, asked: bool, saved: Mapping[str, Any], file: str) -> Trust:
    """What the folder of a saved run may cause this program to do. asked: whether its files may be used."""
    from sim.foreign import Trust, read_sums

    return Trust(folder, asked, read_sums(saved.get("files"), str(folder / file)))


def checked_job(
    options: Mapping[str, Any], trust: Trust, files: Iterable[Named]
) -> tuple[list[str], tuple[Platform, Trace] | None]:
    """Why a run cannot be repeated; if it can, its platform and trace."""
    objections = [*trust.objections(files), *trust.too_much(options)]
    objections += [] if objections else _too_divided(options, trust)
    if objections:
        return objections, None
    job = job_of(dict(options))
    objections = trust.too_long(len(job[1].op_columns.name), options["iterations"])
    return objections, None if objections else job


def _too_divided(options: Mapping[str, Any], trust: Trust) -> list[str]:
    """Why a trace is not divided into as many microbatches as the options say."""
    parts = options["micro_batches"] or 1
    if trust.asked or parts == 1:
        return []
    return trust.too_divided(steps(workload({**options, "micro_batches": 1})), parts)


def steps(trace: Trace) -> int:
    """The ops of a trace that each microbatch has."""
    from sim.trace.op import PHASES

    return int((trace.op_columns.phase != PHASES.index("update")).sum())


def repeat(
    options: Mapping[str, Any], trace: Trace, platform: Platform, policy: str, saved: Mapping[str, Any], folder: Path
) -> Result:
    """The saved run, repeated, or what ran of it until it did not fit.

    Raises TiersimError if its figures differ from the saved ones.
    """
    from sim.errors import Infeasible
    from sim.experiment import simulate

    given = parameters(options["param"])
    try:
        with calling(policy):
            result = simulate(
                trace,
                platform,
                policy,
                budget=budget_of(options["budget"], trace, platform),
                seed=options["seed"] or 0,
                iterations=options["iterations"],
                **limit_of(options["recompute_limit"]),
                **given,
            )
    except Infeasible as error:
        if error.attempt is None or saved.get("fits") is not False:
            raise
        result = error.attempt
    check_repeated({"trace": trace.content_hash, **result.summary()}, saved, f"{folder}: {policy}")
    return result


@dataclass(frozen=True)
class Repeated:
    """The run of a folder, simulated once more, with the trace and what else it was simulated with.

    limit: on recomputation, as an argument of `simulate`; empty for the usual one.
    """

    trace: Trace
    result: Result
    seed: int
    limit: dict[str, Any]


def repeated_run(folder: Path, trust: bool) -> Repeated:
    """The run of a folder, simulated once more. Raises TiersimError where the folder has none, or may not be used."""
    from sim.errors import TiersimError

    path = folder / "summary.json"
    if not path.is_file():
        raise TiersimError(f"{folder}: no run here: expected summary.json, which `tiersim run -o` writes")
    saved = read_saved(path, "asked", "trace")
    asked = saved["asked"]
    policy, options = str(saved.get("policy") or asked.get("policy")), options_of(asked)
    objections, job = checked_job(options, trust_of(folder, trust, saved, path.name), files_of(asked, [policy]))
    if job is None:
        raise TiersimError(f"{folder}: the run cannot be repeated: {'; '.join(objections)}")
    platform, trace = job
    result = repeat(options, trace, platform, policy, saved, folder)
    if result.refusal is not None:
        raise TiersimError(f"{folder}: the run does not fit: {result.refusal['error']}")
    return Repeated(trace, result, options["seed"] or 0, limit_of(options["recompute_limit"]))
