"""Where in a script something happened: the line of the person who wrote it, not of PyTorch or of this package."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import TracebackType

OWN = tuple(str(Path(__file__).parents[2] / package) + os.sep for package in ("workloads", "sim"))
INSTALLED = f"{os.sep}site-packages{os.sep}"
STANDARD = str(Path(os.__file__).parent) + os.sep


def line_of(error_trace: TracebackType | None = None) -> str:
    """The innermost line of a stack that belongs neither to PyTorch nor to this package, "" without one.

    If it belongs to another installed package, the script's own line is named, too.

    error_trace: of an error; by default the current stack.
    """
    frames = traceback.extract_stack() if error_trace is None else traceback.extract_tb(error_trace)
    torch = str(Path(str(import_module("torch").__file__)).parent) + os.sep
    others = [f for f in reversed(frames) if not _is_inside(f.filename, (torch, *OWN))]
    if not others:
        return ""
    inner = others[0]
    written = next((f for f in others if not is_installed(f.filename)), inner)
    if written is inner:
        return _shown(inner)
    return f"{_shown(inner)}, called at {_shown(written)}"


def called_of_torch() -> str:
    """The function of PyTorch's that the innermost such line calls, by its name, "" for none."""
    torch = str(Path(str(import_module("torch").__file__)).parent) + os.sep
    name, frame = "", sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename, (torch, *OWN)):
        if frame.f_code.co_filename.startswith(torch):
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return name


def is_of_autograd() -> bool:
    """Whether autograd's engine calls an op itself: none of PyTorch's or a person's functions in Python does."""
    frame = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename, OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def open_frames() -> Iterator[tuple[str, int]]:
    """File name and line of the running frames that belong neither to PyTorch nor to this package, innermost first."""
    torch = str(Path(str(import_module("torch").__file__)).parent) + os.sep
    frame = sys._getframe(1)
    while frame is not None:
        if not _is_inside(frame.f_code.co_filename, (torch, *OWN)):
            yield os.path.basename(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


def way_out(error: BaseException) -> str:
    """What to do about an error that PyTorch itself does not explain to someone who captures a step, "" if it does."""
    text = str(error).lower()
    if any(word in text for word in ("nccl", "process group", "process_group", "rendezvous", "world_size")):
        return "; capture the step of one process without torch.distributed, and simulate several with --dp"
    if "flexattention" in text:
        return "; flex_attention has no kernel here: capture the step with scaled_dot_product_attention in its place"
    if "uninitialized" in text:
        return "; a lazy module has no sizes before its first call: give them (nn.Linear for nn.LazyLinear)"
    return ""


def is_installed(file: str) -> bool:
    """Whether a source file belongs to an installed package or to Python itself."""
    return INSTALLED in file or file.startswith(("<frozen", STANDARD))


def _is_inside(file: str, folders: Iterable[str]) -> bool:
    return file.startswith("<") or any(file.startswith(folder) for folder in folders) or "unittest/mock.py" in file


def _shown(frame: traceback.FrameSummary) -> str:
    line = f" ({frame.line[:100]})" if frame.line else ""
    return f"{os.path.basename(frame.filename)}:{frame.lineno}{line}"
