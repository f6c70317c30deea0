"""Calibrates, then validates over a grid of models, lengths, types and budgets on a CUDA device, in one command.

    python -m sim.measure.grid -o my_machine

writes my_machine.toml (the profile) and my_machine.json (one row per step, and the times that the profile is fitted
to), and prints each row. It finishes within ten minutes; steps for which time or memory was too short are listed in the
file. Needs PyTorch with CUDA.

    python -m sim.measure.grid --profile-from my_machine.json -o again.toml

fits the constants to the stored times again, on any machine, and writes the profile. Needs no PyTorch.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from sim.analysis.peak_memory import peaks_by_phase
from sim.deprecation import told_on_stderr
from sim.errors import OutOfMemory, TiersimError, closest
from sim.experiment import simulate, unlimited
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.measure import choose_device, require_torch
from sim.measure.calibrate import check_name, measure, write_profile
from sim.measure.measured import Measured, profile_of, read
from sim.measure.validate import POLICIES, Row, config_of, roomy, validate
from sim.regular_files import check_replaceable
from workloads.transformer import transformer

SECONDS = 570.0
"""Total time in seconds."""

ON_DEVICE = ("none", "checkpoint", "selective checkpoint")
"""Policies without copies; `save_on_cpu` moves all saved tensors through pageable memory, slow for large steps."""


@dataclass(frozen=True)
class Case:
    """One job to validate.

    model, batch, sequence, precision: as for `transformer`.
    policies: names of `sim.measure.validate.POLICIES`.
    budget: also run it with too little memory.
    """

    model: str
    batch: int
    sequence: int
    precision: str
    policies: Sequence[str] = ON_DEVICE
    budget: bool = False


ALL = tuple(POLICIES)
GRID = (
    Case("gpt2-small", 8, 1024, "amp_bf16", ALL, budget=True),
    Case("gpt2-small", 8, 1024, "bf16", ALL),
    Case("gpt2-small", 4, 512, "fp32", ALL),
    Case("gpt2-small", 16, 256, "amp_bf16"),
    Case("gpt2-medium", 8, 1024, "amp_bf16", budget=True),
    Case("gpt2-medium", 4, 512, "bf16"),
    Case("llama-1b", 2, 1024, "bf16"),
    Case("llama-1b", 4, 2048, "bf16", budget=True),
    Case("llama-1b", 1, 2048, "amp_bf16"),
    Case("gpt2-large", 4, 1024, "amp_bf16", budget=True),
    Case("gpt2-xl", 2, 1024, "bf16"),
    Case("gpt2-xl", 4, 1024, "amp_bf16", budget=True),
)
"""From small to large, so that jobs that do not fit come last."""


@dataclass(frozen=True)
class Fit:
    """Whether a step fits into `limit` bytes, in reality and in the simulation."""

    policy: str
    limit: int
    really: bool
    simulated: bool


def budget_rows(case: Case, platform: Platform, device: str) -> list[Fit]:
    """Steps with and without checkpointing, with a budget halfway between their simulated peaks."""
    from sim.measure.steps import Steps

    config = config_of(case.model, case.sequence)
    dropout = 0.1 if config["model_type"] == "gpt2" else 0.0
    trace = transformer(config, batch=case.batch, sequence=case.sequence, precision=case.precision, dropout=dropout)
    peaks = {name: simulated_peak(case, name) for name in ("none", "checkpoint")}
    limit = sum(peaks.values()) // 2
    steps = Steps(config, case.batch, case.sequence, case.precision, "sdpa", dropout, device)
    steps.peaks("checkpoint")  # creates the optimizer's state, and determines `steps.beside`
    rows = []
    for name in peaks:
        policy, parameters = POLICIES[name]
        try:
            simulated = simulate(trace, platform, policy, budget=limit, **parameters).log.complete
        except OutOfMemory:
            simulated = False
        rows.append(Fit(name, limit, steps.fits(name, limit + max(0, steps.beside)), simulated))
    return rows


def simulated_peak(case: Case, policy: str) -> int:
    """The simulated peak of a case in bytes, from the configuration alone."""
    config = config_of(case.model, case.sequence)
    trace = transformer(config, batch=case.batch, sequence=case.sequence, precision=case.precision)
    name, parameters = POLICIES[policy]
    return max(peaks_by_phase(simulate(trace, roomy(10**10, 10**10), name, **parameters).log, unit=512).values())


def run(
    grid: Sequence[Case],
    platform: Platform,
    device: str,
    *,
    stop: float,
    say: Callable[[str], None],
    free: Callable[[], int],
) -> list[dict[str, Any]]:
    """Validate a grid. Returns one row per case and policy.

    grid: the cases.
    platform: profile of this machine.
    device: to run on.
    stop: value of `time.monotonic()` after which no further case starts.
    say: called with what is running.
    free: returns the free bytes on the device.
    """
    rows: list[dict[str, Any]] = []
    longest = 0.0
    for case in grid:
        about = {"model": case.model, "batch": case.batch, "sequence": case.sequence, "precision": case.precision}
        started = time.monotonic()
        policies = [name for name in case.policies if simulated_peak(case, name) < 0.9 * free()]
        for name in case.policies:
            if name not in policies:
                rows.append({**about, "policy": name, "not_run": "it needs more memory than there is"})
        if started + longest > stop:
            rows += [{**about, "policy": name, "not_run": "there was no time left"} for name in policies]
            continue
        if policies:
            say(f"{case.model}, {case.batch} × {case.sequence}, {case.precision}")
            measured = validate(
                case.model,
                batch=case.batch,
                sequence=case.sequence,
                precision=case.precision,
                device=device,
                repeats=3,
                profile=platform,
                policies=policies,
            )
            rows += [about | _shown(row) for row in measured]
        if case.budget and policies and device.startswith("cuda"):
            gc.collect()
            rows += [{**about, **asdict(fit)} for fit in budget_rows(case, platform, device)]
        longest = max(longest, time.monotonic() - started)
        gc.collect()
    return rows


def _shown(row: Row) -> dict[str, Any]:
    return {key: value for key, value in asdict(row).items() if value not in (None, "")}


def write(path: Path, machine: str, rows: Sequence[dict[str, Any]], measured: Measured | None = None) -> None:
    """Write the rows as JSON, one per line; the file appears complete or not at all.

    measured: what the profile was fitted to, if it was measured with the rows.
    """
    check_replaceable(path)
    text = ",\n".join(json.dumps(row) for row in rows)
    stored = f',\n"measured": {json.dumps(measured.record())}' if measured else ""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f'{{"machine": {json.dumps(machine)}, "rows": [\n{text}\n]{stored}}}\n', encoding="utf-8")
    os.replace(temporary, path)


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options. Raises TiersimError for a value that none of them can have, before anything is measured."""
    parser = argparse.ArgumentParser(prog="python -m sim.measure.grid", description="calibrate and validate, CUDA")
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        help="name of the files to write, without .toml and .json; with --profile-from the profile to write",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--profile", help="profile of this machine; by default it is measured first")
    source.add_argument("--profile-from", metavar="DATA.json", help="only fit a profile to what a grid has stored")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="total time in seconds")
    given = parser.parse_args(arguments)
    if not 0 < given.seconds < inf:
        raise TiersimError(f"--seconds {given.seconds:g}: expected a finite number above 0{closest(given.seconds, 1)}")
    check_name(given.out if given.profile_from else f"{given.out}.toml")
    if given.profile:
        load_profile(given.profile)
    return given


