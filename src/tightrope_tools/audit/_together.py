"""The target of an audit: a function; or one that makes cosines and sines and one that applies them, as one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tightrope._errors import bad_value
from tightrope.patching import role_of
from tightrope.spec import RopeSpec
from tightrope_tools.forms import Argument, Way, calls_of, signature

from ._call import passed

# Roles of the parameters of a function that makes tables, beside those for which it gets x.
_LENGTHS = ("length", "max_seqlen")
_ROLES = ("positions", "head_dim", *_LENGTHS)


@dataclass(frozen=True)
class Target:
    """A function to audit.

    Attributes:
        name: its name for the report.
        fn: the function.
        make: returns a new function; None if ``fn`` is copied instead.
        spec: the intended rotation, if known.
        form, layout, tables, head_dim: how to call it, if known; named as in :func:`tightrope_tools.audit.audit`.
        unread: why a config gave no spec.
        recorded: whether the conversion record beside a config states "interleaved"; None if there is none.
    """

    name: str
    fn: Callable[..., Any]
    make: Callable[[], Callable[..., Any]] | None = None
    spec: RopeSpec | None = None
    form: str | None = None
    layout: str | None = None
    tables: str | None = None
    head_dim: int | None = None
    unread: str = ""
    recorded: bool | None = None


def together(target: Target, partner: Target) -> Target:
    """Return the target of two functions, one of which makes the tables that the other takes.

    Raises:
        ValueError: it is not clear which of them takes tables.
    """
    for each in (target, partner):
        if each.form is not None:
            raise bad_value(
                "target and partner must be functions, as those of a model or a stack are audited together already, "
                f"but got {each.name}"
            )
    applies = [_applied(each.fn) for each in (target, partner)]
    if (applies[0] is None) == (applies[1] is None):
        raise bad_value(
            "target and partner must be a function that makes cosines and sines and one that takes them, by "
            f"parameters such as cos and sin, but {'none' if applies[0] is None else 'both'} of {target.name} and "
            f"{partner.name} take{'s' * (applies[0] is None)} them"
        )
    last = 0 if applies[0] is not None else 1
    call, maker = applies[last], (target, partner)[1 - last]
    assert call is not None  # noqa: S101
    given = _given(maker.fn)
    rest = [each.role for each in call.arguments if each.role not in call.form.roles]
    if any(each.role == "positions" for each in given) and "positions" not in rest:
        rest.append("positions")
    if "positions" not in rest and "seq_dim" not in rest:
        rest.append("seq_dim")

    def join(first: Callable[..., Any]) -> Together:
        both = first, partner.fn
        return Together(both[1 - last], both[last], call, given, rest)

    make = None if target.make is None else lambda: join(target.make())  # type: ignore[misc]
    name = f"{maker.name} with {(target, partner)[last].name}"
    return replace(target, name=name, fn=join(target.fn), make=make, form=", ".join(rest))


def _applied(fn: Callable[..., Any]) -> Way | None:
    """The likeliest call with tables, or None if the function takes none."""
    return next((each for each in calls_of(fn) if each.takes_tables), None)


def _given(fn: Callable[..., Any]) -> list[Argument]:
    """The arguments of a function that makes tables: those that it needs, and lengths that may be left out."""
    found = []
    seen = signature(fn)
    for each in () if seen is None else seen.parameters.values():
        role = role_of(each.name)
        needed = each.default is each.empty
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL) and (
            needed or (role in _LENGTHS and each.default is None)
        ):
            by_name = not needed or each.kind is each.KEYWORD_ONLY
            found.append(Argument(role if role in _ROLES else "x", each.name, by_name))
    tensor = re.compile("x|q|hidden")
    if [each.role for each in found] == ["x"] and not tensor.match(str(found[0].name)):
        found = [found[0]._replace(role="positions")]
    return found


@dataclass(frozen=True, eq=False)
class Together:
    """Two functions as one, whose arguments have the given roles.

    What the first returns is passed to the parameters of the second that take tables, in their order.
    """

    rotary: Callable[..., Any]
    apply_function: Callable[..., Any]
    call: Way
    given: list[Argument]
    roles: list[str]

    def __call__(self, *arguments: Any) -> Any:
        """Make the tables and apply them."""
        values = dict(zip(self.roles, arguments, strict=True))
        x = values["q"] if "q" in values else values["x"]
        where = values.get("positions")
        length = x.shape[values.get("seq_dim", 0)]
        if isinstance(where, torch.Tensor):
            length = int(where.max()) + 1 if where.numel() else 0
        known = {"x": x, "head_dim": x.shape[-1], "positions": where}
        known |= dict.fromkeys(_LENGTHS, length)
        positional, named = passed(self.given, known)
        made = self.rotary(*positional, **named)
        tables = [each for each in self.call.arguments if each.role in self.call.form.roles]
        held = made if len(tables) > 1 else (made,)
        values |= zip((each.role for each in tables), held, strict=True)
        used = [each for each in self.call.arguments if each.role in values]
        positional, named = passed(used, values)
        return self.apply_function(*positional, **named)
