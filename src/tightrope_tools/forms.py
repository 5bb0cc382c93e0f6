"""How rotary functions take x and their angles: the forms of calls, and those that parameter names suggest.

Code that tests an unknown rotary function tries the entries of :data:`FORMS`. To support another way of passing
cosines and sines, add an entry to the forms of `tightrope.patching`; another way to make them, one to those below.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
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
        others: the roles that other arguments may have, beside those that rotate.
    """

    name: str
    roles: tuple[str, ...]
    build: Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]] | None = None
    gives_tables: bool = False
    widths: tuple[str, ...] = tuple(WIDTHS)
    narrow: bool = True
    others: tuple[str, ...] = ("seq_dim", "positions", "offset", "cu_seqlens", "max_seqlen")

    @property
    def takes_tables(self) -> bool:
        """True if the caller passes cosines and sines, in any format."""
        return self.build is not None

    def takes(self, roles: Sequence[str]) -> bool:
        """Return whether a call may have arguments of these roles: one or two that rotate, and the others of the form."""
        given = {*roles}
        rotated = ({"x"},) if self.gives_tables else ({"x"}, {"q"}, {"q", "k"})
        rest = given - {*self.roles, *self.others}
        return len(given) == len(roles) and given >= {*self.roles} and rest in rotated


#: Every form by its name; if a signature fits several, the likeliest first.
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("positions", ("positions",), others=("seq_dim", "offset")),
        Form("positions, for tables", ("positions",), gives_tables=True, others=()),
        *(
            Form(name, each.roles, each.build, widths=each.widths, narrow=each.narrow)
            for name, each in patching.FORMS.items()
        ),
        Form("a pair (sin, cos)", ("reversed_pair",), lambda cos, sin: ((sin, cos),)),
        Form("packed rows", ("cu_seqlens",), others=("seq_dim", "max_seqlen")),
        Form("an offset", ("offset",), others=("seq_dim",)),
        Form("no positions", (), others=("seq_dim",)),
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

    Names only suggest what to try; the caller verifies each way numerically. Where they tell cosines from sines, the
    other order is left out: it could hide a fault.
    """
    seen = signature(function)
    every = [] if seen is None else list(seen.parameters.values())
    if any(each.kind is each.VAR_POSITIONAL for each in every):
        return []
    every = [each for each in every if each.kind is not each.VAR_KEYWORD]
    tables = [each.name for each in every if _names_table(each)]
    where = {role for role in map(_role, every) if role in ("positions", "offset")}
    found = []
    for form in FORMS.values():
        of_tables = form.roles if form.takes_tables else ()
        counts = form.roles in ((), ("offset",))  # such a form leaves out no positions
        if len(tables) != len(of_tables) or (counts and not where <= {*form.roles}):
            continue
        orders = (dict(zip(tables, order)) for order in permutations(of_tables))
        given = (_arguments(form, every, order) for order in orders)
        calls = [Call(form, each) for each in given if each is not None]
        found += [call for call in calls if call.names_its_form] or calls
    return found


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


def _names_table(parameter: inspect.Parameter) -> bool:
    """True if a parameter that must be given, or is None by default, has the name of a table."""
    name, default = parameter.name, parameter.default
    if default is None and _role(parameter) == "seq_dim":
        return False
    named = COS_SIN_NAMES.search(name) or TABLE_NAMES.search(name)
    return named is not None and default in (None, parameter.empty)


def _role(parameter: inspect.Parameter) -> str | None:
    """The role that a parameter's name suggests; None for tables and unknown names."""
    name = parameter.name.lower()
    return next((role for role, names in _NAMES.items() if names.search(name)), None)


def _arguments(
    form: Form, parameters: Sequence[inspect.Parameter], tables: Mapping[str, str]
) -> tuple[Argument, ...] | None:
    """The arguments of a call of one form; None if a parameter that is required has no role in it."""
    found: dict[str, Argument] = {}
    for each in parameters:
        optional = each.default is not each.empty
        choices = (tables[each.name],) if each.name in tables else _choices(form, each)
        role = next((role for role in choices if role not in found), None)
        if role is not None:
            found[role] = Argument(role, each.name, optional or each.kind is each.KEYWORD_ONLY)
        elif not optional:
            return None
    if {"x", "k"} <= found.keys():
        found["x"] = found["x"]._replace(role="q")
    arguments = tuple(found.values())
    return arguments if form.takes([each.role for each in arguments]) else None


def _choices(form: Form, parameter: inspect.Parameter) -> tuple[str, ...]:
    """The roles that a parameter other than a table may have in a call of a form, likeliest first.

    If the function takes tables, each one that is required is tried as a tensor that rotates.
    """
    role, optional = _role(parameter), parameter.default is not parameter.empty
    if role not in (None, "q", "k"):
        # Where optional, a remnant of functions that indexed their tables themselves.
        remnant = optional and (form.takes_tables or role == "offset")
        return (role,) if role in form.roles or (role in form.others and not remnant) else ()
    if optional or _OTHER.search(parameter.name):
        return ("k",) if role == "k" else ()
    return ("x", "k") if form.takes_tables or role is not None else ("x",)
