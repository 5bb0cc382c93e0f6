"""Rotations that are written in the body of a function that does more than rotate.

An expression that could rotate becomes a function of x and its tables. The tensor x is a name in the
expression, or one that it is computed from. Of the lines before it, those that compute with x come along.
Parts that do not depend on x are tables, which the body still computes. If the function is recognised, the
body is compiled again with a call in place of the expression. Lines move only past lines that are known to
change nothing, and only if their results are not read elsewhere.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import copy
import inspect
import tokenize
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

#: Between the name of a function and the text of an expression in its body.
INLINE = ".<inline>."
#: The file of the code of functions that are made of expressions.
FILE = "<tightrope inline>"

#: Takes the text of a function of x and tables; returns the global to call in its place, or None.
Accepts = Callable[[str], str | None]

# Functions of torch and methods of tensors that change nothing and are no random numbers.
_TENSOR = frozenset(
    "add bfloat16 broadcast_to cat chunk clone complex concat concatenate contiguous cos dim double einsum "
    "expand expand_as flatten flip float half index_select movedim mul multiply narrow neg negative numel "
    "permute polar ravel repeat repeat_interleave reshape roll select sin size split squeeze stack sub "
    "subtract swapaxes t tensor_split to transpose type type_as unbind unflatten unsqueeze view view_as "
    "view_as_complex view_as_real".split()
)
_FUNCTIONS = frozenset(
    id(each)
    for each in (
        *(getattr(torch, name) for name in _TENSOR if hasattr(torch, name)),
        *(float, int, len, list, max, min, slice, tuple),
    )
)
# Methods that may return the tensor itself.
_CASTS = frozenset("bfloat16 contiguous double expand_as float half to type type_as".split())
# Methods that use the shape or dtype of another tensor.
_LIKES = frozenset(("expand_as", "reshape_as", "to", "type_as", "view_as"))
# What tensors tell about themselves without their values.
_SIZES = frozenset(("device", "dim", "dtype", "ndim", "numel", "shape", "size"))
_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_HARMLESS = (
    *(ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List),
    *(ast.UnaryOp, ast.BinOp, ast.Compare, ast.Starred, ast.keyword, ast.expr_context),
    *(ast.operator, ast.unaryop, ast.cmpop),
)
_LOOPS = ast.For, ast.AsyncFor, ast.While
_JUMPS = ast.Break, ast.Continue
_TRIES = ast.Try, getattr(ast, "TryStar", ast.Try)  # any line may be their last
_VALUES = ("value", "test", "exc", "msg", "iter", "subject")
_PARAMETERS = ("x", "freqs", "cos", "sin")
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag

_functions: dict[tuple[int, str], FunctionType] = {}


def function_of(names: dict[str, Any], text: str) -> FunctionType:
    """The function of x and tables with this text, in a module with these globals; always the same object."""
    key = id(names), text
    if key not in _functions:
        body = ast.parse(text).body
        *_, last = body
        if not isinstance(last, ast.Expr):
            raise KeyError(text)
        body[-1] = ast.Return(last.value)
        used = {name for line in body for name in _names(line)}
        given = ", ".join(name for name in _PARAMETERS if name in used)
        tree = ast.parse(f"def rotated({given}): pass")
        tree.body[0].body = body  # type: ignore[attr-defined]
        made = compile(ast.fix_missing_locations(tree), FILE, "exec", dont_inherit=True)
        code = next(each for each in made.co_consts if isinstance(each, CodeType))
        _functions.setdefault(key, FunctionType(code, names))
    return _functions[key]


def inlined(function: FunctionType, accepts: Accepts) -> CodeType | None:
    """The code of a function with calls in place of accepted expressions; None if there are none.

    Args:
        function: the function, without decorators.
        accepts: called for every expression that could rotate, of those that contain each other the
            largest first; expressions in an accepted one are not tried.
    """
    old = function.__code__
    scanned = _scanned(function, accepts)
    if scanned is None or not scanned[1].calls:
        return None
    node, scan = scanned
    _sweep(node, scan.used)
    code = _compiled(node, function)
    kept = [each for each in old.co_consts if isinstance(each, CodeType)]
    mine = [each for each in code.co_consts if isinstance(each, CodeType)]
    if code.co_freevars != old.co_freevars or not _all_same(kept, mine):
        return None
    # Functions in the body stay the same objects.
    inner = iter(kept)
    consts = tuple(next(inner) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=consts)


def _scanned(function: FunctionType, accepts: Accepts) -> tuple[ast.FunctionDef, _Scan] | None:
    """The syntax tree of a function with calls in place of accepted expressions, and what was replaced.

    None where no expression can be: the source is not that of the code, or nothing in it could rotate.
    """
    old = function.__code__
    source = _source(function) if _may_rotate(old) and id(old) not in _without else None
    if source is None:
        return None
    node = _parsed(source, old)
    scan = _Scan(function, accepts)
    scan.same = _same_tensors(node)
    scan.block(node.body, [])
    if not scan.calls and not scan.refused:
        _without[id(old)] = old
    return node, scan


def rewritten(function: FunctionType, accepts: Accepts) -> ast.FunctionDef | None:
    """The syntax tree of a function with calls in place of accepted expressions; None without a source."""
    if (scanned := _scanned(function, accepts)) is not None:
        return scanned[0]
    with contextlib.suppress(*_NO_SOURCE):
        return _parsed(inspect.getsource(function.__code__), function.__code__)
    return None


def could_rotate(
    function: FunctionType, accepts: Accepts = lambda _: None, tables: bool = False
) -> bool:
    """Return whether a body adds two products, one with cos and one with sin, or takes a complex product apart.

    Args:
        accepts: the expressions that do not count; see :func:`inlined`.
        tables: whether any two products count if the body names neither, because its caller does.
    """
    code = function.__code__
    # Functions in the body that read nothing of it are functions of their own.
    own = [each for each in codes(code) if each is code or each.co_freevars]
    names = {n for c in own for n in (*c.co_varnames, *c.co_names, *c.co_freevars, *c.co_cellvars)}
    named = all(any(word in name for name in names) for word in _WORDS)
    complex_ = "view_as_real" in names
    if not any(map(_may_rotate, own)) or not (named or tables or complex_):
        return False
    node = rewritten(function, accepts)
    others = {c.co_firstlineno for c in codes(code)} - {c.co_firstlineno for c in own}
    return node is None or any(_adds_products(each, named) for each in _walk(node, others))


# Parts of the names of tables; a rotation has one in each product.
_WORDS = "cos", "sin"


def _adds_products(node: ast.AST, named: bool) -> bool:
    """Return whether a node adds two products, with cosines and sines if they are named, or complex ones."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub)):
        return _takes_apart(node)
    one, other = ({*_words(each)} for each in (node.left, node.right))
    crossed = any(a in one and b in other for a, b in (_WORDS, _WORDS[::-1]))
    return _is_product(node.left) and _is_product(node.right) and (crossed or not named)


