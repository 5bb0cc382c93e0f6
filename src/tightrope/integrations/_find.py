"""Find the rotary functions that the methods of a class call, directly or through helpers."""

from __future__ import annotations

import ast
import dis
import functools
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ..forms import calls_of, signature, unwrapped
from ._candidate import same
from ._classes import base_of
from ._code import all_names, codes, every_name, global_names, may_rotate_in_body
from ._libraries import is_helper, is_model_code

#: Prefix of the names under which replacements are stored, next to the originals.
PREFIX = "_tightrope_"

# Between the name of a function and that of a function defined in its body, as in ``__qualname__``.
INNER = ".<locals>."

_NAME = re.compile(r"apply.*(rot|rope)")

#: Keyword arguments that a call passes as constants.
Constants = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Found:
    """A rotary function and where it is defined.

    Attributes:
        module, name: the Python module and the name in it: "Class.method" for a method,
            "Class.method.<locals>.function" for a function in its body.
        value: the object with that name: a function, a static method, or a module that wraps a
            function.
        likely: whether its name or parameters suggest a rotary function; others are tried too, but not
            reported if they are not recognised.
        constants: the keyword arguments that its callers pass as constants, one entry per combination.
        owner: for a method that takes self, the class that defines it.
        unseen: the reason why it cannot be tried, if it may rotate nevertheless.
    """

    module: str
    name: str
    value: Any
    likely: bool = True
    constants: tuple[Constants, ...] = ((),)
    owner: type | None = None
    unseen: str = ""


def passes_on(method: FunctionType) -> bool:
    """Return True if a method does anything with its object but read attributes."""
    code = method.__code__
    if not code.co_argcount or code.co_varnames[0] in code.co_cellvars:
        return True
    name = code.co_varnames[0]
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("EXTENDED_ARG", "CACHE")]
    for step, following in itertools.pairwise(steps):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if "LOAD_FAST" not in step.opname or name not in names:
            continue
        if name in names[:-1] or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return True
    return False


def layers(function: FunctionType) -> Iterator[FunctionType]:
    """Yield a function and the functions that its decorators hold in closures."""
    seen: set[int] = set()
    pending = [function]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for cell in each.__closure__ or ():
            try:
                inner = cell.cell_contents
            except ValueError:
                continue
            if isinstance(inner, FunctionType):
                pending.append(inner)


_Method = tuple[type, str, Any, FunctionType]


def methods(cls: type) -> Iterator[_Method]:
    """Yield (defining class, name, attribute, plain function) of each method, in MRO order.

    Methods of classes that hold no model code, such as those of torch and ``PreTrainedModel``, are left out.
    """
    seen: set[str] = set()
    for owner in cls.__mro__:
        if is_foreign(owner.__module__) or not is_model_code(owner.__module__):
            continue
        for name, value in vars(owner).items():
            function = unwrapped(value)
            if name not in seen and isinstance(function, FunctionType):
                seen.add(name)
                yield owner, name, value, function


def own_methods(function: FunctionType, cls: type | None) -> dict[str, Any]:
    """The methods of a class that a method of it names, and those that these name: name -> static attribute."""
    found: dict[str, Any] = {}
    pending = [function]
    while pending and cls is not None:
        for name in sorted(all_names(pending.pop().__code__) - found.keys()):
            value = inspect.getattr_static(cls, name, None)
            plain = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(plain, FunctionType) and not is_foreign(plain.__module__):
                found[name] = value
                pending.append(plain)
    return found


def looks_rotary(name: str, value: Any) -> bool:
    """Return True if the name or the parameters of a function suggest a rotary function."""
    if not _is_function(name, value):
        return False
    if _NAME.search(name):
        return True
    seen = signature(value)
    names = [] if seen is None else list(seen.parameters)
    tables = {n for n in names if "cos" in n or "sin" in n}
    return any("cos" in n for n in tables) and len(tables) > 1 and len(names) > len(tables)


def may_rotate(name: str, value: Any) -> bool:
    """Return True if a function could take tensors and tables, or positions, by its parameters' names."""
    return _is_function(name, value) and _takes_angles(value)


@lru_cache(maxsize=4096)
def _takes_angles(function: Any) -> bool:
    return any(call.form.takes_tables or call.makes_its_tables for call in calls_of(function))


