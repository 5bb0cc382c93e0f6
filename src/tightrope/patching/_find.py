"""Find the rotary functions that the code of a model's classes names, and put others in their places."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

# Packages whose classes hold no code of models.
_FOREIGN = ("torch", "builtins", "typing", "abc", "collections", "tightrope")
# The file of diffusers whose functions others import in the bodies of methods.
_SHARED = "diffusers.models.embeddings"
_NAME = re.compile(r"rot|rope", re.IGNORECASE)
# Names of functions that rotate, and lines that do: these are listed if they are of no kind.
_ROTATES = re.compile(
    r"apply(?!.*mrope).*(rot|rope)|rope_apply|rotate_(queries|axis)", re.IGNORECASE
)
_LINE = re.compile(r"\* ?\w*cos\w*\b.*[-+].*\* ?\w*sin\w*\b|\* ?\w*sin\w*\b.*[-+].*\* ?\w*cos\w*\b")


class Member(NamedTuple):
    """A function where code finds it.

    Attributes:
        owner: the module or class that holds it under a name; the function in whose body it is defined, in which case
            the value is its code.
        value: what is there.
    """

    owner: Any
    name: str
    value: Any

    def function(self) -> Any:
        """The plain function."""
        if isinstance(self.value, CodeType):
            return FunctionType(self.value, self.owner.__globals__, self.name)
        if isinstance(self.value, torch.nn.Module):  # what the kernels package makes of a function
            return self.value.forward
        return getattr(self.value, "__func__", self.value)

    def key(self) -> Any:
        """The object that its kind is stored for: the same one in each file that imports a function."""
        return getattr(self.value, "__func__", self.value)

    def takes_self(self) -> bool:
        """Return whether it is a method that takes self first."""
        return isinstance(self.owner, type) and isinstance(self.value, FunctionType)

    def place(self) -> tuple[str, str]:
        """The name of its module, and its name there."""
        if inspect.ismodule(self.owner):
            return self.owner.__name__, self.name
        inner = ".<locals>" if isinstance(self.owner, FunctionType) else ""
        return self.owner.__module__, f"{self.owner.__qualname__}{inner}.{self.name}"

    def rotates(self) -> bool:
        """Return whether its name says that it rotates."""
        return bool(_ROTATES.search(self.name))

    def now(self) -> Any:
        """The function or code in its place now; None if there is none."""
        if isinstance(self.owner, FunctionType):
            return inner_functions(self.owner).get(self.name)
        return vars(self.owner).get(self.name)

    def put(self, value: Any) -> None:
        """Put a function or code in its place; None removes what is there."""
        if isinstance(self.owner, FunctionType):
            before, code = self.now(), self.owner.__code__
            consts = tuple(value if each is before else each for each in code.co_consts)
            self.owner.__code__ = code.replace(co_consts=consts)
        elif value is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)

    def like(self, function: Any) -> Any:
        """A function in the form that its place takes."""
        if isinstance(self.value, staticmethod):
            return staticmethod(function)
        if not isinstance(self.value, CodeType):
            return function
        code, key = self.value, f"_tightrope_{id(self.value)}"
        names, space = ", ".join(code.co_varnames[: code.co_argcount]), dict[str, Any]()
        exec(f"def {self.name}({names}):\n    return {key}({names})", space)
        self.owner.__globals__[key] = function
        return space[self.name].__code__.replace(co_filename=code.co_filename)


def inner_functions(function: FunctionType) -> dict[str, CodeType]:
    """The code of functions in the body of another that read no variables of it, by name."""
    codes = [each for each in function.__code__.co_consts if isinstance(each, CodeType)]
    return {
        code.co_name: code for code in codes if not code.co_freevars and _NAME.search(code.co_name)
    }


def classes_of(model: torch.nn.Module) -> list[type]:
    """The classes of a model's modules, and of objects in them that are called, with their bases."""
    found = dict[type, None]()
    for module in model.modules():
        called = [each for each in vars(module).values() if callable(each)]
        found |= dict.fromkeys(cls for each in (module, *called) for cls in type(each).__mro__)
    return [cls for cls in found if cls.__module__.partition(".")[0] not in _FOREIGN]


def members_of(model: torch.nn.Module) -> list[Member]:
    """The functions named by code of a model's classes that may be rotary functions, by their names."""
    classes = classes_of(model)
    homes = dict.fromkeys(cls.__module__ for cls in classes)
    if any(home.startswith("diffusers.") for home in homes):
        homes[_SHARED] = None
    modules = [sys.modules[name] for name in homes if name in sys.modules]
    names, found = _names(classes, modules), []
    for owner in (*modules, *classes):
        for name, value in list(vars(owner).items()):
            plain = getattr(value, "__func__", value)
            if (
                name in names
                and _NAME.search(name)
                and isinstance(plain, (FunctionType, torch.nn.Module))
            ):
                found.append(Member(owner, name, value))
            elif isinstance(owner, type) and isinstance(plain, FunctionType):
                found += [
                    Member(plain, inner, code) for inner, code in inner_functions(plain).items()
                ]
    return found


def member_of(function: Any) -> Member | None:
    """A function under its own name; None if it is not there."""
    try:
        outer, _, name = function.__qualname__.rpartition(".")
        owner: Any = sys.modules[function.__module__]
        owner = operator.attrgetter(outer)(owner) if outer else owner
        member = Member(owner, name, vars(owner)[name])
    except (AttributeError, LookupError):
        return None
    return member if member.function() is function else None


def names_in(function: Any) -> set[str]:
    """The names that a function's code reads, and those of functions in its body; also of what it decorates."""
    found, pending = set[str](), [function]
    while pending:
        each = pending.pop()
        if isinstance(each, FunctionType):
            pending += [each.__code__, getattr(each, "__wrapped__", None)]
        elif isinstance(each, CodeType):
            inner = [code for code in each.co_consts if isinstance(code, CodeType)]
            found.update(each.co_names, (code.co_name for code in inner))
            pending += inner
    return found


def _names(classes: list[type], modules: list[Any]) -> set[str]:
    """The names that methods of classes read, and the functions of modules that they name."""
    methods = [getattr(v, "__func__", v) for cls in classes for v in vars(cls).values()]
    found = set[str]().union(*map(names_in, methods))
    pending = set(found)
    while pending:
        functions = [vars(module).get(name) for module in modules for name in pending]
        pending = set[str]().union(*map(names_in, functions)) - found
        found |= pending
    return found


def callers_of(member: Member) -> list[type]:
    """The classes in the file of a function that call it, or hold it in the body of a method."""
    owner = member.owner
    module = owner if inspect.ismodule(owner) else sys.modules[owner.__module__]
    held = [cls for cls in vars(module).values() if isinstance(cls, type)]
    own = [cls for cls in held if cls.__module__ == module.__name__]
    return [cls for cls in own if member.name in _names([cls], [module])]


def bodies_of(model: torch.nn.Module) -> list[Member]:
    """The methods that rotate in their body, by the look of a line of their source."""
    return [
        Member(cls, name, method)
        for cls in classes_of(model)
        for name, method in vars(cls).items()
        if isinstance(method, FunctionType)
        and name != "__init__"
        and not inner_functions(method)
        and _has_line(inspect.unwrap(method).__code__)
    ]


@functools.lru_cache(4096)
def _has_line(code: CodeType) -> bool:
    try:
        return bool(_LINE.search(inspect.getsource(code)))
    except OSError:
        return False
