"""Lets a PyTorch without CUDA differentiate fake tensors of device "cuda". Import it before torch.

Needs a C++ compiler.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("fakecuda.cpp")


def load() -> None:
    """Compile the guard and load it: PyTorch asks once whether there is a device, while it is imported."""
    home = Path(find_spec("torch").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "fakecuda.so")
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{home / 'include'}", f"-L{home / 'lib'}"]
        flags += [f"-Wl,-rpath,{home / 'lib'}"]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", target, "-lc10", "-ltorch_cpu"], check=True)
        ctypes.CDLL(target, mode=ctypes.RTLD_GLOBAL)


load()
