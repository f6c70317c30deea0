"""Measurements on the local machine: a profile fitted to it, and real training steps next to simulated ones.

Needs PyTorch.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

from importlib.util import find_spec

from sim.errors import TiersimError


def require_torch(command: str) -> None:
    """Raise TiersimError, saying how to install it, if PyTorch (an extra) is missing."""
    if find_spec("torch") is None:
        raise TiersimError(f"{command} runs on the real machine and needs PyTorch: pip install 'tiersim[torch]'")


def choose_device(name: str | None) -> str:
    """The device to measure on. Raises TiersimError if it is unknown or does not exist.

    name: `cpu`, `cuda` or `cuda:1`; None for `cuda` where there is such a device, else `cpu`.
    """
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not number.isdecimal()):
        raise TiersimError(f"device {name!r} is neither 'cpu' nor 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TiersimError(f"device {name!r}: this PyTorch ({torch.__version__}) sees no CUDA device")
    if kind == "cuda" and number and int(number) >= torch.cuda.device_count():
        raise TiersimError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return name
