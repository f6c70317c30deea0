"""The engine as C: a copy of the program whose event path mypyc has compiled.

python benchmarks/compiled.py FOLDER    make one, with the tests and benchmarks beside it; a minute or two
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

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


if __name__ == "__main__":
    print(compiled_copy(Path(sys.argv[1])))
