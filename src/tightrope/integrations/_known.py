"""Sources of rotary functions with what they were found to compute, so that one call confirms it.

The table ``known.json`` holds the functions of installed libraries; ``python -m benchmarks.known`` makes it. What a
process recognises is added to it in memory. An entry only saves the search: its function is still called and
compared, and recognised from the beginning if it differs. A function whose result may depend on more than its
source and its arguments has no entry.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ._candidate import Candidate
from ._code import content_of, global_names, source_of

TABLE = Path(__file__).with_name("known.json")


def key_of(functions: Iterable[FunctionType], *others: Any) -> str | None:
    """A hash of the sources of a function and of those that it calls.

    None if a source cannot be read, or if a function reads variables of an enclosing function, global values, or
    defaults that are not written out: the same source may then compute something else.

    Comments, docstrings, annotations and the layout of the text do not count.

    Args:
        functions: the function first.
        others: what else decides what it computes, such as constant arguments.
    """
    every = [*functions]
    first, *rest = [_normalised(each.__code__) for each in every]
    read: set[str] = set()
    for each in every:
        mine = _read(each, every)
        if first is None or None in rest or mine is None:
            return None
        read |= mine
    text = repr((first, sorted(set(map(str, rest))), sorted(read), others))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def lookup(key: str | None) -> Candidate | None:
    """The candidate that a function with this key was found to compute, or None."""
    if key is None:
        return None
    known = _entries()
    if isinstance(held := known.get(key), dict):
        known[key] = Candidate.from_dict(held)
    return known.get(key)


# Packages whose functions and classes compute the same in every process.
_FIXED = ("torch", "math", "builtins", "typing", "collections")


def _read(function: FunctionType, known: Sequence[FunctionType]) -> set[str] | None:
    """The values from outside that a function reads, besides known functions; None if they may differ by process."""
    found, names = set(), function.__globals__
    read = {name: names[name] for name in global_names(function.__code__) if name in names}
    read |= zip(function.__code__.co_freevars, map(content_of, function.__closure__ or ()))
    for name, value in read.items():
        if any(value is each for each in known):
            continue
        module = (
            value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        )
        if str(module).partition(".")[0] not in _FIXED:
            return None
        found.add(f"{name} = {module}.{getattr(value, '__qualname__', '')}")
    return found


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
    if tree is None:
        return None
    bare = _Bare()
    text = ast.unparse(bare.visit(tree))
    return text if bare.is_literal else None


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


class _Bare(ast.NodeTransformer):
    """Remove docstrings, annotations and type comments.

    Attributes:
        is_literal: whether all defaults of arguments are written out.
    """

    is_literal = True

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.returns = None
        defaults = [
            each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None
        ]
        self.is_literal &= all(map(_is_literal, defaults))
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node
