"""Try functions without a trace: the state that they keep in globals, and that of torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..forms import unwrapped
from ._code import content_of, global_names
from ._find import is_compiled, is_near, layers


@contextmanager
def undisturbed() -> Iterator[None]:
    """Try code that is not ours: on the CPU, in float32, without gradients, modes and warnings.

    Inside ``from_pretrained`` the default dtype is that of the model, and the device may be meta.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
            _disable_current_modes(),  # such as FakeTensorMode, in which a model may be loaded
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(default)


# In place of a value that was not there.
_ABSENT = object()


class State:
    """The globals that a function names, with the dicts, lists, sets, classes and functions in them.

    The functions that it calls in its own module count too. Containers in containers, attributes of other
    objects and the values of tensors do not.
    """

    def __init__(self, function: Any) -> None:
        self._names: list[tuple[Any, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        #: Whether torch.compile made the function, or one that it calls.
        self.compiled = False
        if isinstance(function, torch.nn.Module):
            self._keep(function)
        #: The function, those in its decorators, and the helpers that they call.
        self.functions = list(self._reached(function))
        for each in self.functions:
            names = global_names(each.__code__)
            held = {name: each.__globals__.get(name, _ABSENT) for name in names}
            self._names.append((each.__globals__, held))
            cells = [content_of(cell) for cell in each.__closure__ or ()]
            for value in (each, *held.values(), *cells):
                self._keep(value)

    def restore(self) -> bool:
        """Undo the changes since, also those of other threads; return whether there were any."""
        changed = False
        for names, held in self._names:
            for name in [name for name in held if names.get(name, _ABSENT) is not held[name]]:
                changed = True
                if held[name] is _ABSENT:
                    del names[name]
                else:
                    names[name] = held[name]
        for container, before in self._containers:
            changed |= _restored(container, before)
        return changed

    def _reached(self, function: Any) -> Iterator[FunctionType]:
        seen: set[int] = set()
        pending: list[Any] = [unwrapped(function)]
        while pending:
            value = pending.pop()
            self.compiled |= is_compiled(value)
            if not isinstance(value, FunctionType) or id(value) in seen:
                continue
            seen.add(id(value))
            for each in layers(value):
                yield each
                near = (each.__globals__.get(name) for name in global_names(each.__code__))
                pending += [o for o in near if is_near(o, each) or is_compiled(o)]

    def _keep(self, value: Any) -> None:
        entries = _stored(value)
        if entries is not None:
            self._containers.append((value, entries))
        elif isinstance(value, (FunctionType, torch.nn.Module)):
            self._keep(vars(value))
        elif isinstance(value, type) and value.__module__.partition(".")[0] not in _FOREIGN:
            self._containers.append((value, dict(vars(value))))


# Packages whose classes keep no state of a rotary function.
_FOREIGN = ("torch", "builtins", "typing", "collections", "math", "numpy")


def _restored(container: Any, before: Any) -> bool:
    """Give a container its former entries; return whether it had others."""
    if isinstance(container, type):
        now = vars(container)
        names = [n for n in now if now[n] is not before.get(n, _ABSENT) and n not in _OWN]
        for name in names:
            if name in before:
                setattr(container, name, before[name])
            else:
                delattr(container, name)
        return bool(names)
    now = _stored(container)
    if len(now) == len(before) and _alike(now, before):
        return False
    if isinstance(container, dict):
        for key in now.keys() - before.keys():
            del container[key]
        for key, value in before.items():
            if now.get(key, _ABSENT) is not value:
                container[key] = value
    elif isinstance(container, list):
        container[:] = before
    else:
        container.clear()
        container.update(before)
    return True


def _stored(container: Any) -> Any:
    """Return what a dict, list or set stores, or None for anything else.

    Methods of a subclass may return something else, and import modules to make it.
    """
    if isinstance(container, dict):
        return dict(dict.items(container))
    if isinstance(container, list):
        return list(list.__iter__(container))
    return set(set.__iter__(container)) if isinstance(container, set) else None


# Entries of a class that Python itself adds.
_OWN = ("__annotations__", "__abstractmethods__", "_abc_impl", "__weakref__", "__dict__")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    if isinstance(one, list):
        return all(a is b for a, b in zip(one, other, strict=True))
    return {id(value) for value in one} == {id(value) for value in other}