def _words(node: ast.AST) -> Iterator[str]:
    """Yield those of _WORDS that are in names of a node."""
    for each in ast.walk(node):
        name = getattr(each, "id", None) or getattr(each, "attr", None) or ""
        yield from (word for word in _WORDS if word in name)


def _walk(node: ast.AST, without: set[int]) -> Iterator[ast.AST]:
    """Yield a node and those in it, except functions in it that begin at some lines."""
    yield node
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.FunctionDef) or each.lineno not in without:
            yield from _walk(each, without)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those nested in it: comprehensions, lambdas, inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


# --- source and code ------------------------------------------------------------------------------


def _steps(code: CodeType) -> set[tuple[int, int]]:
    """The instructions of a code object: (operation, argument)."""
    return set(zip(code.co_code[::2], code.co_code[1::2]))


_OTHERS, _PRODUCTS, *_SUMS = (_steps(compile(f"a {each} b", "", "eval")) for each in "@*+-")


@lru_cache(maxsize=4096)
def _may_rotate(code: CodeType) -> bool:
    """Return whether a code object multiplies and adds, or multiplies complex numbers."""
    mine = _steps(code) - _OTHERS
    adds = "view_as_real" in code.co_names or any(mine & each for each in _SUMS)
    return bool(adds and mine & _PRODUCTS)


