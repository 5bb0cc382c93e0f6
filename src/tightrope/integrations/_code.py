"""The names in the code of a Python function, and whether it may rotate in its body."""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

# Parts of the names of tables; a rotation has one in each of its two products.
_WORDS = "cos", "sin"


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those nested in it: comprehensions, lambdas, inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> frozenset[str]:
    """The globals that a code object and those nested in it read."""
    return frozenset(
        str(step.argval)
        for each in codes(code)
        for step in dis.get_instructions(each)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def content_of(cell: Any) -> Any:
    """The value of a variable of an enclosing function; None if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def all_names(code: CodeType) -> frozenset[str]:
    """The globals and attributes that a code object and those nested in it name."""
    return frozenset(name for each in codes(code) for name in each.co_names)


@lru_cache(maxsize=4096)
def every_name(code: CodeType) -> frozenset[str]:
    """All names in a code object and those nested in it: of variables, globals and attributes."""
    return _names(codes(code))


def _names(several: Iterable[CodeType]) -> frozenset[str]:
    return frozenset(
        name
        for each in several
        for name in (*each.co_names, *each.co_varnames, *each.co_freevars, *each.co_cellvars)
    )


def source_of(code: CodeType) -> ast.FunctionDef | None:
    """The syntax tree of a function's code; None if its source cannot be read."""
    with contextlib.suppress(OSError, SyntaxError, TypeError, tokenize.TokenError):
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        if tree.body and isinstance(tree.body[0], ast.FunctionDef):
            return tree.body[0]
    return None


def may_rotate_in_body(function: FunctionType, tables: bool = False) -> bool:
    """Return whether a body adds two products, one with cos and one with sin, or takes a complex product apart.

    Functions in the body that read nothing of it do not count: they are functions of their own.

    Args:
        function: a plain function.
        tables: whether any two products count if the body names neither, because its caller does.
    """
    return _may_rotate(function.__code__, tables)


@lru_cache(maxsize=4096)
def _may_rotate(code: CodeType, tables: bool) -> bool:
    own = [each for each in codes(code) if each is code or each.co_freevars]
    names = _names(own)
    named = all(any(word in name for name in names) for word in _WORDS)
    complex_ = "view_as_real" in names
    if not (named or tables or complex_) or not any(complex_ or _multiplies(c) for c in own):
        return False
    tree = source_of(code)
    others = {c.co_firstlineno for c in codes(code)} - {c.co_firstlineno for c in own}
    above = code.co_firstlineno - 1
    return tree is None or any(
        _is_rotation(each, named) for each in _walk(tree, {line - above for line in others})
    )


def _multiplies(code: CodeType) -> bool:
    """Return whether a code object multiplies, and adds or subtracts."""
    found = {step.argrepr for step in dis.get_instructions(code) if step.opname == "BINARY_OP"}
    found |= {_OLD.get(step.opname, "") for step in dis.get_instructions(code)}
    return bool(found & {"*", "*="}) and bool(found & {"+", "-", "+=", "-="})


# The instructions of Python 3.10, which has one for each operation.
_OLD = {
    f"{kind}_{name}": sign
    for kind in ("BINARY", "INPLACE")
    for name, sign in (("MULTIPLY", "*"), ("ADD", "+"), ("SUBTRACT", "-"))
}


def _walk(node: ast.AST, without: set[int]) -> Iterator[ast.AST]:
    """Yield a node and those in it, except functions in it that begin at some lines."""
    yield node
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.FunctionDef) or each.lineno not in without:
            yield from _walk(each, without)


def _is_rotation(node: ast.AST, named: bool) -> bool:
    if "view_as_real" in (getattr(node, "attr", None), getattr(node, "id", None)):
        return True
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub)):
        return False
    one, other = _words(node.left), _words(node.right)
    crossed = any(a in one and b in other for a, b in (_WORDS, _WORDS[::-1]))
    return _is_product(node.left) and _is_product(node.right) and (crossed or not named)


def _words(node: ast.AST) -> set[str]:
    """Those of _WORDS that are in names of a node."""
    names = [getattr(n, "id", None) or getattr(n, "attr", None) or "" for n in ast.walk(node)]
    return {word for word in _WORDS if any(word in name for name in names)}


def _is_product(node: ast.expr) -> bool:
    while isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
