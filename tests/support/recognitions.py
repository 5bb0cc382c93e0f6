"""Recognise each rotary function once per process, for tests of what is done with the result.

To recognise a function takes about half a second, and models of one family share their functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tightrope.integrations import _bits, _candidate, _probe, _recognise, _replace
from tightrope.integrations._recognise import Recognition, recognise

# The modules that call `recognise` by this name for `patch`.
USERS = (_recognise,)

# Values of these types stay what they are, so it is enough to compare them.
_FIXED = (
    *(BuiltinFunctionType, ModuleType, type, torch.dtype, torch.autocast),
    *(str, bool, int, float, type(None)),
)

# The code that recognises. A test that replaces a part of it gets no earlier result, and leaves none.
_CODE = {
    (name, attribute): value
    for name, module in list(sys.modules.items())
    if name.startswith(("tightrope.forms", "tightrope.ops", "tightrope.functional"))
    or name
    in (
        "tightrope.channels",
        _recognise.__name__,
        _probe.__name__,
        _bits.__name__,
        _replace.__name__,
        _candidate.__name__,
    )
    for attribute, value in vars(module).items()
    if isinstance(value, (FunctionType, type))
}

_known: dict[Any, Recognition] = {}


def _replaced() -> bool:
    return any(
        vars(sys.modules[name]).get(attribute) is not value
        for (name, attribute), value in _CODE.items()
        if attribute != "recognise"
    )


class _Unknown(Exception):
    """A function reads something that could change unnoticed."""


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _parts(value)


def _read(value: Any, into: dict[int, Any]) -> None:
    """Collect all that a function reads: itself, its code, and the globals and functions that it uses."""
    if id(value) in into:
        return
    if isinstance(value, FunctionType):
        into[id(value)] = value
        if vars(value).keys() - {"__wrapped__"}:
            raise _Unknown
        _read(vars(value).get("__wrapped__"), into)
        for part in (value.__code__, value.__defaults__, value.__kwdefaults__):
            into[id(part)] = part
        for cell in value.__closure__ or ():
            try:
                _read(cell.cell_contents, into)
            except ValueError:  # an empty cell
                raise _Unknown from None
        names = {name for code in _parts(value.__code__) for name in code.co_names}
        for name in sorted(names & value.__globals__.keys()):
            _read(value.__globals__[name], into)
    elif isinstance(value, _FIXED) or getattr(value, "__module__", None) == "typing":
        into[id(value)] = value
    else:
        raise _Unknown


def _key(function: Any, constants: Any) -> Any:
    if not isinstance(function, FunctionType) or _replaced():
        raise _Unknown
    if _get_current_function_mode() or _get_current_dispatch_mode():
        raise _Unknown
    if torch.is_autocast_enabled("cpu"):
        raise _Unknown
    read: dict[int, Any] = {}
    _read(function, read)
    given = tuple((name, type(value), value, repr(value)) for name, value in constants)
    settings = (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    return function, given, settings, _Same(read)


class _Same:
    """Objects that are compared by identity and stay alive, so that no other object gets their id."""

    def __init__(self, objects: dict[int, Any]) -> None:
        self.objects, self.ids = objects, tuple(objects)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.ids == other.ids

    def __hash__(self) -> int:
        return hash(self.ids)


def once(function: Any, owner: object = None, constants: Any = ()) -> Recognition:
    """Return what `recognise` returned for the same function, if all that it reads is still the same.

    Methods, and functions that read what could change unnoticed, are recognised again.
    """
    try:
        key = None if owner is not None else _key(function, constants)
    except _Unknown:
        key = None
    if key is None:
        return recognise(function, owner, constants)
    if key not in _known:
        _known[key] = recognise(function, owner, constants)
    return _known[key]