def _is_function(name: str, value: Any) -> bool:
    return (
        not name.startswith(PREFIX)
        and not isinstance(value, type)
        and isinstance(unwrapped(value), FunctionType)
    )


def is_rotary_method(name: str, value: Any) -> bool:
    """Return True if the name of a member of a class suggests a rotary method."""
    return bool(_NAME.search(name)) and isinstance(unwrapped(value), FunctionType)


def neighbours(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the globals that a function reads and that can be model code."""
    names, held = function.__globals__, []
    for name in all_names(function.__code__) & names.keys():
        value = names[name]
        if isinstance(value, ModuleType):
            if not is_foreign(value.__name__):
                held.append(name)
        elif isinstance(value, torch.jit.ScriptFunction) or (
            callable(value) and not is_foreign(getattr(value, "__module__", ""))
        ):
            held.append(name)
    if held:  # among them may be names of attributes
        read = global_names(function.__code__)
        yield from ((name, names[name]) for name in sorted(held) if name in read)


_inner: dict[int, FunctionType] = {}


def inner_functions(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions in the body of a function that read no variable of it.

    Each is the same object at every call, without default values.
    """
    for code in codes(function.__code__):
        if code is function.__code__ or code.co_freevars or not code.co_name.isidentifier():
            continue
        if id(code) not in _inner:
            made = FunctionType(code, function.__globals__, code.co_name)
            made.__module__ = function.__module__
            made.__qualname__ = f"{function.__qualname__}{INNER}{code.co_name}"
            _inner[id(code)] = made
        yield _inner[id(code)]


def imported(function: FunctionType) -> Iterator[tuple[str, ModuleType, Any]]:
    """Yield (name, module, value) of what ``from module import name`` in a body imports.

    Only modules of the function's own package count.
    """
    for source, level, name in _imports(function.__code__):
        module = _imported_module(source, level, function.__globals__)
        if module is not None and name in vars(module):
            yield name, module, vars(module)[name]


_IMPORT = dis.opmap["IMPORT_NAME"]


@lru_cache(maxsize=4096)
def _imports(code: CodeType) -> tuple[tuple[str, object, str], ...]:
    """(Module, level, name) of each ``from module import name`` in a code object and those nested in it."""
    found: list[tuple[str, object, str]] = []
    for each in codes(code):
        if _IMPORT not in each.co_code[::2]:
            continue
        steps = [step for step in dis.get_instructions(each) if step.opname != "EXTENDED_ARG"]
        source: tuple[str, object] = "", 0
        for i, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                source = str(step.argval), steps[i - 2].argval if i > 1 else 0
            elif step.opname == "IMPORT_FROM":
                found.append((*source, str(step.argval)))
    return tuple(found)


def _imported_module(name: str, level: object, names: dict[str, Any]) -> ModuleType | None:
    """The module of an import in a body of a module with these names.

    None if it belongs to another package or is not imported yet: looking for functions must not run code.
    """
    dots = "." * level if isinstance(level, int) else ""
    try:
        full = importlib.util.resolve_name(dots + name, names.get("__package__") or "")
    except ImportError:
        return None
    same = full.partition(".")[0] == str(names.get("__name__")).partition(".")[0]
    return sys.modules.get(full) if same else None


def is_compiled(value: Any) -> bool:
    """Return True if torch.compile made a function or a module."""
    value = value.__func__ if isinstance(value, MethodType) else value
    # hasattr would import what a lazy module names.
    held = vars(value) if isinstance(value, (FunctionType, torch.nn.Module)) else {}
    # torch.compiler.disable leaves the same attribute.
    return "_torchdynamo_orig_callable" in held and not held.get("_torchdynamo_disable")


def is_near(value: Any, function: FunctionType) -> bool:
    """Return True if a helper is model code, so that it may be copied together with its caller."""
    if not isinstance(value, FunctionType) or is_compiled(value):
        return False
    near = value.__module__ == function.__module__
    return near or is_helper(value.__module__, function.__module__)


# In place of the value of an argument that is no constant.
_VARIABLE = object()


@lru_cache(maxsize=256)
def _calls_in(module: str) -> tuple[tuple[str, tuple[Any, ...], Constants], ...]:
    """(Name of the callee, positional arguments, keyword arguments) of each call in a module's source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, SyntaxError, TypeError):
        return ()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        callee = getattr(node.func, "id", getattr(node.func, "attr", None))
        if callee is not None:
            known = itertools.takewhile(lambda each: not isinstance(each, ast.Starred), node.args)
            named = [(k.arg, _value(k.value)) for k in node.keywords if k.arg is not None]
            found.append((callee, tuple(map(_value, known)), tuple(named)))
    return tuple(dict.fromkeys(found))


def _value(node: ast.expr) -> Any:
    """The value of a literal number, text, True, False or None; _VARIABLE for anything else."""
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if isinstance(node, ast.UnaryOp) and negative else node
    return ast.literal_eval(node) if isinstance(inner, ast.Constant) else _VARIABLE


def constants_of(name: str, value: Any, module: str) -> tuple[Constants, ...]:
    """The combinations of constants with which the code of a module calls a function.

    A flag that is passed as a variable counts with both values. Values equal to the default, and
    parameters with a role, such as the dimension at which tables are unsqueezed, do not count.
    """
    seen = signature(value)
    parameters = [] if seen is None else list(seen.parameters.values())
    roles = {each.name for call in calls_of(value) for each in call.arguments}
    optional = {
        p.name: p.default
        for p in parameters
        if isinstance(p.default, (bool, int, str)) and p.name not in roles
    }
    found: dict[Constants, None] = {}
    for callee, positional, named in _calls_in(module):
        if callee != name:
            continue
        given = dict(zip([p.name for p in parameters], positional)) | dict(named)
        several: list[list[Constants]] = []
        for key, default in optional.items():
            passed = [given.get(key, default)]
            if passed == [_VARIABLE]:
                passed = [False, True] if isinstance(default, bool) else [default]
            several.append([() if same(each, default) else ((key, each),) for each in passed])
        for each in itertools.product(*several):
            found[tuple(itertools.chain.from_iterable(each))] = None
    return tuple(found) or ((),)


def processors(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) of the attributes of a module that are plain objects with ``__call__``."""
    for name, value in vars(module).items():
        cls = type(value)
        if (
            "__call__" in {n for each in cls.__mro__[:-1] for n in vars(each)}
            and not isinstance(value, (torch.nn.Module, type, torch.Tensor))
            and cls.__module__.partition(".")[0] not in _FOREIGN
            and isinstance(cls.__call__, FunctionType)
        ):
            yield name, value


# Packages whose classes hold no model code.
_FOREIGN = ("torch", "builtins", "functools", "tightrope")


def rotary(cls: type, accepts: Callable[[Found], bool]) -> Iterator[Found]:
    """Yield the rotary functions that the methods of a class reach.

    Args:
        cls: a subclass of Module, or the class of a processor.
        accepts: returns True if a function is recognised. If not, the functions it calls are
            searched too.
    """
    yield from _searched(methods(cls), accepts)
    for owner, name, value, function in _called_by_super(cls):
        if any(accepts(each) for each in _searched([(owner, name, value, function)], accepts)):
            place = f"{owner.__qualname__}.{name}"
            yield Found(owner.__module__, place, value, unseen=SUPER)


def _called_by_super(cls: type) -> Iterator[_Method]:
    """Yield the methods of base classes that a method of a derived class may call by ``super()``."""
    above: list[FunctionType] = []
    for owner in cls.__mro__:
        mine = [each for each in methods(owner) if each[0] is owner]
        for each in mine:
            if any(each[1] in all_names(f.__code__) for f in above) and each[1] != "__init__":
                yield each
        functions = [layer for *_, function in mine for layer in layers(function)]
        above += [f for f in functions if "super" in global_names(f.__code__)]


def _searched(several: Iterable[_Method], accepts: Callable[[Found], bool]) -> Iterator[Found]:
    seen: set[int] = set()
    tried: set[int] = set()
    pending: list[FunctionType] = []
    for owner, name, value, function in several:
        if name == "__init__":  # the functions that it reads are stored, not called
            continue
        if is_rotary_method(name, value):
            found = Found(
                owner.__module__,
                f"{owner.__qualname__}.{name}",
                value,
                owner=None if isinstance(value, staticmethod) else owner,
            )
            tried.add(id(function))
            yield found
            if accepts(found):
                continue
        pending.append(function)
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for layer in layers(function):
            seen.add(id(layer))
            if id(layer) not in tried and may_rotate_in_body(layer):
                home, name = layer.__module__, layer.__qualname__
                yield Found(home, name, layer, unseen=BODY)
            yield from _unseen(layer)
            for name, value in _reached(layer):
                likely = looks_rotary(name, value)
                if likely or may_rotate(name, value):
                    constants = constants_of(name, value, layer.__module__)
                    if (key := hash((id(value), constants))) in seen:
                        continue
                    seen.add(key)
                    plain = unwrapped(value)
                    home = layer.__module__
                    if _inner.get(id(getattr(plain, "__code__", None))) is value:
                        name = plain.__qualname__
                    elif _has(plain.__module__, plain.__name__, value):
                        home, name = plain.__module__, plain.__name__
                    found = Found(home, name, value, likely=likely, constants=constants)
                    if likely and isinstance(plain, FunctionType):
                        tried |= {id(each) for each in layers(plain)}
                    yield found
                    left = not accepts(found) and not is_compiled(value)
                    if left and isinstance(plain, FunctionType):
                        pending.append(plain)
                elif id(value) not in seen and is_near(value, layer):
                    pending.append(value)


#: Reasons why functions that may rotate are neither tried nor replaced.
BODY = "it may rotate in its body, in a form that patch does not replace"
SUPER = (
    "it rotates, but a method of a derived class calls it by super(), which patch does not follow"
)
UNSEEN = "it may rotate, but patch replaces only Python functions of the model's code that are called by their name"
_TURNS = re.compile(r"rot(ary|ate)|rope", re.IGNORECASE)


def attributes(module: torch.nn.Module) -> Iterator[Found]:
    """Yield the functions that may rotate in the attributes of a module."""
    cls = base_of(type(module))
    for name, value in vars(module).items():
        if not isinstance(value, type) and _may_turn(name, value, False):
            yield Found(cls.__module__, f"{cls.__qualname__}.{name}", value, unseen=UNSEEN)


def _unseen(function: FunctionType) -> Iterator[Found]:
    """Yield what a function names and may rotate with, although patch does not look into it."""
    names = every_name(function.__code__)
    tables = all(any(word in name for name in names) for word in ("cos", "sin"))
    for name, value in neighbours(function):
        if isinstance(value, ModuleType) and not is_foreign(value.__name__):
            for each in sorted(names & vars(value).keys()):
                if _may_turn(each, vars(value)[each], tables):
                    yield Found(value.__name__, each, vars(value)[each], unseen=UNSEEN)
        elif not (is_near(value, function) or may_rotate(name, value) or looks_rotary(name, value)):
            if _may_turn(name, value, tables):
                yield Found(function.__module__, name, value, unseen=UNSEEN)


def _may_turn(name: str, value: Any, tables: bool) -> bool:
    """Return whether a value is called and may rotate; ``tables``: whether its caller names cos and sin."""
    if isinstance(value, functools.partial):
        return _may_turn(name, value.func, tables)
    if isinstance(value, torch.jit.ScriptFunction):
        return all(word in str(value.code) for word in ("torch.mul", "cos", "sin"))
    if isinstance(value, type):
        value = value.forward if issubclass(value, torch.autograd.Function) else None
    elif not isinstance(value, (torch.nn.Module, FunctionType, MethodType, BuiltinFunctionType)):
        value = vars(type(value)).get("__call__")
    function: Any = unwrapped(value)
    if isinstance(function, FunctionType):
        own = not is_foreign(function.__module__)
        return own and any(may_rotate_in_body(each, tables) for each in layers(function))
    return isinstance(function, BuiltinFunctionType) and bool(_TURNS.search(name))


def is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN


def _has(module: str, name: str, value: Any) -> bool:
    return getattr(sys.modules.get(module), name, None) is value


def _reached(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the globals, imports and inner functions of a function."""
    yield from neighbours(function)
    for name, _module, value in imported(function):
        yield name, value
    for inner in inner_functions(function):
        yield inner.__name__, inner
