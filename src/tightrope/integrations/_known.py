"""Sources of rotary functions with what they were found to compute, so that one call confirms it.

The table ``known.json`` holds the functions of installed libraries; ``python -m benchmarks.known`` makes it. What a
process recognises is added to it in memory. An entry only saves the search: its function is still called and
compared, and recognised from the beginning if it differs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from ._candidate import Candidate
from ._code import source_of

TABLE = Path(__file__).with_name("known.json")


def key_of(functions: Iterable[FunctionType], *others: Any) -> str | None:
    """A hash of the sources of a function and of those that it calls; None if one cannot be read.

    Comments, docstrings, annotations and the layout of the text do not count.

    Args:
        functions: the function first.
        others: what else decides what it computes, such as constant arguments.
    """
    first, *rest = [_normalised(each.__code__) for each in functions]
    if first is None or None in rest:
        return None
    text = repr((first, sorted(set(map(str, rest))), others))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def lookup(key: str | None) -> Candidate | None:
    """The candidate that a function with this key was found to compute, or None."""
    if key is None:
        return None
    known = _entries()
    if isinstance(held := known.get(key), dict):
        known[key] = Candidate.from_dict(held)
    return known.get(key)


def keep(key: str | None, candidate: Candidate) -> None:
    """Remember for this process what a function with this key computes."""
    if key is not None:
        _entries()[key] = candidate


@functools.lru_cache(maxsize=1)
def _entries() -> dict[str, Any]:
    held: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    return held


@functools.lru_cache(maxsize=4096)
def _normalised(code: CodeType) -> str | None:
    tree = source_of(code)
    return None if tree is None else ast.unparse(_Bare().visit(tree))


class _Bare(ast.NodeTransformer):
    """Remove docstrings, annotations and type comments."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node
