"""How rotary functions take x and their angles: the forms of calls, and those that parameter names suggest.

Code that tests an unknown rotary function tries the entries of :data:`FORMS`. To support another way of passing
cosines and sines, add an entry to the forms of `tightrope.patching`; another way to make them, one to those below.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from tightrope import patching
from tightrope.patching import COS_SIN_NAMES, TABLE_NAMES, WIDTHS as WIDTHS


@dataclass(frozen=True)
class Form:
    """One way in which rotary functions take their angles.

    Attributes:
        name: the name in reports.
        roles: the roles of the arguments that hold the angles, also their usual parameter names.
        build: if the caller passes cosines and sines, makes these arguments of them.
        gives_tables: whether the function returns (cos, sin) and rotates nothing.
        widths: how cos/sin may hold the entry of each pair, likeliest first; keys of WIDTHS.
        narrow: whether tables may have a 16-bit dtype.
    """

    name: str
    roles: tuple[str, ...]
    build: Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]] | None = None
    gives_tables: bool = False
    widths: tuple[str, ...] = tuple(WIDTHS)
    narrow: bool = True

    @property
    def takes_tables(self) -> bool:
        """True if the caller passes cosines and sines, in any format."""
        return self.build is not None

    @property
    def packed(self) -> bool:
        """True if rows are packed into one, and the caller passes where each begins."""
        return self.roles == ("cu_seqlens",)


#: Every form by its name; if a signature fits several, the likeliest first.
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("positions", ("positions",)),
        Form("positions, for tables", ("positions",), gives_tables=True),
        *(
            Form(name, each.roles, each.build, widths=each.widths, narrow=each.narrow)
            for name, each in patching.FORMS.items()
        ),
        Form("a pair (sin, cos)", ("reversed_pair",), lambda cos, sin: ((sin, cos),)),
        Form("packed rows", ("cu_seqlens",)),
        Form("an offset", ("offset",)),
        Form("no positions", ()),
    )
}


# --- calls ----------------------------------------------------------------------------------------

# Role -> parameter names that suggest it; for those of tables see `tightrope.patching`.
_NAMES = {
    "q": re.compile(r"^(x?q|q_|query|queries)(_states|_layer|_heads?)?$"),
    "k": re.compile(r"^(x?k|k_|key|keys)(_states|_layer|_heads?)?$"),
    "cu_seqlens": re.compile(r"^cu_?(seq_?)?len|(^|_)start_loc$|seq_loc$"),
    "max_seqlen": re.compile(r"^max_?seq_?len"),
    "offset": re.compile(r"offset|start_pos|position_start|^past_len"),
    "seq_dim": re.compile(r"(^|_)seq(uence)?_(dim|axis)$"),
    "positions": re.compile(r"pos(ition)?|(^|_)ids$"),
}
# Roles that only packed rows have.
_PACKED = ("cu_seqlens", "max_seqlen")
# Names of parameters that never take a tensor to rotate.
_OTHER = re.compile(r"config|mask|cache|past_key|^grid_(sizes?|thw)$")


class Argument(NamedTuple):
    """One parameter of a function and its role.

    Attributes:
        role: "x" for a single tensor that rotates, else "q" and "k"; a role of the form; "positions" (if the function
            takes tables: the rows to take from them); "offset", the position of the first token; "seq_dim", the
            sequence dimension of x; "cu_seqlens", where each packed row begins, and "max_seqlen", the length of the
            longest.
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
    """

    form: Form
    arguments: tuple[Argument, ...]

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles of all arguments."""
        return frozenset(each.role for each in self.arguments)

    @cached_property
    def names_its_form(self) -> bool:
        """True if the name of each table parameter, where known, contains its role."""
        names = {each.role: each.name for each in self.arguments}
        return all(names[role] is None or role in str(names[role]) for role in self.form.roles)

    def __str__(self) -> str:
        names = ", ".join(each.role for each in self.arguments)
        return f"{names} -> cos, sin" if self.form.gives_tables else names


