"""The machine at hand: real training steps beside simulated ones, and a profile fitted to it. Needs PyTorch."""

# mypy: disable-error-code="import-not-found", allow-subclassing-any

from __future__ import annotations

from importlib.util import find_spec

from sim.errors import TiersimError


def require_torch(what: str) -> None:
    """Raise TiersimError saying how to install PyTorch, which is an extra, where it is missing."""
    if find_spec("torch") is None:
        raise TiersimError(f"{what} runs on the real machine and needs PyTorch: pip install 'tiersim[torch]'")


def choose_device(name: str | None) -> str:
    """`cuda` where there is such a device, else `cpu`; or the one named. Raises TiersimError where it is not there."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise TiersimError(f"device {name!r} is neither 'cpu' nor 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TiersimError(f"device {name!r}: this PyTorch ({torch.__version__}) sees no CUDA device")
    return name
