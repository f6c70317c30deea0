"""The engine and the evictors as C: a copy of the program that mypyc has compiled in part.

python benchmarks/compiled.py FOLDER         make one, with the tests and benchmarks beside it; a few minutes
python benchmarks/compiled.py FOLDER --time  and time online policies under pressure, in Python and as C
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ONLINE = ("lru_tiering", "dtr(heuristic=dtr_eq)", "dtr(heuristic=dtr)", "delta")
"""Policies that decide during the run, each by evictors of `sim.eviction`."""
ROOT = Path(__file__).resolve().parent.parent
SWITCH = "HATCH_BUILD_HOOK_ENABLE_MYPYC"
BESIDE = ("tests", "benchmarks", "pyproject.toml")


def compiled_copy(folder: Path) -> Path:
    """The folder, filled with the files of a wheel that was built with a compiled engine, and what tests it.

    The wheel is built from a source distribution, so that nothing compiled stays in the working tree, where it would
    shadow its own source.

    Raises SystemExit with what the build printed where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="tiersim-wheel-") as made:
        done = subprocess.run(
            [sys.executable, "-m", "build", "-o", made, str(ROOT)],
            env={**os.environ, SWITCH: "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        (wheel,) = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    for name in BESIDE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def modules(folder: Path) -> list[str]:
    """The modules that are compiled in a copy."""
    made = (path.relative_to(folder) for path in (folder / "sim").rglob("*") if path.suffix in (".so", ".pyd"))
    return sorted(".".join((*path.parent.parts, path.name.split(".")[0])) for path in made)


def ratio(root: Path, policy: str) -> float:
    """Another call on W1 of 96 layers at 60 %, in bare SimPy timeouts per op, in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.simulate", "w1", "96", policy, "0.6"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return float(found["again_s"] / found["bare_s"])


if __name__ == "__main__":
    copy = compiled_copy(Path(sys.argv[1]))
    print(copy, *modules(copy), sep="\n")
    for policy in ONLINE if "--time" in sys.argv else ():
        interpreted, compiled = (min(ratio(root, policy) for _ in range(3)) for root in (ROOT, copy))
        print(f"{policy}: {interpreted:.1f} in Python, {compiled:.1f} as C")
