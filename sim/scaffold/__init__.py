"""Creates a new policy: a file that works, and a test that passes.

Each kind is a module of this package with a test next to it, which are linted, type-checked and run like any other; the
new files are their text under another name.
"""

from __future__ import annotations

import keyword
import os
import subprocess
import sys
from pathlib import Path

from sim.errors import PolicyError, near
from sim.policies import FAMILIES, names

KINDS = {"recompute": "recompute", "offload": "offload", "online": "offload"}
"""The kinds of policy to start from, and the family of each unless another is asked for."""

LAW = """

def test_it_keeps_the_law_of_all_policies() -> None:
    report = check_policy(load_policy(POLICY), name=POLICY)
    assert report.passed, report.as_text()
"""


def write_policy(
    name: str,
    folder: str | Path = ".",
    *,
    kind: str = "recompute",
    family: str | None = None,
    in_tree: bool = False,
) -> list[Path]:
    """Write a policy and its test. Returns the paths of the files written; existing files are left alone.

    name: of the policy, written like a Python module.
    folder: for NAME.py and test_NAME.py; with `in_tree` the root of a checkout.
    kind: one of `KINDS`.
    family: the folder that it belongs to in the tree, by default the kind's. An online policy of the family `recompute`
        drops what it evicts, any other moves it to the host.
    in_tree: write to the folders of the family, and regenerate the page of coverage.

    Raises PolicyError for a name that is invalid or taken, an unknown kind or family, or a folder without a checkout.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise PolicyError(
            f"{name!r} is not a name for a policy: write it like a Python module, for example 'my_policy'"
        )
    if kind not in KINDS:
        raise PolicyError(f"no kind of policy is called {kind!r}{near(kind, KINDS)}")
    family = KINDS[kind] if family is None else family
    if family not in FAMILIES:
        raise PolicyError(f"no family of policies is called {family!r}{near(family, FAMILIES)}")
    root, start = Path(folder), "online_recompute" if (kind, family) == ("online", "recompute") else kind
    policy, test = root / f"{name}.py", root / f"test_{name}.py"
    if name in names():
        raise PolicyError(
            f"a policy is called {name!r} already; nothing was written: expected another, such as 'my_{name}'"
        )
    if in_tree:
        if not all((root / path).exists() for path in ("sim/policies", "tests/policies", "docs/coverage.toml")):
            raise PolicyError(f"{root.resolve()} is not the root of a checkout of tiersim; nothing was written")
        policy = root / "sim" / "policies" / family / policy.name
        test = root / "tests" / "policies" / family / test.name
    for path in (policy, test):
        if path.exists():
            raise PolicyError(f"{path} already exists; nothing was written")
        path.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text(_renamed(f"{start}.py", start, name), encoding="utf-8")
    test.write_text(_test(start, name, in_tree), encoding="utf-8")
    return [policy, test, *([_covered(root, name)] if in_tree else ())]


def class_name(name: str) -> str:
    """The class of a policy, given the name of its file: `MyPolicy` for `my_policy`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _renamed(file: str, start: str, name: str) -> str:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    own = f"scaffold_{start}"
    return text.replace(own, name).replace(class_name(own), class_name(name))


def _test(start: str, name: str, in_tree: bool) -> str:
    text = _renamed(f"{start}_test.py", start, name)
    if in_tree:
        return text
    beside = f"POLICY = f\"{{Path(__file__).with_name('{name}.py')}}:{class_name(name)}\""
    text = text.replace(f'POLICY = "{name}"', beside).replace(
        "\nfrom sim import", "\nfrom pathlib import Path\n\nfrom sim import"
    )
    return text.replace("load_profile,", "check_policy, load_policy, load_profile,", 1) + LAW


def _covered(root: Path, name: str) -> Path:
    """Regenerate the page of coverage, which finds the policy: in the item that names it, else as one of its own."""
    ours = {**os.environ, "PYTHONPATH": str(root.resolve())}  # it lists the policies of this checkout
    script = [sys.executable, "scripts/make_coverage.py"]
    made = subprocess.run(script, cwd=root, env=ours, capture_output=True, text=True)
    if made.returncode:
        said = made.stdout.strip() or made.stderr.strip()
        raise PolicyError(
            f"{name!r} was written, but not its row in docs/coverage.md: scripts/make_coverage.py: {said}"
        )
    return root / "docs" / "coverage.md"
