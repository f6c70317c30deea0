"""Which part may import which: the arrows of the README's picture, read from the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.test_structure import loaded

ROOT = Path(__file__).resolve().parent.parent
WORDS = {"sim.trace", "sim.hardware", "sim.units", "sim.errors", "sim.arguments"}
MAY_IMPORT = {
    "sim.errors": set(),
    "sim.arguments": {"sim.errors"},
    "sim.collecting": set(),
    "sim.foreign_text": set(),
    "sim.cache": set(),
    "sim.native": set(),
    "sim.toml_text": set(),
    "sim.units": {"sim.errors"},
    "sim.deprecation": {"sim.errors"},
    "sim.declared": {"sim.errors", "sim.units"},
    "sim.trace": {
        "sim.arguments",
        "sim.collecting",
        "sim.errors",
        "sim.foreign_text",
        "sim.regular_files",
        "sim.units",
    },
    "sim.hardware": WORDS | {"sim.toml_text"},
    "sim.log": {"sim.trace", "sim.hardware"},
    "sim.limits": {"sim.errors"},
    "sim.regular_files": {"sim.errors"},
    "sim.plan": WORDS | {"sim.limits", "sim.log"},
    "sim.rewrites": WORDS,
    "sim.solvers": WORDS | {"sim.plan"},
    "sim.eviction": WORDS | {"sim.declared", "sim.native", "sim.plan", "sim.log", "sim.solvers"},
    "sim.policies": WORDS
    | {"sim.declared", "sim.deprecation", "sim.plan", "sim.solvers", "sim.eviction", "sim.rewrites", "sim.log"}
    | {"sim.regular_files"},
    "sim.engine": WORDS | {"sim.collecting", "sim.plan", "sim.log", "simpy"},
    "sim.analysis": WORDS | {"sim.log"},
    "sim.report": WORDS | {"sim.analysis", "sim.foreign_text", "sim.log", "sim.regular_files"},
    "workloads": WORDS | {"sim.cache", "sim.collecting", "sim.regular_files", "sim.rewrites"},
    "hardware_profiles": set(),
}
"""What each part may import of the others; what is not named here (experiment, cli, …) ties parts together."""
EXCEPTIONS = {
    "sim/policies/__init__.py": {"sim.limits"},  # executes files, which may never end; policies know of no limit
    "sim/report/listings.py": {
        "sim.declared",
        "sim.policies",
        "workloads",
    },  # lists policies and models for the command line
    "sim/analysis/recorded_streams.py": {"sim.engine"},  # asks an allocator for what a log asked of another
    "workloads/stacks.py": {"sim.solvers"},  # what the compiled stack saves is what the partitioner of `min_cut` says
    "workloads/exporters/chakra.py": {"sim.log"},  # writes a run for other tools
}
LEAVES = {
    "simpy": {"sim.engine"},
    "sim.cli": {"sim.__main__"},
    "torch": {"sim.measure", "sim.applying"},
    "tests": set(),
}
"""What only these parts may import."""


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def part(module):
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "sim" else names[0]


@cache
def text_of(path):
    return path.read_text(encoding="utf-8")


@cache
def tree(path):
    return ast.parse(text_of(path))


@cache
def imported(path):
    return tuple(_imports(path))


def _imports(path):
    """(line, part) of each import of a file, those inside functions included."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    own = part(module)
    for node in ast.walk(tree(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or ""]
            if node.module == "sim":  # `from sim import trace` is an import of sim.trace
                names = [f"sim.{alias.name}" for alias in node.names]
        names += [name for name in loaded(node) if name.startswith("sim.")]  # torch is loaded so where it may be absent
        yield from ((node.lineno, part(name)) for name in names if part(name) != own)


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_part_imports_only_what_its_arrows_allow(name):
    wrong = []
    for path in sources("sim", "workloads", "hardware_profiles"):
        where = path.relative_to(ROOT).as_posix()
        if part(where.removesuffix(".py").replace("/", ".")) != name:
            continue
        allowed = MAY_IMPORT[name] | EXCEPTIONS.get(where, set())
        parts = {*MAY_IMPORT, *LEAVES, "sim"}
        wrong += [
            f"{where}:{line}: {to}"
            for line, to in imported(path)
            if to not in allowed and (to in parts or to.startswith("sim."))
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", LEAVES)
def test_only_these_parts_import_it(name):
    users = {
        part(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for path in sources("sim", "workloads", "hardware_profiles")
        if name in {to for _, to in imported(path)}
    }
    assert users <= LEAVES[name]


def test_the_rules_name_parts_that_exist():
    there = {part(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in sources("sim", "workloads")}
    assert set(MAY_IMPORT) - {"hardware_profiles"} <= there
    assert all((ROOT / path).is_file() for path in EXCEPTIONS)


def test_engine_and_policies_meet_in_the_plan_alone():
    for name, other in (("sim.engine", "sim.policies"), ("sim.policies", "sim.engine")):
        assert other not in MAY_IMPORT[name]
        assert not [path for path in sources(name.replace(".", "/")) if other in {to for _, to in imported(path)}]


def divides_nanoseconds(tree):
    """Whether something times 10**9, however that is written, is divided by whole numbers, as bytes are by a rate."""
    billions = {"10 ** 9", "1000000000"}
    named = {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, (ast.BinOp, ast.Constant))
        and ast.unparse(node.value) in billions
    }
    return any(
        ast.unparse(factor) in billions | named
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
        for product in ast.walk(node.left)
        if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult)
        for factor in (product.left, product.right)
    )


def test_the_time_of_a_transfer_has_one_home():
    """The law has its own, for it must not share what it checks."""
    found = {path.relative_to(ROOT).as_posix() for path in sources("sim") if divides_nanoseconds(tree(path))}
    assert {path for path in found if not path.startswith("sim/conformance/")} == {"sim/hardware/transfer_time.py"}


@pytest.mark.parametrize(
    "text",
    ["-(-b * 10**9 // r)", "1_000_000_000 * b // r", "fixed - (-b * 1000000000 // r)", "N = 10**9\n-(-b * N // r)"],
)
def test_a_second_home_of_the_time_of_a_transfer_is_seen(text):
    assert divides_nanoseconds(ast.parse(text))
    assert not divides_nanoseconds(ast.parse("b * 10**9 / r; 10**9 * b; b // 10**9; b * 10**8 // r"))


STATED = {
    *("sim/report/page/run.py", "sim/report/tracks.py"),  # show them
    *("sim/trace/columns.py", "sim/rewrites/encoding.py"),  # copy them
    "workloads/measured.py",  # matches them with measured ones
}
"""Who needs the layers that a trace states for its ops, not those that they have (`op_layers`)."""


def reads_layers_of_ops(tree):
    """Whether a function reads the column `layer` of `op_columns`, by that name or by one of its own for it."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        read = [node for node in ast.walk(function) if isinstance(node, (ast.Name, ast.Attribute))]
        columns = {found for node in read if (found := ast.unparse(node)).endswith("op_columns")}
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Assign)):
            target, value = node.targets[0], node.value
            whole = not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple))
            pairs = [(target, value)] if whole else zip(target.elts, value.elts, strict=True)
            columns |= {ast.unparse(name) for name, value in pairs if ast.unparse(value) in columns}
        if any(
            isinstance(node, ast.Attribute) and node.attr == "layer" and ast.unparse(node.value) in columns
            for node in ast.walk(function)
        ):
            return True
    return False


def test_which_layer_an_op_has_is_said_in_one_place():
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources("sim", "workloads")
        if ".layer" in text_of(path) and reads_layers_of_ops(tree(path))
    }
    assert found - STATED == {"sim/trace/layers.py"}


@pytest.mark.parametrize(
    "text",
    [
        "np.where(trace.op_columns.layer >= 0, trace.op_columns.layer, trace.tensor_columns.layer[t])",
        "c = trace.op_columns; layer = c.layer",
        "c, t = trace.op_columns, trace.tensor_columns; layer = [a if a >= 0 else b for a, b in zip(c.layer, t.layer)]",
    ],
)
def test_a_second_home_of_an_ops_layer_is_seen(text):
    assert reads_layers_of_ops(ast.parse(f"def f(trace, t):\n    {text}"))
    assert not reads_layers_of_ops(
        ast.parse("def f(trace):\n    c, o = trace.tensor_columns, trace.op_columns; c.layer")
    )


def served(root):
    """Per module of `sim.solvers` and `sim.eviction` what it serves: policies, as packages or files, and other parts.

    A policy is served by what it imports itself, and by what that imports in turn: a solver that only another solver
    imports serves those whom that one serves, and what a base of policies imports serves all of its policies. What
    another policy imports counts for that one alone.
    """
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((root / "sim").rglob("*.py"))
    }
    needs = {name: modules(path) & files.keys() for name, path in files.items()}

    def policy_of(name):
        return name.split(".")[3] if name.startswith("sim.policies.") and name.count(".") >= 3 else ""

    found = {name: set() for name in files if name.startswith(("sim.solvers.", "sim.eviction."))}
    for policy in sorted({policy_of(name) for name in files} - {""}):
        stack, seen = [name for name in files if policy_of(name) == policy], set()
        while stack:
            name = stack.pop()
            if name not in seen and policy_of(name) in ("", policy):
                seen.add(name)
                stack += needs[name]
        for name in seen & found.keys():
            found[name].add(policy)
    inside = ("sim.policies.", "sim.solvers.", "sim.eviction.")
    for name in files:
        for solver in needs[name] & found.keys() if not name.startswith(inside) else ():
            found[solver].add(name)
    return found


def test_solvers_serve_two_policies_or_more():
    """What one policy alone needs is in its package, unless another part of `sim` needs it, too."""
    lonely = {name: policies for name, policies in served(ROOT).items() if len(policies) < 2}
    assert not lonely


def test_what_serves_one_policy_alone_is_seen(tmp_path):
    files = {
        "sim/solvers/shared.py": "from sim.solvers.inner import x",
        "sim/solvers/inner.py": "",
        "sim/solvers/alone.py": "from sim.solvers.behind import x",
        "sim/solvers/behind.py": "",
        "sim/solvers/of_all.py": "",
        "sim/policies/based.py": "from sim.solvers.of_all import x",
        "sim/policies/hybrid/__init__.py": "",
        "sim/policies/hybrid/one.py": "from sim.solvers import shared\nfrom sim.policies.based import x",
        "sim/policies/hybrid/two/__init__.py": "from sim.policies.hybrid.two.part import x",
        "sim/policies/hybrid/two/part.py": "import sim.solvers.shared\nimport sim.solvers.alone",
        "sim/policies/offload/three.py": "import_module('sim.policies.hybrid.two')\nfrom sim.policies.based import x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert served(tmp_path) == {
        "sim.solvers.shared": {"one", "two"},
        "sim.solvers.inner": {"one", "two"},
        "sim.solvers.alone": {"two"},
        "sim.solvers.behind": {"two"},
        "sim.solvers.of_all": {"one", "three"},
    }


def modules(path):
    """Modules of sim that a file imports, those inside functions included."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            found |= loaded(node)
    return found