def signature(function: Any) -> inspect.Signature | None:
    """The signature that callers see, or None if it cannot be read."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def calls_of(function: Any) -> list[Call]:
    """Ways to call a function that its parameter names suggest, likeliest first.

    Names only suggest what to try; the caller verifies each way numerically.
    """
    seen = signature(function)
    parameters = [] if seen is None else list(seen.parameters.values())
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return []
    parameters = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    return [call for form in FORMS.values() for call in _bound(form, parameters)]


def left_out(function: Any, call: Call) -> dict[str, Argument]:
    """Return the optional arguments that a call leaves out, by the roles that their names suggest."""
    used, seen = {each.name for each in call.arguments}, signature(function)
    found = {}
    for each in () if seen is None else seen.parameters.values():
        role = _role(each)
        needed = each.default is each.empty
        if role is not None and role not in call.roles and each.name not in used and not needed:
            found[role] = Argument(role, each.name, keyword=True)
    return found


def _bound(form: Form, parameters: Sequence[inspect.Parameter]) -> Iterator[Call]:
    """The calls of one form that fit a function's parameters, if any."""
    tables = [
        each.name
        for each in parameters
        if (COS_SIN_NAMES.search(each.name) or TABLE_NAMES.search(each.name))
        and each.default in (None, each.empty)
        and not (each.default is None and _role(each) == "seq_dim")
    ]
    if len(tables) != (len(form.roles) if form.takes_tables else 0):
        return
    calls = []
    for order in [tables, tables[::-1]][: max(1, len(tables))]:
        roles = dict(zip(order, form.roles)) if form.takes_tables else {}
        arguments = _arguments(form, parameters, roles)
        if arguments is not None:
            calls.append(Call(form, arguments))
    yield from sorted(calls, key=lambda call: not call.names_its_form)


def _role(parameter: inspect.Parameter) -> str | None:
    """The role that a parameter's name suggests; None for tables and unknown names."""
    name = parameter.name.lower()
    return next((role for role, names in _NAMES.items() if names.search(name)), None)


def _arguments(
    form: Form, parameters: Sequence[inspect.Parameter], tables: Mapping[str, str]
) -> tuple[Argument, ...] | None:
    """The arguments of a call of one form; None if a parameter that is required has no role in it."""
    found: list[Argument] = []
    rotated = 0
    for each in parameters:
        optional = each.default is not each.empty
        role = tables.get(each.name) or _role(each)
        if role in (None, "q", "k"):
            role = _rotated(form, each, role, rotated)
            rotated += role is not None
            if role is None and not optional:
                return None
        elif role == "seq_dim" and form.takes_tables and optional:
            role = None
        elif role in _PACKED:
            if optional and not form.packed:
                role = None
            elif not (form.takes_tables or form.packed):
                return None
        elif role in ("positions", "offset") and role not in form.roles:
            # Where optional, a remnant of functions that indexed their tables themselves.
            unused = (form.takes_tables or form.packed) and optional
            if unused or (role == "offset" and "positions" in form.roles):
                role = None
            elif role == "offset" or not form.takes_tables:
                return None
        if role is not None and any(one.role == role for one in found):
            if not optional:
                return None
            role = None
        if role is not None:
            found.append(Argument(role, each.name, optional or each.kind is each.KEYWORD_ONLY))
    roles = {one.role for one in found}
    if not rotated or not set(form.roles) <= roles or (form.gives_tables and len(found) != 2):
        return None
    if "k" in roles:
        found = [one._replace(role="q") if one.role == "x" else one for one in found]
    return tuple(found)


def _rotated(form: Form, each: inspect.Parameter, role: str | None, before: int) -> str | None:
    """The role of a parameter that may take a tensor to rotate, after so many others: "x", "k" or None.

    If the function takes tables, each parameter that is required is tried as a tensor.
    """
    optional = each.default is not each.empty
    if _OTHER.search(each.name):
        return None
    if before == 0:
        return None if optional else "x"
    if before == 1 and (role == "k" or (not optional and (form.takes_tables or role == "q"))):
        return "k"
    return None