# Code without expressions that could rotate, by its id.
_without: dict[int, CodeType] = {}
_NO_SOURCE = (
    *(OSError, SyntaxError, TypeError, LookupError, StopIteration, ValueError),
    tokenize.TokenError,
)
_sources: dict[int, tuple[CodeType, str | None]] = {}


def _source(function: FunctionType) -> str | None:
    """The source of a function; None if there is none from which its code follows."""
    code = function.__code__
    if id(code) not in _sources:
        source: str | None = None
        with contextlib.suppress(*_NO_SOURCE):
            text = inspect.getsource(code)
            source = text if _same(_compiled(_parsed(text, code), function), code) else None
        _sources[id(code)] = code, source
    return _sources[id(code)][1]


def _parsed(source: str, code: CodeType) -> ast.FunctionDef:
    """The syntax tree of a function, with the lines and columns of its file."""
    indented = source[:1].isspace()
    tree = ast.parse("if 1:\n" + source if indented else source)
    node: Any = tree.body[0]
    node = node.body[0] if indented else node
    if not isinstance(node, ast.FunctionDef):
        raise ValueError("not a function")
    ast.increment_lineno(node, code.co_firstlineno - 1 - indented)
    return node


def _compiled(node: ast.FunctionDef, function: FunctionType) -> CodeType:
    """The code of a syntax tree in the place of a function."""
    code = function.__code__
    *around, _ = getattr(code, "co_qualname", function.__qualname__).split(".")
    free = ", ".join(name for name in code.co_freevars if name != "__class__")
    # Calls of what a module imports compile to other instructions.
    imports = [name for name in code.co_names if _is_imported(name, function.__globals__)]
    lines = [f"import {', '.join(imports)}"] if imports else []
    levels: list[str] = []
    for name, after in zip(around, [*around[1:], ""]):
        if name != "<locals>":
            head = f"def {name}({free})" if after == "<locals>" else f"class {name}"
            lines.append(f"{' ' * len(levels)}{head}:")
            levels.append(name)
    tree: Any = ast.parse("\n".join([*lines, " " * len(levels) + "pass"]))
    place = tree
    for _ in levels:
        place = place.body[-1]
    place.body[-1] = node
    flags = code.co_flags & _FUTURE
    made: CodeType = compile(
        ast.fix_missing_locations(tree), code.co_filename, "exec", flags, dont_inherit=True
    )
    for name in (*levels, code.co_name):
        made = next(c for c in made.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return made


def _is_imported(name: str, names: dict[str, Any]) -> bool:
    """Return whether a global of a module was probably imported."""
    value = names.get(name)
    defined = isinstance(value, (type, FunctionType)) and value.__module__ == names.get("__name__")
    return isinstance(value, (ModuleType, type, FunctionType)) and not defined


def _same(one: CodeType, other: CodeType) -> bool:
    """Return whether two code objects do the same, whatever their lines."""
    fields = [
        *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable"),
        *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_name", "co_flags"),
        *("co_qualname", "co_firstlineno"),
    ]
    return all(
        getattr(one, field, None) == getattr(other, field, None) for field in fields
    ) and _all_same(one.co_consts, other.co_consts)


def _all_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(
        _same(one, other)
        if isinstance(one, CodeType) and isinstance(other, CodeType)
        else type(one) is type(other) and repr(one) == repr(other)
        for one, other in zip(ones, others)
    )


# --- names in a syntax tree -----------------------------------------------------------------------


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _data(node: ast.AST, likes: bool = True) -> set[str]:
    """The names of whose values a node depends, not only of their shapes and dtypes.

    Args:
        likes: whether ``y`` in ``x.type_as(y)`` counts.
    """
    if isinstance(node, ast.Attribute) and node.attr in _SIZES:
        return set()
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    like = isinstance(node, ast.Call) and getattr(node.func, "attr", None) in _LIKES and not likes
    parts = [node.func] if isinstance(node, ast.Call) and like else ast.iter_child_nodes(node)
    return {name for part in parts for name in _data(part, likes)}


def _same_tensors(node: ast.AST) -> list[set[str]]:
    """Sets of names that may be one tensor, after any of the assignments in a node."""
    found: list[set[str]] = []
    for line in ast.walk(node):
        if not isinstance(line, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            continue
        for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
            pairs = [(target, line.value)]
            if isinstance(target, ast.Tuple) and isinstance(line.value, ast.Tuple):
                pairs = list(zip(target.elts, line.value.elts))
            for name, value in pairs:
                names = _may_be(name) | _may_be(value)
                for each in [each for each in found if each & names]:
                    names |= each
                    found.remove(each)
                found.append(names)
    return found


def _may_be(node: ast.expr | None) -> set[str]:
    """The names whose tensor an expression may return as it is."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.IfExp):
        return _may_be(node.body) | _may_be(node.orelse)
    if isinstance(node, ast.NamedExpr):
        return _may_be(node.target) | _may_be(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _may_be(node.func.value) if node.func.attr in _CASTS else set()
    return set()


def _targets(line: ast.stmt) -> set[str]:
    """The names that a line assigns; empty if it assigns anything else, or in another way."""
    if not isinstance(line, (ast.Assign, ast.AnnAssign)):
        return set()
    several = line.targets if isinstance(line, ast.Assign) else [line.target]
    parts = [p for t in several for p in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names if len(names) == len(parts) else set()


def _without_names(lines: list[ast.Assign], name: str) -> list[ast.Assign]:
    """The lines that neither read nor assign a name, nor one that may be made of it."""
    names, kept = {name}, []
    for line in lines:
        if _names(line) & names:
            names |= _targets(line)
        else:
            kept.append(line)
    return kept


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a statement."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, (ast.ExceptHandler, ast.match_case)):
                    yield from _blocks(each)


def _maybe(lines: list[ast.stmt]) -> ast.stmt:
    """A statement that may run these lines, or not."""
    return ast.If(ast.Constant(True), lines, [])


def _head(loop: ast.For | ast.AsyncFor | ast.While) -> ast.stmt:
    """A statement that reads and assigns what a loop does before each iteration but the first."""
    if isinstance(loop, ast.While):
        return ast.Expr(loop.test)
    return ast.Assign([loop.target], ast.Constant(None))


def _reads(node: ast.AST) -> list[str]:
    """The names that a node reads or deletes, each as often as it does."""
    found = [
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Store)
    ]
    changed = [each.target for each in ast.walk(node) if isinstance(each, ast.AugAssign)]
    return found + [name for each in changed for name in _names(each)]


def _sweep(node: ast.FunctionDef, lines: list[ast.stmt]) -> None:
    """Remove those of the given lines whose names are not read."""
    if _names(node) & {"locals", "vars", "eval", "exec", "dir"}:
        return
    dead = lines
    while dead:
        read = {*_reads(node)}
        dead = [line for line in lines if not _targets(line) & read]
        for each in ast.walk(node):
            for block in _blocks(each):
                block[:] = [line for line in block if line not in dead] or [ast.Pass()]
        lines = [line for line in lines if line not in dead]


def _is_product(node: ast.expr) -> bool:
    while isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _could_rotate(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node adds two products with these names, or takes a complex product apart."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        sides = node.left, node.right
        return all(_is_product(each) and bool(_data(each) & names) for each in sides)
    return _takes_apart(node)


def _takes_apart(node: ast.AST) -> bool:
    named = isinstance(node, ast.Attribute) and node.attr == "view_as_real"
    return named or (isinstance(node, ast.Name) and node.id == "view_as_real")


# --- expressions that could rotate ----------------------------------------------------------------


class _Scan(ast.NodeTransformer):
    """Replace the accepted expressions in the body of a function.

    Attributes:
        calls: the number of expressions replaced.
        refused: the texts that were not accepted.
        used: the lines that came along with them.
        same: sets of names that may be one tensor.
    """

    def __init__(
        self, function: FunctionType, accepts: Accepts, above: tuple[CodeType, ...] = ()
    ) -> None:
        code = function.__code__
        self._above = (*above, code)
        self._accepts, self._globals = accepts, function.__globals__
        self._locals = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self._own = set(code.co_varnames) - set(code.co_cellvars)
        self._lines: list[ast.Assign] = []
        self._statement: ast.stmt = ast.Pass()
        self._rest: list[ast.stmt] = []
        self.same: list[set[str]] = []
        self._harms = 0  # of the current statement, except in the nodes around the current one
        self.refused: set[str] = set()
        self.calls = 0
        self.used: list[ast.stmt] = []

    def block(
        self, statements: list[ast.stmt], lines: list[ast.Assign], after: Sequence[ast.stmt] = ()
    ) -> None:
        """Replace expressions in a block.

        Args:
            lines: the assignments before it that may be repeated now: nothing has changed what they read.
            after: the statements that follow it.
        """
        ends = isinstance(statements[-1], (ast.Return, ast.Raise))
        for i, each in enumerate(statements, 1):
            rest = [*statements[i:], *(() if ends else after)]
            if any(isinstance(n, _JUMPS) for line in statements[i:] for n in ast.walk(line)):
                rest = [_maybe(rest)]
            beyond = rest
            if isinstance(each, _LOOPS):
                rest = [_maybe([*each.orelse, *rest]), _head(each), *each.body]
            if isinstance(each, (*_SCOPES, *_TRIES)):
                lines.clear()
                continue
            branches = isinstance(each, ast.If)
            inner = list(_blocks(each))
            values = [v for name in _VALUES if isinstance(v := getattr(each, name, None), ast.expr)]
            harmless = self._is_harmless(*values)
            calls = self.calls
            for name in _VALUES:
                if isinstance(value := getattr(each, name, None), ast.expr):
                    self._lines = lines if branches or not inner else []
                    self._statement, self._rest = each, rest
                    self._harms = sum(self._harms_in(value) for value in values)
                    setattr(each, name, self.visit(value))
            for block in inner:
                follows = beyond if block is getattr(each, "orelse", None) else rest
                self.block(block, list(lines) if branches and harmless else [], follows)
            if not harmless or inner:
                lines.clear()
            elif changed := self._changed_list(each, lines):
                lines[:] = _without_names(lines, changed)
            elif targets := _targets(each):
                lines[:] = [line for line in lines if not targets & _names(line)]
                moves = isinstance(each, ast.Assign) and len(each.targets) == 1
                moves = moves and targets <= self._own and not targets & _names(values[0])
                if isinstance(each, ast.Assign) and moves and calls == self.calls:
                    lines.append(each)
            elif not isinstance(each, (ast.Return, ast.Expr, ast.Assert, ast.Raise, ast.Pass)):
                lines.clear()

    def _changed_list(self, line: ast.stmt, lines: list[ast.Assign]) -> str | None:
        """The name of the list whose entry a line assigns, if these lines made it; else None."""
        if not isinstance(line, ast.Assign) or len(line.targets) != 1:
            return None
        target = line.targets[0]
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return None
        name = target.value.id
        made = any(_targets(each) == {name} and isinstance(each.value, ast.List) for each in lines)
        return name if made and self._is_harmless(target.slice) else None

    def changes_nothing(self, statements: list[ast.stmt]) -> bool:
        """Return whether no line of a block changes anything but the names of this function."""
        for each in statements:
            plain = (ast.Return, ast.Expr, ast.Pass, ast.If)
            if not isinstance(each, plain) and not _targets(each):
                return False
            values = [v for name in _VALUES if isinstance(v := getattr(each, name, None), ast.expr)]
            if not self._is_harmless(*values) or not all(map(self.changes_nothing, _blocks(each))):
                return False
        return True

    def visit(self, node: ast.AST) -> Any:
        """Replace an expression, or else those in it."""
        if isinstance(node, _SCOPES):
            return node
        if isinstance(node, (ast.BinOp, ast.Call)) and self._is_harmless(node):
            new = self._replaced(node)
            if new is not None:
                self.calls += 1
                return ast.copy_location(new, node)
        harm = int(self._harms_by(node))
        self._harms -= harm
        self.generic_visit(node)
        self._harms += harm
        return node

    # What changes nothing.

    def _is_harmless(self, *nodes: ast.AST) -> bool:
        return not any(map(self._harms_in, nodes))

    def _harms_in(self, node: ast.AST) -> int:
        """The number of nodes that could change something, or cannot be moved."""
        return sum(map(self._harms_by, ast.walk(node)))

    def _harms_by(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return not isinstance(node, _HARMLESS)
        if any(each.arg in (None, "out") for each in node.keywords):
            return True
        if isinstance(node.func, ast.Attribute) and not self._is_module(node.func.value):
            return node.func.attr not in _TENSOR
        value = self._global(node.func)
        if id(value) in _FUNCTIONS:
            return False
        return not isinstance(value, FunctionType) or not _changes_nothing(value, self._above)

    def _is_module(self, node: ast.expr) -> bool:
        return isinstance(self._global(node), ModuleType)

    def _global(self, node: ast.expr) -> Any:
        """The value of a global name or of an attribute of a global module; None if there is none."""
        if isinstance(node, ast.Name) and node.id not in self._locals:
            return self._globals.get(node.id, vars(builtins).get(node.id))
        if isinstance(node, ast.Attribute) and self._is_module(node.value):
            return getattr(self._global(node.value), node.attr, None)
        return None

    # Functions of x and tables.

    def _replaced(self, root: ast.expr) -> ast.Call | None:
        """The call in place of an expression; None if it is not accepted."""
        lines = [] if self._harms else list(self._lines)
        made = {name: line for line in lines for name in _targets(line)}
        names = sorted(_data(root) & self._locals)
        for name in names:  # grows: those in the expression first, then those that they are made of
            if name in made:
                names += sorted((_data(made[name].value) & self._locals) - set(names))
        for x in names:
            kept = self._with(root, x, lines, made)
            turning = {x, *(n for n in made if made[n] in kept and x in self._reach(n, made))}
            every = [node for each in (*kept, root) for node in ast.walk(each)]
            if not any(_could_rotate(node, turning) for node in every):
                continue
            if self._is_read_again(root, turning):
                continue
            for whole in (True, False):
                close = _Close(x, turning, kept, self._locals, whole)
                text, arguments = close.text(kept, root)
                if not text or text in self.refused:
                    continue
                alias = self._accepts(text)
                if alias is not None:
                    self.used += kept
                    return ast.Call(ast.Name(alias, ast.Load()), arguments, [])
                self.refused.add(text)
        return None

    def _is_read_again(self, root: ast.expr, names: set[str]) -> bool:
        """Return whether one of these names is read beside an expression, or later.

        The gradients of both uses would be added in another order, and have other bits. Functions in
        the body may read what they capture at any time.
        """
        if not names <= self._own:
            return True
        counts = [_reads(node).count(name) for name in names for node in (self._statement, root)]
        if counts[::2] != counts[1::2]:
            return True
        others = {name for each in self.same if each & names for name in each - names}
        if others & _data(self._statement, likes=False):
            return True
        left = names - _targets(self._statement)
        others -= _targets(self._statement)
        for line in self._rest:
            if left & {*_reads(line)} or others & _data(line, likes=False):
                return True
            left -= _targets(line)
            others -= _targets(line)
        return False

    def _reach(self, name: str, made: dict[str, ast.Assign]) -> set[str]:
        """The local names of whose values a name is made, itself included; empty for sizes."""
        if name not in made:
            return {name}
        parts = _data(made[name].value) & self._locals
        found = {each for part in parts for each in self._reach(part, made)}
        return {name, *found} if found else found

    def _with(
        self, root: ast.expr, x: str, lines: list[ast.Assign], made: dict[str, ast.Assign]
    ) -> list[ast.Assign]:
        """The lines that an expression in x needs: those that compute with x, or only with sizes."""
        wanted = _names(root)
        kept: list[ast.Assign] = []
        for line in reversed(lines):
            names = _targets(line) & wanted
            reached = [self._reach(name, made) for name in names]
            if x not in _targets(line) and any(x in each or not each for each in reached):
                kept.insert(0, line)
                wanted |= _names(line.value)
        return kept


class _Close(ast.NodeTransformer):
    """Make an expression in x and its lines a function: rename them, and replace tables by parameters.

    Args:
        x: the name that becomes x.
        turning: the names of whose values x is a part, itself included.
        lines: the lines.
        local: the names of the body that are not global.
        whole: whether tables are the largest expressions without x; else names and attributes.
    """

    def __init__(
        self, x: str, turning: set[str], lines: list[ast.Assign], local: set[str], whole: bool
    ) -> None:
        targets = [n for line in lines for n in ast.walk(line.targets[0])]
        inner = dict.fromkeys(n.id for n in targets if isinstance(n, ast.Name))
        self._new = {x: "x"} | {name: f"t{i}" for i, name in enumerate(inner, 1)}
        self._x, self._turning, self._whole = x, turning, whole
        self._local, self._values = local, local - (inner.keys() - turning)
        # The text of each table -> its expression, and the name in its place.
        self._tables: dict[str, tuple[ast.expr, ast.Name]] = {}
        self._globals: set[str] = set()

    def text(self, lines: list[ast.Assign], root: ast.expr) -> tuple[str, list[ast.expr]]:
        """The text of the function, and the arguments to call it with; no text if they do not fit."""
        last = ast.Expr(self.visit(copy.deepcopy(root)))
        body: list[ast.stmt] = [last]
        for line in reversed(lines):
            if {self._new[name] for name in _targets(line)} & {n for b in body for n in _names(b)}:
                body.insert(0, self.visit(copy.deepcopy(line)))
        texts = sorted(
            self._tables, key=lambda text: ("cos" in text) - ("sin" in text), reverse=True
        )
        roles = {1: ("freqs",), 2: ("cos", "sin")}.get(len(texts), ())
        if not roles or self._globals & {*_PARAMETERS, *self._new.values()}:
            return "", []
        for name, text in zip(roles, texts):
            self._tables[text][1].id = name
        tables = [self._tables[each][0] for each in texts]
        return "; ".join(map(ast.unparse, body)), [ast.Name(self._x, ast.Load()), *tables]

    def visit(self, node: ast.AST) -> Any:
        """Rename, replace, or continue inside."""
        names = _names(node)
        if not names & self._local:
            self._globals |= names
            return node
        if isinstance(node, ast.Name) and node.id in self._new:
            return ast.copy_location(ast.Name(self._new[node.id], node.ctx), node)
        chain: ast.AST = node
        while isinstance(chain, ast.Attribute):
            chain = chain.value
        fits = isinstance(node, ast.expr) and not isinstance(
            node, (ast.Tuple, ast.List, ast.Slice, ast.Starred)
        )
        fits = fits and (self._whole or isinstance(chain, ast.Name))
        data = _data(node) & self._values
        if fits and data and not data & self._turning:
            table = node, ast.Name("", ast.Load())
            return self._tables.setdefault(ast.unparse(node), table)[1]  # type: ignore[arg-type]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)  # not a table, but its method
            node.args = list(map(self.visit, node.args))
            node.keywords = list(map(self.visit, node.keywords))
            return node
        return self.generic_visit(node)


_changing: dict[int, tuple[CodeType, bool]] = {}


def _changes_nothing(function: FunctionType, above: tuple[CodeType, ...]) -> bool:
    """Return whether each line of a function is known to change nothing.

    Args:
        above: the code that calls it; functions that call each other are not known.
    """
    code = function.__code__
    if id(code) not in _changing:
        source = None if code in above else _source(function)
        scan = _Scan(function, lambda _: None, above)
        known = source is not None and scan.changes_nothing(_parsed(source, code).body)
        _changing[id(code)] = code, known
    return _changing[id(code)][1]
