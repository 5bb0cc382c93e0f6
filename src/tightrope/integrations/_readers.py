"""Follow the cosines and sines of a model's modules through its source, to the code that reads them.

Exact tables differ from those of the module, also in dtype, and only replaced functions are known to take them.
They are followed from the calls of the modules that make them, through variables, containers, views, arguments
and results. Code that computes with them, or gives them to something that cannot be followed, is a reader.

An attribute stands for what any module of a class holds under its name. Tables that go another way, through a hook, a
property, ``getattr`` or code outside the model, are not seen.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from ..forms import unwrapped
from ._classes import base_of
from ._find import INNER, PREFIX, is_foreign, layers, methods, original_of, processors
from ._inline import Accepts, codes, rewritten

# Methods of tensors, and functions of torch, whose results are tables again.
_VIEWS = frozenset(
    "bfloat16 broadcast_to cat chunk clone complex concat contiguous cpu cuda detach double dropout expand expand_as "
    "flatten float gather half index_select movedim narrow permute ravel repeat repeat_interleave reshape reshape_as select "
    "split squeeze stack t tensor_split to transpose type type_as unbind unflatten unsqueeze view view_as".split()
)
# Methods of containers, and builtins, that pass on what they are given.
_CONTAINERS = frozenset(
    "append copy dict enumerate extend get getattr items iter keys list next pop reversed setdefault tuple update "
    "values zip".split()
)
# Attributes, methods and builtins that tell the shape of a tensor, or what it is, but not its dtype.
_SHAPES = frozenset(
    "device dim hasattr id isinstance len ndim numel requires_grad shape size stride".split()
)
# Methods of other tensors that read only the shape of their argument.
_LIKES = frozenset("expand_as reshape_as view_as".split())
_LONGEST = 60

#: The targets of calls: classes of modules, functions, and functions in the body of the caller.
Callee = type | FunctionType | ast.FunctionDef


class Readers:
    """The functions of a model through which tables go.

    Attributes:
        found: name of a function -> the text of an expression that reads tables and is not replaced.
        seen: the makers of which a call was seen.
        unread: whether a function that gets tables has no source.
    """

    def __init__(
        self,
        classes: Iterable[type],
        members: Mapping[tuple[type, str], set[Callee]],
        makers: set[type],
        replaced: set[Any],
        accepts: Callable[[FunctionType], Accepts],
    ) -> None:
        """Follow the tables of all makers.

        Args:
            classes: the classes of modules and processors.
            members: see :func:`members_of`.
            makers: the classes whose forward makes tables.
            replaced: the functions that are replaced, and (module, name) of those in a body.
            accepts: for a function, the expressions in its body that are replaced.
        """
        self.members, self.makers, self.replaced = members, makers, replaced
        self.found: dict[str, str] = {}
        self.seen: set[type] = set()
        self.unread = False
        self.methods: dict[tuple[type, str], FunctionType] = {}
        # Method -> the classes that have it, except for static ones.
        self.owners: dict[FunctionType, set[type]] = {}
        for cls in set(classes) - makers:
            for _owner, name, value, function in methods(cls):
                self.methods[cls, name] = each = innermost(function)
                self.owners.setdefault(each, set())
                if not isinstance(value, staticmethod):
                    self.owners[each].add(cls)
        # function -> its parameters, and keys of its keyword arguments, that hold tables.
        self.given: dict[FunctionType, set[str]] = {}
        # The functions that return tables: whatever they are given, or if they are given tables.
        self.makes: set[FunctionType] = set()
        self.passes: set[FunctionType] = set()
        self.attributes: set[str] = set()
        self.keys: set[str] = set()
        self._accepts = accepts
        self._trees: dict[FunctionType, ast.FunctionDef | None] = {}
        before = None
        while before != (before := self._state()):
            making = makers.union(*(self.owners.get(each, ()) for each in self.makes))
            named = {name for (_, name), held in members.items() if held & making}
            named |= self.attributes | {each.__name__ for each in self.makes}
            for function in self.owners:
                if _names(function) & named and self._follow(function, set()):
                    self.makes.add(function)
            for function, given in list(self.given.items()):
                if self._follow(function, set(given)):
                    self.passes.add(function)

    def _state(self) -> list[int]:
        sizes = [len(self.makes), len(self.passes), len(self.attributes), len(self.keys)]
        return [*sizes, *(len(each) for each in self.given.values())]

    def _follow(self, function: FunctionType, given: set[str]) -> bool:
        """Follow tables through a function; return whether it returns some."""
        if function not in self._trees:
            self._trees[function] = rewritten(function, self._accepts(function))
        tree = self._trees[function]
        self.unread |= tree is None
        return tree is not None and _Body(self, function, tree, given).returns


def members_of(model: torch.nn.Module) -> dict[tuple[type, str], set[Callee]]:
    """(Class, name of an attribute) -> what it holds in a model: classes of modules and processors, functions.

    In place of anything else that can be called, it has ``object``.
    """
    found: dict[tuple[type, str], set[Callee]] = {}

    def add(owner: type, name: str, value: Any) -> None:
        found.setdefault((owner, name), set()).add(base_of(type(value)))
        if isinstance(value, _LISTS):
            for child in value.children():
                add(owner, name, child)

    for module in model.modules():
        owner = base_of(type(module))
        for name, value in (*module.named_children(), *processors(module)):
            add(owner, name, value)
        for name, value in vars(module).items():
            if callable(value) and not isinstance(value, type) and (owner, name) not in found:
                function = innermost(value)
                found[owner, name] = {function if isinstance(function, FunctionType) else object}
    return found


_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def innermost(function: Any) -> Any:
    """The function in a decorator's wrapper that takes any arguments; others themselves."""
    inner = inspect.unwrap(unwrapped(function))
    if not isinstance(inner, FunctionType) or inner is not function:
        return inner
    *_, last = layers(function)
    return last if function.__code__.co_flags & inspect.CO_VARARGS else function


