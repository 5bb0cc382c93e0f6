"""The imports of a Python file, read from its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple


class Import(NamedTuple):
    """One import.

    Attributes:
        module: its name in full; "?" for a computed name.
        name: the name that is taken from the module, or None.
        lazy: whether it is inside a function or for type checkers only.
    """

    module: str
    name: str | None
    lazy: bool

    @property
    def whole(self) -> str:
        """The module and the name that is taken from it, with a dot between them."""
        return f"{self.module}.{self.name}" if self.name else self.module


def imports_of(text: str, package: str) -> Iterator[Import]:
    """Yield each import of a file in this package; "" is that of a file at the top."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            yield from (Import(module, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            name = getattr(node.args[0], "value", None) if node.args else None
            # A relative name depends on a second argument: treat it as computed.
            known = isinstance(name, str) and not name.startswith(".")
            yield Import(str(name) if known else "?", None, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(text), False)


def called(call: ast.Call) -> str:
    """Return the name of the function that is called, without that of its module."""
    return ast.unparse(call.func).rpartition(".")[2]
