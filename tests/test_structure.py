"""How modules hang together: no import circles, in the engine no object that others write, and no long function."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOREIGN_WRITES = 10
DIRECT = "FastPath"
"""The class that works on the lists of other parts, for speed; its docstring says so."""
LONGEST = 65
"""Lines of a function, without its signature and docstring."""


LOADERS = ("import_module", "__import__")


def module_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements, those inside others included, but no expressions, which a walk would spend its time on."""
    for node in body:
        yield node
        for inside in ("body", "orelse", "handlers", "finalbody", "cases"):
            if nested := getattr(node, inside, ()):
                yield from statements(nested)


def imports(text: str, modules: set[str]) -> set[str]:
    """The modules that a file imports, inside functions, for types and by `import_module("…")` too."""
    found, tree = set(), ast.parse(text)
    calls = any(f"{name}(" in text for name in LOADERS)
    for node in ast.walk(tree) if calls else statements(tree.body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
        else:
            found |= loaded(node)
    return found & modules


def loaded(node: ast.AST) -> set[str]:
    """The module that a call of `import_module("…")` or `__import__("…")` names."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOADERS):
        return set()
    return {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}


def import_graph(root: Path, package: str) -> dict[str, set[str]]:
    files = {module_of(path, root): path for path in sorted((root / package).rglob("*.py"))}
    return {name: imports(path.read_text(encoding="utf-8"), set(files)) - {name} for name, path in files.items()}


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


def borrowed_writes(tree: ast.AST) -> list[str]:
    """Statements that change a list, set or dict of another object through a name of one's own for it.

    A class that keeps `other.field` as `self._field`, and writes `self._field[i]` or to a local name for it.
    """
    found = []
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name != DIRECT):
        functions = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
        borrowed = {
            ast.unparse(name)
            for function in functions
            for name, value in pairs(function)
            if isinstance(name, ast.Attribute)
            and ast.unparse(name.value) == "self"
            and isinstance(value, ast.Attribute)
            and not ast.unparse(value).startswith("self.")
        }
        for function in functions:
            local = {ast.unparse(name) for name, value in pairs(function) if ast.unparse(value) in borrowed}
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
                targets = [node.target] if isinstance(node, ast.AugAssign) else targets
                for target in targets:
                    whole = target.value if isinstance(target, ast.Subscript) else target
                    is_changed = isinstance(target, ast.Subscript) or isinstance(node, ast.AugAssign)
                    if is_changed and ast.unparse(whole) in borrowed | local:
                        found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def pairs(function: ast.FunctionDef) -> list[tuple[ast.AST, ast.AST]]:
    """(name, value) of each assignment, those to several names at once taken apart."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                found += zip(target.elts, value.elts, strict=True)
            else:
                found.append((target, value))
    return found


def engine_files() -> list[Path]:
    return sorted((ROOT / "sim" / "engine").rglob("*.py"))


def test_modules_import_each_other_in_no_circle():
    found = circles(import_graph(ROOT, "sim")) | circles(import_graph(ROOT, "workloads"))
    assert not found, [sorted(circle) for circle in found]


@pytest.mark.parametrize(
    "text",
    [
        "from p import b",
        "from importlib import import_module\nimport_module('p.b')",
        "import importlib\ndef f():\n    return importlib.import_module('p.b').x",
    ],
)
def test_a_circle_through_a_function_or_a_type_or_a_name_is_seen(text, tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    (package / "a.py").write_text(f"{text}\n")
    (package / "b.py").write_text("def f():\n    from p.c import x\n")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import y\n")
    (package / "d.py").write_text("import p.a\n")
    assert circles(import_graph(tmp_path, "p")) == {frozenset({"p.a", "p.b", "p.c"})}


def test_objects_of_the_engine_are_written_by_their_own_methods():
    writes = {
        path.relative_to(ROOT).as_posix(): found
        for path in engine_files()
        if (found := writes_to_others(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert sum(map(len, writes.values())) < FOREIGN_WRITES, writes


def writes_to_others(tree: ast.AST) -> list[str]:
    return foreign_writes(tree) + borrowed_writes(tree)


PART = """
class {}:
    def __init__(self, state):
        self._rows, self._own = state.record.rows, []
        self._size = state.size

    def act(self, i):
        rows, size = self._rows, self._size
        self._own[i] = size[i]
        {}
"""


@pytest.mark.parametrize(
    "text", ["self._rows[i] = 1", "del rows[i]", "rows[i] += 1", "self._rows += (1,)", "size[i] = 2"]
)
def test_a_write_through_a_name_of_ones_own_is_seen(text):
    assert len(writes_to_others(ast.parse(PART.format("Part", text)))) == 1
    assert not writes_to_others(ast.parse(PART.format("Part", "own = self._own; own[0] = rows[i]; i += 1")))
    assert not writes_to_others(ast.parse(PART.format(DIRECT, text)))


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
        for node in statements(ast.parse(path.read_text(encoding="utf-8")).body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > LONGEST
    ]
    assert not long, "\n".join(long)


def test_the_lines_of_a_function_are_those_below_its_docstring():
    (function,) = ast.parse('def f(\n    a,\n):\n    """One.\n\n    Two.\n    """\n    b = a\n    return b\n').body
    assert code_lines(function) == 2
    (function,) = ast.parse('def f():\n    """One."""\n').body
    assert code_lines(function) == 0