def called(cls: type) -> Iterator[FunctionType]:
    """Yield the function that a call of a module or processor runs."""
    name = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    function = innermost(getattr(cls, name, None))
    if isinstance(function, FunctionType) and not is_foreign(function.__module__):
        yield function


def _names(function: FunctionType) -> set[str]:
    every = codes(function.__code__)
    return {name for code in every for name in (*code.co_names, *code.co_freevars)}


class _Body:
    """One pass over the body of a function, in the order of its statements.

    Attributes:
        returns: whether it returns tables.
    """

    def __init__(
        self, readers: Readers, function: FunctionType, tree: ast.FunctionDef, given: set[str]
    ) -> None:
        self._readers, self._function, self._given = readers, function, given
        self._tables = {*given}
        self._self = function.__code__.co_varnames[0] if readers.owners.get(function) else None
        # Name of a variable -> what it may be.
        self._aliases: dict[str, set[Callee]] = {}
        self.returns = False
        self._block(tree.body)

    def _block(self, statements: list[ast.stmt]) -> None:
        for each in statements:
            self._statement(each)
            twice = isinstance(each, (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef))
            before = {*self._tables}
            for name in ("body", "handlers", "cases", "orelse", "finalbody"):
                block = getattr(each, name, [])
                if name in ("handlers", "cases"):
                    block = [line for part in block for line in part.body]
                after = {*self._tables}
                if isinstance(each, ast.If):
                    self._tables = {*before}
                for _ in range(1 + twice):
                    self._block(block)
                self._tables |= after if block else set()

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self._aliases[node.name] = {node}
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            self._bind(
                node.target, ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
            )
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._bind(node.target, node.iter)
        elif isinstance(node, ast.Return):
            self.returns |= self._holds(node.value)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._holds(item.context_expr)
        elif not isinstance(node, (ast.ClassDef, ast.Raise, ast.Try)):
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.expr):
                    self._holds(each)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            if len(target.elts) == len(value.elts):
                for pair in zip(target.elts, value.elts):
                    self._bind(*pair)
                return
        self._hold(target, self._holds(value))
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and (may_be := self._callees(value)):
                self._aliases[each.id] = may_be

    def _hold(self, target: ast.expr, tables: bool) -> None:
        """Note whether a target of an assignment holds tables."""
        if isinstance(target, ast.Name):
            (self._tables.add if tables else self._tables.discard)(target.id)
        elif isinstance(target, ast.Subscript):
            if tables:
                self._hold(target.value, tables)
                self._key(target.slice)
        elif isinstance(target, ast.Attribute):
            self._readers.attributes |= {target.attr} if tables else set()
        else:
            for each in ast.iter_child_nodes(target):
                if isinstance(each, ast.expr):
                    self._hold(each, tables)

    def _key(self, node: ast.AST | None) -> None:
        if isinstance(node, ast.Constant):
            self._readers.keys.add(str(node.value))

    def _holds(self, node: ast.AST | None) -> bool:
        """Return whether an expression may hold tables; calls in it are followed."""
        if isinstance(node, ast.Name):
            return node.id in self._tables
        if isinstance(node, ast.Attribute):
            held = self._holds(node.value)
            if held and node.attr == "dtype":
                self._note(node)
            stored = node.attr in self._readers.attributes
            return (held or stored) and node.attr not in {*_SHAPES, "dtype"}
        if isinstance(node, ast.Subscript):
            self._holds(node.slice)
            key = isinstance(node.slice, ast.Constant) and node.slice.value in self._given
            return self._holds(node.value) or key
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BinOp):
            sides = node.left, node.right
            if not any([*map(self._holds, sides)]):
                return False
            if any(isinstance(each, (ast.Constant, ast.Tuple, ast.List)) for each in sides):
                return True  # by a number, or a longer tuple
            self._note(node)
            return False
        if isinstance(node, ast.NamedExpr):
            self._bind(node.target, node.value)
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            self.returns |= self._holds(node.value)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for part in node.generators:
                self._bind(part.target, part.iter)
            return self._holds(node.value if isinstance(node, ast.DictComp) else node.elt)
        if isinstance(node, ast.Dict):
            keys = [key for key, each in zip(node.keys, node.values) if self._holds(each)]
            for name in keys:
                self._key(name)
            return bool(keys)
        parts = [self._holds(each) for each in ast.iter_child_nodes(node)] if node else []
        return any(parts) and not isinstance(node, (ast.Compare, ast.JoinedStr))

    def _call(self, node: ast.Call) -> bool:
        func, args, readers = node.func, node.args, self._readers
        name = str(getattr(func, "attr", None) or getattr(func, "id", ""))
        given = [i for i, each in enumerate(args) if self._holds(each)]
        named = [each for each in node.keywords if self._holds(each.value)]
        if isinstance(func, ast.Attribute) and self._holds(func.value):
            if name not in _VIEWS | _CONTAINERS | _SHAPES:
                self._note(node)
            return name in _VIEWS | _CONTAINERS
        if name in ("get", "pop") and args and isinstance(args[0], ast.Constant):
            return args[0].value in self._given  # of its keyword arguments
        if name in _SHAPES or (name in _LIKES and isinstance(func, ast.Attribute)):
            return False
        may_be = self._callees(func)
        if not may_be and args:  # such as checkpoint(layer, x)
            may_be = self._callees(args[0])
            args, given = (args[1:], [i - 1 for i in given if i]) if may_be else (args, given)
        tables = False
        passed = bool(given or named) and not name.startswith(PREFIX)
        unknown = passed and not may_be
        for each in may_be:
            if each in readers.makers:
                readers.seen.add(each)
                tables = True
            elif isinstance(each, ast.FunctionDef):
                place = f"{self._function.__qualname__}{INNER}{each.name}"
                if (self._function.__module__, place) not in readers.replaced:
                    names = [parameter.arg for parameter in each.args.args]
                    held = {names[i] for i in given if i < len(names)} | {str(k.arg) for k in named}
                    if not held <= self._tables:
                        self._tables |= held
                        self._block(each.body)
            elif each not in readers.replaced and each not in _LISTS:
                functions = [*called(each)] if isinstance(each, type) else [each]
                for function in functions:
                    first = isinstance(each, type) or bool(readers.owners.get(function))
                    self._pass(function, int(first), args, given, node.keywords, named)
                    tables |= function in (readers.passes if passed else readers.makes)
                unknown |= passed and not functions
        if not unknown:
            return tables
        if name in _CONTAINERS or (name in _VIEWS and self._is_of_torch(func)):
            readers.keys |= {str(each.arg) for each in named if each.arg}
            return True
        of_self = getattr(getattr(func, "value", None), "id", "") == self._self
        owners = readers.owners.get(self._function, ()) if of_self else ()
        if may_be or not of_self or any(hasattr(cls, name) for cls in owners):
            self._note(node)  # else the attribute is None, or there is none
        return False

    def _pass(
        self,
        function: FunctionType,
        first: int,
        args: list[ast.expr],
        given: list[int],
        keywords: list[ast.keyword],
        named: list[ast.keyword],
    ) -> None:
        """Note the parameters of a function that get tables."""
        code = function.__code__
        positional = code.co_varnames[: code.co_argcount]
        held: set[str] = set()
        for i in given:
            end = None if isinstance(args[i], ast.Starred) else first + i + 1
            held.update(positional[first + i : end])
        for each in named:
            held |= {str(each.arg)} if each.arg else self._readers.keys
        if any(each.arg is None for each in keywords):  # what this function has no name for
            own = self._function.__code__
            held |= self._given - {*own.co_varnames[: own.co_argcount + own.co_kwonlyargcount]}
        if held:
            self._readers.given.setdefault(function, set()).update(held)

    def _callees(self, node: ast.AST | None) -> set[Callee]:
        """The classes and functions of which a call of an expression may run one."""
        if isinstance(node, ast.Name) and node.id in self._aliases:
            return self._aliases[node.id]
        if isinstance(node, ast.Attribute) and node.attr in ("forward", "__call__"):
            return self._callees(node.value)
        if isinstance(node, ast.Attribute) and not isinstance(self._global(node.value), ModuleType):
            return self._members(node)
        if isinstance(node, (ast.Name, ast.Attribute)):
            function = innermost(original_of(self._global(node)))
            own = isinstance(function, FunctionType) and not is_foreign(function.__module__)
            return {function} if own else set()
        if isinstance(node, ast.Subscript):
            return self._callees(node.value)
        if isinstance(node, ast.IfExp):
            return self._callees(node.body) | self._callees(node.orelse)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _CONTAINERS:
            return {each for arg in node.args for each in self._callees(arg)}
        return set()

    def _members(self, node: ast.Attribute) -> set[Callee]:
        """The values and methods of an attribute's name; those of all classes if its owner is unknown."""
        readers, name = self._readers, node.attr
        if getattr(node.value, "id", "") == self._self:
            owners: set[Any] = readers.owners.get(self._function, set())
        else:
            owners = self._callees(node.value) or {cls for cls, _ in readers.methods}
        held = {each for cls in owners for each in readers.members.get((cls, name), ())}
        return held.union(
            readers.methods[key] for cls in owners if (key := (cls, name)) in readers.methods
        )

    def _global(self, node: ast.AST) -> Any:
        """The value of a free variable, a global or an attribute of a global module; None if there is none."""
        if isinstance(node, ast.Attribute):
            owner = self._global(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        if not isinstance(node, ast.Name):
            return None
        names = inspect.getclosurevars(self._function)
        every = {**vars(builtins), **self._function.__globals__, **names.nonlocals}
        return every.get(node.id)

    def _is_of_torch(self, func: ast.expr) -> bool:
        value = self._global(func)
        return (getattr(value, "__module__", None) or "torch").partition(".")[0] == "torch"

    def _note(self, node: ast.AST) -> None:
        text = ast.unparse(node)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        self._readers.found.setdefault(self._function.__qualname__, text)
