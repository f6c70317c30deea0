"""Writes a profile of the local machine: times ops and copies of many sizes, and fits the time model to them."""

# mypy: allow-subclassing-any

from __future__ import annotations

import datetime
import os
import platform as system
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sim.errors import TiersimError
from sim.foreign_text import styled
from sim.measure import choose_device, require_torch
from sim.measure.measured import Copies, Measured, profile_of
from sim.measure.profile_text import Machine
from sim.regular_files import check_replaceable

Progress = Callable[[int, int, str], None]
"""Called with the number of finished sizes, their total, and what was timed last."""


def calibrate(
    out: str | os.PathLike[str],
    *,
    quick: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Measure this machine and write a profile that `load_profile` reads. Returns its path.

    It times matrix products and attention in each type, and six kinds of memory-bound op (Adam included); on CUDA also
    copies to and from the host, one direction at a time and both at once, pinned and pageable, and the host's own ops.
    The constants come from a least-squares fit of relative errors; their residuals are in the file. Every figure names
    the date and the device as its source. The file appears only when everything is done; an interruption leaves nothing
    behind. Where the measurements show that the machine was probably busy, a Caution says so, and the file's notes do.

    out: path of the file, ending in `.toml`.
    quick: few and small sizes, for trying it out, not for use.
    device: see `choose_device`.
    progress: called after each size; by default a line on a terminal.

    Raises TiersimError without PyTorch or the device, or where the file cannot be written.
    """
    path = check_name(out)
    return write_profile(path, profile_of(measure(quick=quick, device=device, progress=progress)))


def check_name(out: str | os.PathLike[str]) -> Path:
    """The path of a profile that is to be written. Raises TiersimError for another ending, or without its folder."""
    path = Path(out)
    if path.suffix != ".toml":
        raise TiersimError(f"{path}: a profile's name ends in '.toml'")
    if not path.parent.is_dir():
        raise TiersimError(f"{path}: there is no folder {str(path.parent)!r}")
    return path


def measure(*, quick: bool = False, device: str | None = None, progress: Progress | None = None) -> Measured:
    """Time the ops and copies of this machine; parameters and errors as for `calibrate`."""
    require_torch("tiersim calibrate")
    import torch

    from sim.measure.samples import CUDA_STREAMS, DTYPES, FULL, QUICK, Bench, op_samples, op_sizes

    place = torch.device(choose_device(device))
    is_cuda = place.type == "cuda"
    effort = QUICK if quick else FULL
    dtypes = [name for name in DTYPES if is_cuda or name == "fp32"]
    device_effort = replace(effort, streams=CUDA_STREAMS) if is_cuda and not quick else effort
    total = op_sizes(device_effort, len(dtypes)) + (op_sizes(effort, 1) + 3 * len(effort.copies) if is_cuda else 0)
    report = progress or _on_terminal
    done = 0

    def tick(label: str) -> None:
        nonlocal done
        done += 1
        report(min(done, total), total, label)

    report(0, total, f"about {_minutes(_seconds(total, effort.seconds))} on {place}")
    bench = Bench(place, device_effort, tick)
    machine = _machine(place)
    with torch.no_grad(), _no_tf32():
        ops = op_samples(bench, dtypes)
        host = op_samples(Bench(torch.device("cpu"), effort, tick), ["fp32"]) if is_cuda else []
        copies = _copies(bench) if is_cuda else {}
    report(total, total, "")
    return Measured(machine, ops, host, copies)


def seconds_needed(*, quick: bool = False, cuda: bool = False) -> float:
    """The approximate duration of `calibrate` in seconds.

    quick: see `calibrate`.
    cuda: whether the device is a CUDA device.
    """
    require_torch("tiersim calibrate")
    from sim.measure.samples import FULL, QUICK, op_sizes

    effort = QUICK if quick else FULL
    sizes = op_sizes(effort, 3) + op_sizes(effort, 1) + 3 * len(effort.copies) if cuda else op_sizes(effort, 1)
    return _seconds(sizes, effort.seconds)


def _copies(bench: object) -> dict[str, Copies]:
    from sim.measure.samples import Bench, copy_times

    assert isinstance(bench, Bench)
    ways = {"pinned": (True, False), "pageable": (False, False), "both": (True, True)}
    return {name: Copies(*copy_times(bench, pinned=pinned, both=both)) for name, (pinned, both) in ways.items()}


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Compute fp32 products in fp32, not in TF32."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _machine(place: object) -> Machine:
    import torch

    assert isinstance(place, torch.device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    if place.type == "cuda":
        free, all_of_it = torch.cuda.mem_get_info(place)
        name = torch.cuda.get_device_name(place)
        return Machine(name, True, today, torch.__version__, all_of_it, free, memory)
    name = f"{system.machine()} CPU, {torch.get_num_threads()} threads"
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return Machine(name, False, today, torch.__version__, memory, free, memory)


def write_profile(path: Path, text: str) -> Path:
    """Write a temporary file, check that it is a valid profile, and rename it. Returns its path.

    Raises TiersimError where it cannot be written.
    """
    from sim.hardware.profile import load_profile

    temporary = ""
    try:
        check_replaceable(path)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".toml", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        load_profile(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise TiersimError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
    return path


def _seconds(sizes: int, each: float) -> float:
    """Time for that many sizes: the largest one of each kind runs a few times, however long it takes."""
    return sizes * (1.5 * each + 0.1)


def _minutes(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds < 90 else f"{round(seconds / 60)} min"


def _on_terminal(done: int, total: int, what: str) -> None:
    """Overwrite one line on standard error; do nothing where that is not a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        line = styled(sys.stderr)
        line.write(f"\r\x1b[Kcalibrate: {done}/{total} {what}{end}")
        line.flush()


__all__ = ["calibrate", "check_name", "measure", "seconds_needed", "write_profile"]
