"""The calls of a rotary function that the names of its parameters suggest, and the channels of its pairs.

Code that tests an unknown rotary function tries the entries of :data:`FORMS`. They stand in `tightrope.patching`, with the
roles that names suggest: to support another way of passing angles, add an entry there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, NamedTuple

import torch

from tightrope.patching import (
    COS_SIN_NAMES,
    FORMS as FORMS,
    TABLE_NAMES,
    Form as Form,
    role_of,
)
from tightrope.spec import RopeSpec


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
class Way:
    """One way to call a function, including layouts and shapes of the arguments.

    Attributes:
        form: how the function takes its angles.
        arguments: the arguments in parameter order.
        layout: the layout of x, q and k.
        shared_positions: whether positions are ``(tokens,)`` and not ``(rows, tokens)``.
        width: how tables hold the entry of each pair, a key of WIDTHS.
        table_shape: the dimensions of these tables.
        row_offsets: whether offsets are ``(rows,)`` and not one number.
        axes: the number of coordinates of a position. With several, positions ``(axes, rows, tokens)`` with
            equal coordinates, as in text, are passed on.
        counts: which calls a function of positions gets, if it does not rotate each token by its own: "from 0" or
            "from the first", calls with one position after the other; "rising", with positions in this order;
            "in tables", tables from position 0 on, of which an offset states the first.
    """

    form: Form
    arguments: tuple[Argument, ...]
    layout: str = "bhsd"
    shared_positions: bool = False
    width: str = "cat"
    table_shape: str = "bsd"
    row_offsets: bool = False
    axes: int = 1
    counts: str = ""

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

    @property
    def takes_tables(self) -> bool:
        """True if the caller passes cosines and sines, in any format."""
        return self.form.build is not None

    @property
    def takes_positions(self) -> bool:
        """True if the function computes angles from positions."""
        return "positions" in self.form.roles

    @property
    def takes_rows(self) -> bool:
        """True if the function takes tables and the indices of their rows."""
        return self.takes_tables and "positions" in self.roles

    @property
    def takes_ids(self) -> bool:
        """True if tokens may have arbitrary positions; otherwise the function numbers them itself."""
        counts = self.counts.startswith("from")
        return (self.takes_positions and not counts) or self.takes_tables

    @property
    def takes_offset(self) -> bool:
        """True if the first token may have any position, and the function counts from it."""
        return self.counts == "from the first" or ("offset" in self.roles and not self.counts)

    @property
    def packed(self) -> bool:
        """True if rows are packed into one, and the function gets where each begins."""
        return "cu_seqlens" in self.roles

    @property
    def takes_keys(self) -> bool:
        """True if the function takes q and k in one call."""
        return "k" in self.roles

    @property
    def rows_differ(self) -> bool:
        """True if rows may have different positions in one call."""
        if self.packed:
            return not self.takes_tables
        if "b" not in self.layout or (self.takes_positions and self.shared_positions):
            return False
        if self.takes_tables:
            return self.takes_rows or "b" in self.table_shape
        return True


def takes(form: Form, roles: Sequence[str]) -> bool:
    """Return whether a call may have arguments of these roles: one or two that rotate, and the others of the form."""
    given = {*roles}
    rotated = ({"x"},) if form.gives_tables else ({"x"}, {"q"}, {"q", "k"})
    rest = given - {*form.roles, *form.others}
    return len(given) == len(roles) and given >= {*form.roles} and rest in rotated


def signature(function: Any) -> inspect.Signature | None:
    """The signature that callers see, or None if it cannot be read."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def calls_of(function: Any) -> list[Way]:
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
    where = {
        role for role in (role_of(each.name) for each in every) if role in ("positions", "offset")
    }
    found = []
    for form in FORMS.values():
        of_tables = form.roles if form.build is not None else ()
        counts = form.roles in ((), ("offset",))  # such a form leaves out no positions
        if len(tables) != len(of_tables) or (counts and not where <= {*form.roles}):
            continue
        orders = (dict(zip(tables, order)) for order in permutations(of_tables))
        given = (_arguments(form, every, order) for order in orders)
        calls = [Way(form, each) for each in given if each is not None]
        found += [call for call in calls if call.names_its_form] or calls
    return found


def left_out(function: Any, call: Way) -> dict[str, Argument]:
    """Return the optional arguments that a call leaves out, by the roles that their names suggest."""
    used, seen = {each.name for each in call.arguments}, signature(function)
    found = {}
    for each in () if seen is None else seen.parameters.values():
        role = role_of(each.name)
        needed = each.default is each.empty
        if role is not None and role not in call.roles and each.name not in used and not needed:
            found[role] = Argument(role, each.name, keyword=True)
    return found


def _names_table(parameter: inspect.Parameter) -> bool:
    """True if a parameter that must be given, or is None by default, has the name of a table."""
    name, default = parameter.name, parameter.default
    if default is None and role_of(parameter.name) == "seq_dim":
        return False
    named = COS_SIN_NAMES.search(name) or TABLE_NAMES.search(name)
    return named is not None and default in (None, parameter.empty)


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
    return arguments if takes(form, [each.role for each in arguments]) else None


def _choices(form: Form, parameter: inspect.Parameter) -> tuple[str, ...]:
    """The roles that a parameter other than a table may have in a call of a form, likeliest first.

    If the function takes tables, each one that is required is tried as a tensor that rotates.
    """
    role, optional = role_of(parameter.name), parameter.default is not parameter.empty
    if role not in (None, "q", "k"):
        # Where optional, a remnant of functions that indexed their tables themselves.
        remnant = optional and (form.build is not None or role == "offset")
        return (role,) if role in form.roles or (role in form.others and not remnant) else ()
    if optional:
        return ("k",) if role == "k" else ()
    return ("x", "k") if form.build is not None or role is not None else ("x",)


# --- pairs ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two channels that turn together, first < second."""

    first: int
    second: int


def pairs_in(start: int, rotary_dim: int, interleaved: bool) -> list[Pair]:
    """The channels of each pair of a slice."""
    step, stride = (1, 2) if interleaved else (rotary_dim // 2, 1)
    return [Pair(start + stride * k, start + stride * k + step) for k in range(rotary_dim // 2)]


def pairs_of(spec: RopeSpec) -> list[Pair]:
    """The channels of each pair of a spec."""
    return pairs_in(spec.start, spec.rotary_dim, spec.interleaved)
