"""Single-point mutations of a module, found in its syntax tree and made in its text."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "append": "appendleft", "sorted": "list"}
MESSAGES = {"out_of_memory", "_stuck", "absent", "_illegal", "_op", "_read", "reading", "waiting_transfers", "__repr__"}
"""Functions that word an error: not mutated, nor is what stands in a `raise` or an f-string."""


class Mutant(NamedTuple):
    """A replacement of `before`, which stands at `start` in the text of `file`, by `after`; in `scope`."""

    file: str
    scope: str
    line: int
    start: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """Says which mutation it is for as long as its line stays as it is, wherever it moves to."""
        return f"{self.file} {self.scope}: {self.source} [{self.before} -> {self.after}]"

    @property
    def rank(self) -> str:
        """A number drawn from the key, so that a sample stays the same where the code stays the same."""
        return sha256(self.key.encode()).hexdigest()

    def applied(self, text: str) -> str:
        """The text of the module with this one fault."""
        assert text[self.start : self.start + len(self.before)] == self.before
        return text[: self.start] + self.after + text[self.start + len(self.before) :]


def mutants(file: str, text: str) -> list[Mutant]:
    """All mutations of a module, in the order of the text."""
    finder = _Finder(file, text)
    finder.visit(ast.parse(text))
    seen: Counter[str] = Counter()
    found = []
    for mutant in sorted(finder.found, key=lambda m: (m.start, m.before, m.after)):
        seen[mutant.key] += 1
        again = seen[mutant.key]
        found.append(mutant if again == 1 else mutant._replace(source=f"{mutant.source} (place {again})"))
    return found


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.lines = text.splitlines(keepends=True)
        self.begins = [0]
        for line in self.lines:
            self.begins.append(self.begins[-1] + len(line))
        self.scope: list[str] = []
        self.found: list[Mutant] = []

    # ---- where ---------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Begin and end of a node in the text; columns of a syntax tree count bytes."""
        at = []
        for row, column in (
            (node.lineno, node.col_offset),  # type: ignore[attr-defined]
            (node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        ):
            at.append(self.begins[row - 1] + len(self.lines[row - 1].encode()[:column].decode()))
        return at[0], at[1]

    def add(self, start: int, end: int, after: str) -> None:
        line = self.text.count("\n", 0, start)
        source = " ".join(self.lines[line].split())
        self.found.append(Mutant(self.file, ".".join(self.scope), line + 1, start, self.text[start:end], after, source))

    def between(self, left: ast.AST, right: ast.AST, after: str, operator: str) -> None:
        """Replace the operator that stands between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.text[start:end].find(operator)
        if at >= 0:
            self.add(start + at, start + at + len(operator), after)

    def scoped(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        if node.name in MESSAGES:
            return
        self.scope.append(node.name)
        for child in node.body:
            self.visit(child)
        self.scope.pop()

    # ---- what ----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scoped(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scoped(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        return

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and self.scope:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self.scope or "__slots__" in ast.unparse(node.targets[0]):
            return
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript) and self.scope[-1] != "__init__":
            self.add(*self.span(node), "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        after = ARITHMETIC.get(type(node.op))
        operator = {v: k for k, v in {"-": "+", "+": "-", "&": "|", "|": "&"}.items()}.get(after or "")
        if after and operator:
            self.between(node.target, node.value, f"{after}=", f"{operator}=")
        self.add(*self.span(node), "pass")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call):
            self.add(*self.span(node), "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add(*self.span(node), "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(*self.span(node), "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(*self.span(node), "pass")

    def visit_If(self, node: ast.If) -> None:
        self.add(*self.span(node.test), "True")
        self.add(*self.span(node.test), "False")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.AST = node.left
        for operator, right in zip(node.ops, node.comparators):
            self.between(left, right, COMPARISONS[type(operator)], _sign(operator))
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        after = ARITHMETIC.get(type(node.op))
        if after:
            self.between(node.left, node.right, after, _sign(node.op))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self.between(left, right, after, before)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(self.span(node)[0], self.span(node.operand)[0], "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not self.scope:
            return
        if isinstance(node.value, bool):
            self.add(*self.span(node), str(not node.value))
        elif isinstance(node.value, int):
            self.add(*self.span(node), str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in ("min", "max", "any", "all"):
            self.add(*self.span(node.func), SWAPPED[name])
        self.generic_visit(node)


def _sign(operator: ast.AST) -> str:
    """How an operator is written."""
    written = (
        ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")]))
        if isinstance(operator, ast.cmpop)
        else ast.unparse(ast.BinOp(ast.Name("a"), operator, ast.Name("b")))
    )  # type: ignore[arg-type]
    return written[1:-1].strip()


def sampled(found: list[Mutant], count: int) -> Iterator[Mutant]:
    """`count` of the mutants, the same ones wherever the code is the same, in the order of the text."""
    least = {m.rank for m in sorted(found, key=lambda m: m.rank)[:count]}
    return (m for m in found if m.rank in least)
