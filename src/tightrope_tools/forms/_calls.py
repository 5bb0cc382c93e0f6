"""A way to call a rotary function: the form of its angles and the role of each parameter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch

from ._registry import FORMS, Form, Tables

#: Roles of tensors that rotate: "x" for a single one, else "q" and "k"; "more" for those after the
#: second, which may be None.
ROTATED = ("x", "q", "k", "more")

# Role -> parameter names that suggest it; see _TABLE for the tables.
_NAMES = {
    "q": re.compile(r"^(x?q|q_|query|queries)(_states|_layer|_heads?)?$"),
    "k": re.compile(r"^(x?k|k_|key|keys)(_states|_layer|_heads?)?$"),
    "cu_seqlens": re.compile(r"^cu_?(seq_?)?len|(^|_)start_loc$|seq_loc$"),
    "max_seqlen": re.compile(r"^max_?seq_?len"),
    "offset": re.compile(r"offset|start_pos|position_start|^past_len"),
    "seq_dim": re.compile(r"(^|_)seq(uence)?_(dim|axis)$"),
    "positions": re.compile(r"pos(ition)?|(^|_)ids$"),
    "unsqueeze_dim": re.compile(r"(?<!unbind_)dim$|axis$"),
}
# Roles that only packed rows have.
_PACKED = ("cu_seqlens", "max_seqlen")
# Names of parameters that never take a tensor to rotate.
_OTHER = re.compile(r"config|mask|cache|past_key")
_TABLE = re.compile(r"cos|sin|freq|cis|rope|rotary|emb(ed(ding)?)?s?$|^angles?$|^theta$|^pe$")
_GRIDS = re.compile(r"^grid_(sizes?|thw)$")


class Argument(NamedTuple):
    """One parameter of a function and its role.

    Attributes:
        role: one of ROTATED; a role of the form; "positions" (if the function takes tables: the
            rows to take from them); "offset", the position of the first token; "seq_dim", the
            sequence dimension of x; "unsqueeze_dim", the dimension at which tables are unsqueezed;
            "cu_seqlens", where each packed row begins, and "max_seqlen", the length of the longest.
        name: the name of the parameter; None if unknown.
        keyword: whether to pass it by name, because it is optional or keyword-only.
    """

    role: str
    name: str | None = None
    keyword: bool = False


@dataclass(frozen=True)
class Call:
    """One way to call a function.

    Attributes:
        form: how the function takes its angles.
        arguments: the arguments in parameter order.
        method: whether the function takes self first.
    """

    form: Form
    arguments: tuple[Argument, ...]
    method: bool = False

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles of all arguments."""
        return frozenset(each.role for each in self.arguments)

    @cached_property
    def rotated(self) -> tuple[str, ...]:
        """The names of the parameters whose tensors rotate."""
        return tuple(str(each.name) for each in self.arguments if each.role in ROTATED)

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The names of the cos/sin parameters, in the order of the form's roles."""
        return tuple(str(self.parameter(role)) for role in self.form.roles)

    def parameter(self, role: str) -> str | None:
        """The name of the parameter with a role, or None."""
        return next((each.name for each in self.arguments if each.role == role), None)

    @cached_property
    def makes_its_tables(self) -> bool:
        """True if the call passes one x and positions, from which the function makes its tables."""
        return self.form.name == "positions" and len(self.rotated) == 1

    @cached_property
    def names_its_form(self) -> bool:
        """True if the name of each table parameter, where known, contains its role."""
        names = {each.role: each.name for each in self.arguments}
        return all(names[role] is None or role in str(names[role]) for role in self.form.roles)

    def build(self, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Any]:
        """The cos/sin arguments by parameter name."""
        return dict(zip(self.tables, self.form.built(cos, sin), strict=True))

    def read(self, values: Mapping[str, Any]) -> Tables | None:
        """Extract cosines and sines from named arguments; None if the arguments do not have this form."""
        read = self.form.read
        if read is None:
            return None
        try:
            cos, sin = read(*[values[name] for name in self.tables])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None
        both = isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor)
        return (cos, sin) if both else None

    def __str__(self) -> str:
        names = ", ".join(each.role for each in self.arguments)
        return f"{names} -> cos, sin" if self.form.gives_tables else names


# --- calls suggested by a signature ---------------------------------------------------------------


