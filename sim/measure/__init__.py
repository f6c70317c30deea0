"""The machine at hand: real training steps beside simulated ones, and a profile fitted to it. Needs PyTorch."""

# mypy: allow-subclassing-any

from __future__ import annotations

from importlib.util import find_spec

from sim.errors import TiersimError


def require_torch(what: str) -> None:
    """Raise TiersimError saying how to install PyTorch, which is an extra, where it is missing."""
    if find_spec("torch") is None:
        raise TiersimError(f"{what} runs on the real machine and needs PyTorch: pip install 'tiersim[torch]'")


def choose_device(name: str | None) -> str:
    """`cuda` where there is such a device, else `cpu`; or the one named (`cuda:1`). Raises TiersimError without it."""
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
