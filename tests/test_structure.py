"""How modules hang together: no import circles, in the engine no object that others write, and no long function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOREIGN_WRITES = 10
LONGEST = 65
"""Lines of a function, without its signature and docstring."""


def module_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST, modules: set[str]) -> set[str]:
    """The modules that a file imports, inside functions and for types too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules


def import_graph(root: Path, package: str) -> dict[str, set[str]]:
    files = {module_of(path, root): path for path in sorted((root / package).rglob("*.py"))}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    return {name: imports(tree, set(files)) - {name} for name, tree in trees.items()}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which imports all others of its group, directly or through them."""
    reach = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    return {
        frozenset({other for other in reach[name] if name in reach[other]}) for name in graph if name in reach[name]
    }


def foreign_writes(tree: ast.AST) -> list[str]:
    """Statements that assign to an attribute, or to an item of one, of another object than `self`."""
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                while isinstance(each, ast.Subscript):
                    each = each.value
                if isinstance(each, ast.Attribute) and not (
                    isinstance(each.value, ast.Name) and each.value.id == "self"
                ):
                    found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def engine_files() -> list[Path]:
    return sorted((ROOT / "sim" / "engine").rglob("*.py"))


def test_modules_import_each_other_in_no_circle():
    found = circles(import_graph(ROOT, "sim")) | circles(import_graph(ROOT, "workloads"))
    assert not found, [sorted(circle) for circle in found]


def test_a_circle_through_a_function_or_a_type_is_seen(tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    (package / "a.py").write_text("from p import b\n")
    (package / "b.py").write_text("def f():\n    from p.c import x\n")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import y\n")
    (package / "d.py").write_text("import p.a\n")
    assert circles(import_graph(tmp_path, "p")) == {frozenset({"p.a", "p.b", "p.c"})}


def test_objects_of_the_engine_are_written_by_their_own_methods():
    writes = {
        path.relative_to(ROOT).as_posix(): found
        for path in engine_files()
        if (found := foreign_writes(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert sum(map(len, writes.values())) < FOREIGN_WRITES, writes


@pytest.mark.parametrize("text", ["a.b = 1", "a.b.c += 1", "a.b[2] = 1", "self.a.b = 1", "x, a.b = 1, 2", "del a.b[1]"])
def test_a_foreign_write_is_seen(text):
    assert foreign_writes(ast.parse(text))
    assert not foreign_writes(ast.parse("self.a = 1; self.b[1] += 1; c = 1; c[2] = 3"))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function below its signature and docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    return function.end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("package", ["sim", "workloads"])
def test_functions_fit_on_a_screen(package):
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {code_lines(node)} lines"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > LONGEST
    ]
    assert not long, "\n".join(long)


def test_the_lines_of_a_function_are_those_below_its_docstring():
    (function,) = ast.parse('def f(\n    a,\n):\n    """One.\n\n    Two.\n    """\n    b = a\n    return b\n').body
    assert code_lines(function) == 2
    (function,) = ast.parse('def f():\n    """One."""\n').body
    assert code_lines(function) == 0