def unwrapped(function: Any) -> Callable[..., Any]:
    """The plain function behind a static, class or bound method, or behind a module's forward."""
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    elif isinstance(function, torch.nn.Module):
        return unwrapped(function.forward)
    elif inspect.ismethod(function):
        function = function.__func__
    return cast(Callable[..., Any], function)


def signature(function: Any) -> inspect.Signature | None:
    """The signature that callers see, or None if it cannot be read."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def calls_of(function: Any, *, method: bool = False, packed: bool = False) -> list[Call]:
    """Ways to call a function that its parameter names suggest, likeliest first.

    Names only suggest what to try; the caller verifies each way numerically.

    Args:
        function: a rotary function, or a module whose forward is one.
        method: whether the function takes self first.
        packed: whether to suggest calls with packed rows too.
    """
    seen = signature(function)
    parameters = [] if seen is None else list(seen.parameters.values())
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return []
    parameters = [each for each in parameters if each.kind is not each.VAR_KEYWORD][int(method) :]
    forms = [form for form in FORMS.values() if packed or not form.packed]
    return [call for form in forms for call in _bound(form, parameters, method, packed)]


def _bound(
    form: Form, parameters: Sequence[inspect.Parameter], method: bool, packed: bool
) -> Iterator[Call]:
    """The calls of one form that fit a function's parameters, if any."""
    tables = [
        each.name
        for each in parameters
        if (_TABLE.search(each.name) or (_GRIDS.search(each.name) and each.default is each.empty))
        and each.default in (None, each.empty)
        and not (each.default is None and _role(each) == "seq_dim")
    ]
    if form.takes_tables and form.grids != any(map(_GRIDS.search, tables)):
        return
    if form.flat > method or len(tables) != (len(form.roles) if form.takes_tables else 0):
        return
    orders = [tables]
    if len(tables) == 2:
        orders.append(tables[::-1])
    calls = []
    for order in orders:
        roles = dict(zip(order, form.roles)) if form.takes_tables else {}
        arguments = _arguments(form, parameters, roles, packed)
        if arguments is not None:
            calls.append(Call(form, arguments, method))
    yield from sorted(calls, key=lambda call: not call.names_its_form)


def _arguments(
    form: Form, parameters: Sequence[inspect.Parameter], tables: Mapping[str, str], packed: bool
) -> tuple[Argument, ...] | None:
    found: list[Argument] = []
    rotated = 0
    for each in parameters:
        optional = each.default is not each.empty
        role = tables.get(each.name) or _role(each)
        if role in _PACKED:
            if not packed:
                role = None
            elif optional and not form.packed:
                continue
        if role is None or role in ("q", "k"):
            # If the function takes tables, each other parameter that is required, or None by
            # default, is tried as a tensor.
            open_to_any = form.takes_tables and each.default in (None, each.empty)
            named = role == "k" or (role == "q" and not optional)
            if _OTHER.search(each.name):
                open_to_any = named = False
                if not optional:
                    return None
            if rotated == 0 and not optional:
                role = "x"
            elif rotated and (open_to_any or named):
                second = rotated == 1 and (not optional or role == "k")
                role = "k" if second else "more"
            elif optional:
                continue
            else:
                return None
            rotated += 1
        elif role == "unsqueeze_dim" and not form.takes_tables:
            continue
        elif role == "seq_dim" and form.takes_tables and optional:
            continue
        elif role in _PACKED and not (form.takes_tables or form.packed):
            return None
        elif role in ("positions", "offset") and role not in form.roles:
            if (form.takes_tables or form.packed) and optional:
                continue  # unused: a remnant of functions that indexed their tables themselves
            if role == "offset" and "positions" in form.roles:
                continue
            if role == "offset" or not form.takes_tables:
                return None
        if role != "more" and any(one.role == role for one in found):
            if optional:
                continue
            return None
        found.append(Argument(role, each.name, optional or each.kind is each.KEYWORD_ONLY))
    if not rotated or not set(form.roles) <= {one.role for one in found}:
        return None
    if form.gives_tables and len(found) != 2:
        return None
    if any(one.role == "k" for one in found):
        found = [one._replace(role="q") if one.role == "x" else one for one in found]
    return tuple(found)


def _role(parameter: inspect.Parameter) -> str | None:
    """The role that a parameter's name suggests; None for tables and unknown names."""
    name = parameter.name.lower()
    role = next((role for role, names in _NAMES.items() if names.search(name)), None)
    if role == "unsqueeze_dim" and type(parameter.default) is not int:
        return None
    return role
