"""Find the rotary functions that the code of a model's classes names, and put others in their places."""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

# Packages whose classes hold no code of models.
_FOREIGN = ("torch", "builtins", "typing", "abc", "collections", "tightrope")
# Files whose functions others import in the bodies of methods, by package.
_SHARED = {"diffusers": "diffusers.models.embeddings"}
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
        """The key under which its kind is stored."""
        return (
            self.value if isinstance(self.value, (CodeType, torch.nn.Module)) else self.function()
        )

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
    objects: list[Any] = [*model.modules()]
    objects += [
        o
        for m in model.modules()
        for o in vars(m).values()
        if callable(o) and hasattr(o, "__dict__")
    ]
    found = dict.fromkeys(cls for each in objects for cls in type(each).__mro__)
    return [cls for cls in found if cls.__module__.partition(".")[0] not in _FOREIGN]


def members_of(model: torch.nn.Module) -> list[Member]:
    """The functions named by code of a model's classes that may be rotary functions, by their names."""
    classes = classes_of(model)
    homes = dict.fromkeys(cls.__module__ for cls in classes)
    homes |= dict.fromkeys(
        _SHARED[p] for p in {h.partition(".")[0] for h in homes} & _SHARED.keys()
    )
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
    outer, _, name = function.__qualname__.rpartition(".")
    owner: Any = sys.modules.get(function.__module__)
    with suppress(AttributeError):
        for part in filter(None, outer.split(".")):
            owner = getattr(owner, part)
        value = vars(owner)[name] if name in vars(owner) else None
        if getattr(value, "__func__", value) is function:
            return Member(owner, name, value)
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def names_in(function: Any) -> set[str]:
    """The names that a function's code reads, with those of functions in its body and of what it decorates."""
    found: set[str] = set()
    while isinstance(function, FunctionType):
        found.update(name for code in _codes(function.__code__) for name in code.co_names)
        function = getattr(function, "__wrapped__", None)
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


def callers_of(members: list[Member]) -> tuple[set[type], list[Member]]:
    """The classes of modules that call functions, in the files of these, and the functions of which a caller is unseen."""
    classes: set[type] = set()
    unseen = []
    for member in members:
        if isinstance(member.owner, FunctionType):
            module, names = sys.modules[member.owner.__module__], {member.owner.__name__}
        else:
            module = (
                member.owner
                if inspect.ismodule(member.owner)
                else sys.modules[member.owner.__module__]
            )
            names = {member.name}
        held = list(vars(module).values())
        functions = {f.__name__: names_in(f) for f in held if isinstance(f, FunctionType)}
        while more := {name for name, read in functions.items() if read & names} - names:
            names |= more
        found = {
            cls
            for cls in held
            if isinstance(cls, type)
            and cls.__module__ == module.__name__
            and any(_calls(name, value, member, names) for name, value in vars(cls).items())
        }
        classes |= {cls for cls in found if issubclass(cls, torch.nn.Module)}
        if not found or not all(issubclass(cls, torch.nn.Module) for cls in found):
            unseen.append(member)
    return classes, unseen


def _calls(name: str, value: Any, member: Member, names: set[str]) -> bool:
    """Return whether a method of a class is one that calls a function, or holds it in its body."""
    plain = getattr(value, "__func__", value)
    if isinstance(member.owner, FunctionType):
        return name in names
    return isinstance(plain, FunctionType) and name != member.name and bool(names_in(plain) & names)


_bodies: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def bodies_of(model: torch.nn.Module) -> Iterator[tuple[type, str]]:
    """Yield the methods that rotate in their body, by the look of a line of their source."""
    for cls in classes_of(model):
        if cls not in _bodies:
            _bodies[cls] = [
                name
                for name, method in vars(cls).items()
                if isinstance(method, FunctionType)
                and name != "__init__"
                and not inner_functions(method)
                and _LINE.search(_source(method))
            ]
        yield from ((cls, name) for name in _bodies[cls])


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