def main(arguments: Sequence[str]) -> int:
    """Run everything, or fit a profile to stored data. Returns 0, or 2 with one line on standard error."""
    try:
        with told_on_stderr():
            given = read_options(arguments)
            if given.profile_from:
                print(write_profile(Path(given.out), profile_of(read(given.profile_from))))
                return 0
            rows = calibrate_and_validate(given.out, given.profile, given.seconds)
    except TiersimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in rows:
        print(json.dumps(row))
    return 0


def calibrate_and_validate(out: str, profile: str | None, seconds: float) -> list[dict[str, Any]]:
    """Measure the CUDA device, write the profile and the rows, and return the rows.

    out: name of the files, without .toml and .json.
    profile: of this machine; None to measure it first.
    seconds: total time in seconds.

    Raises TiersimError without PyTorch or a CUDA device, or where a file cannot be written.
    """
    stop = time.monotonic() + seconds
    require_torch("the grid")
    device = choose_device("cuda")
    import torch

    measured = None if profile else measure(device=device)
    if measured is not None:
        profile = str(write_profile(Path(f"{out}.toml"), profile_of(measured)))
    platform = unlimited(load_profile(str(profile)))

    def free() -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])

    rows = run(GRID, platform, device, stop=stop, say=lambda text: print(text, file=sys.stderr), free=free)
    machine = f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    write(Path(f"{out}.json"), machine, rows, measured)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
