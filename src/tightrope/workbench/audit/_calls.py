"""How a function is called: its arguments by role, and the adapter that this makes of it.

The adapter is Python text. The audit runs that text, and its snippets show the same text, so what a
reader runs is what the audit ran. It defines ``rotate(x, positions)`` with x ``(rows, heads, tokens,
channels)`` and positions ``(rows, tokens)``, and ``rotate_qk(q, k, positions)`` where the function
takes both.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..._errors import bad_value

ROLES = ("x", "q", "k", "positions", "offset", "seq_dim", "cos", "sin", "cis")
LAYOUTS = ("bhsd", "bshd", "bsd", "sbhd", "thd", "sd")

_INTO = {
    "bhsd": "{}",
    "bshd": "{}.transpose(1, 2)",
    "sbhd": "{}.permute(2, 0, 1, 3)",
    "thd": "{}[0].transpose(0, 1)",
    "bsd": "{}[:, 0]",
    "sd": "{}[0, 0]",
}
_BACK = {
    "bhsd": "{}",
    "bshd": "{}.transpose(1, 2)",
    "sbhd": "{}.permute(1, 2, 0, 3)",
    "thd": "{}.transpose(0, 1)[None]",
    "bsd": "{}[:, None]",
    "sd": "{}[None, None]",
}
_TOKEN_AXIS = {"bhsd": 2, "bshd": 1, "sbhd": 0, "thd": 0, "bsd": 1, "sd": 0}
_WIDEN = {
    "cat": "\n    angle = torch.cat((angle, angle), -1)",
    "repeat": "\n    angle = angle.repeat_interleave(2, -1)",
    "half": "",
}
_TABLE_SHAPES = {"bsd": "", "sd": "[0]", "b1sd": "[:, None]", "bs1d": "[:, :, None]"}


@dataclass(frozen=True)
class Call:
    """One way to call a function.

    Attributes:
        arguments: (role, keyword or None) in the order in which they are passed.
        gives_tables: whether it returns (cos, sin) and not something rotated.
        layout: how x, q and k are laid out.
        shared_positions: positions are ``(tokens,)`` and not ``(rows, tokens)``.
        tables: the width of the tables that it takes or gives: ``"cat"``, ``"repeat"``, ``"half"``.
        table_shape: which axes they have.
        axes: how many coordinates a position has. With several, the adapter makes them all equal, as in
            text, of positions ``(rows, tokens)``, and hands over those that have an axis in front.
    """

    arguments: tuple[tuple[str, str | None], ...]
    gives_tables: bool = False
    layout: str = "bhsd"
    shared_positions: bool = False
    tables: str = "cat"
    table_shape: str = "bsd"
    axes: int = 1

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(role for role, _ in self.arguments)

    @property
    def takes_tables(self) -> bool:
        """Whether somebody else makes the angles."""
        return bool(self.roles & {"cos", "sin", "cis"})

    @property
    def takes_ids(self) -> bool:
        """Whether each token may be anywhere."""
        return "positions" in self.roles or self.takes_tables

    @property
    def takes_keys(self) -> bool:
        return "k" in self.roles

    @property
    def rows_differ(self) -> bool:
        """Whether each row may have positions of its own in one call."""
        if self.layout in ("thd", "sd"):
            return False
        if self.takes_tables:
            return self.table_shape != "sd" and "cis" not in self.roles
        return "positions" in self.roles and not self.shared_positions

    def __str__(self) -> str:
        names = ", ".join(role for role, _ in self.arguments)
        return f"{names} -> cos, sin" if self.gives_tables else names

    def source(self, *, inv_freq: str) -> str:
        """The adapter; it needs ``torch`` and ``fn``.

        Args:
            inv_freq: an expression for the frequencies, where the tables are ours to make.
        """
        parts = []
        if self.takes_tables:
            parts.append(self._tables_source(inv_freq))
        body = self._gives_tables_source() if self.gives_tables else self._rotates_source()
        return "\n\n".join([*parts, body])

    def _tables_source(self, inv_freq: str) -> str:
        lines = [
            "def tables(x, positions):",
            f"    inv_freq = {inv_freq}",
            "    angle = positions[..., None].double().cpu() * inv_freq" + _WIDEN[self.tables],
        ]
        shape = _TABLE_SHAPES[self.table_shape]
        if "cis" in self.roles:
            lines[-1] = "    angle = positions[..., None].double().cpu() * inv_freq"
            lines.append("    cis = torch.polar(torch.ones_like(angle), angle)")
            lines.append(f"    return cis.to(torch.complex64){shape}.to(x.device)")
        else:
            lines.append("    cos, sin = angle.cos().to(x), angle.sin().to(x)")
            lines.append(f"    return cos{shape}, sin{shape}")
        return "\n".join(lines)

    def _positions(self) -> str:
        if self.axes == 1:
            return "positions[0]" if self.shared_positions else "positions"
        every = f"positions.expand({self.axes}, -1, -1)"
        return f"{every}[:, 0]" if self.shared_positions else every

    def _expression(self, names: dict[str, str]) -> str:
        return ", ".join(
            (f"{keyword}=" if keyword else "") + names[role] for role, keyword in self.arguments
        )

    def _gives_tables_source(self) -> str:
        names = {"x": _INTO[self.layout].format("x"), "positions": self._positions()}
        call = self._expression(names)
        shape = "[None, None]" if self.shared_positions else "[:, None]"
        widen = {
            "half": "\n    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)",
            "cat": "",
            "repeat": "",
        }[self.tables]
        turned = {
            "repeat": "torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2)",
        }.get(self.tables, "torch.cat((-y[..., n // 2 :], y[..., : n // 2]), -1)")
        return (
            "def rotate(x, positions):\n"
            f"    cos, sin = (table{shape} for table in fn({call})){widen}\n"
            "    n = cos.shape[-1]\n"
            "    y = x[..., :n]\n"
            f"    y = y * cos + {turned} * sin\n"
            "    return torch.cat((y, x[..., n:]), -1)"
        )

    def _rotates_source(self) -> str:
        into, back = _INTO[self.layout], _BACK[self.layout]
        first = "q" if self.takes_keys else "x"
        lines = []
        if self.takes_tables:
            names = "cis" if "cis" in self.roles else "cos, sin"
            lines.append(f"    {names} = tables({first}, positions)")
        values = {
            "x": into.format(first),
            "q": into.format("q"),
            "k": into.format("k"),
            "positions": self._positions(),
            "offset": "int(positions.min())",
            "seq_dim": str(_TOKEN_AXIS[self.layout]),
            "cos": "cos",
            "sin": "sin",
            "cis": "cis",
        }
        call = f"fn({self._expression(values)})"
        if self.takes_keys:
            lines += [
                f"    q, k = {call}",
                f"    return {back.format('q')}, {back.format('k')}",
            ]
            return (
                "def rotate_qk(q, k, positions):\n"
                + "\n".join(lines)
                + "\n\n\ndef rotate(x, positions):\n"
                + "    return rotate_qk(x, x.clone(), positions)[0]"
            )
        if not self.takes_ids:
            return self._placed_source(call)
        lines.append(f"    return {back.format(call)}")
        return "def rotate(x, positions):\n" + "\n".join(lines)

    def _placed_source(self, call: str) -> str:
        """It counts by itself, so tokens are put where they belong, and taken from there."""
        back = _BACK[self.layout]
        start = "int(positions.min())" if "offset" in self.roles else "0"
        plain = call.replace("int(positions.min())", "start")
        return (
            "def rotate(x, positions):\n"
            f"    start = {start}\n"
            "    size = int(positions.max()) + 1 - start\n"
            "    if size == x.shape[2]:\n"
            f"        return {back.format(plain)}\n"
            "    where = (positions - start)[:, None, :, None].expand_as(x)\n"
            "    whole = x.new_zeros(x.shape[0], x.shape[1], size, x.shape[3])\n"
            "    x = whole.scatter(2, where, x)\n"
            f"    return {back.format(plain)}.gather(2, where)"
        )


# --- reading how somebody wants to be called -------------------------------------------------------

_NAMES = (
    ("q", re.compile(r"^(x?q|q_|query|queries)(_states|_layer|_heads?)?$")),
    ("k", re.compile(r"^(x?k|k_|key|keys)(_states|_layer|_heads?)?$")),
    ("cis", re.compile(r"cis")),
    ("cos", re.compile(r"(^|_)cos")),
    ("sin", re.compile(r"(^|_)sin(e|$|_)")),
    ("offset", re.compile(r"offset|start_pos|position_start|^past_len")),
    ("seq_dim", re.compile(r"^seq(uence)?_(dim|axis)$")),
    ("positions", re.compile(r"pos(ition)?|(^|_)ids$")),
)

_USUAL = {
    1: ("x",),
    2: ("x, positions", "x, positions -> cos, sin", "x, seq_dim"),
    3: ("q, k, positions", "x, cos, sin", "q, k, cis"),
    4: ("q, k, cos, sin",),
}


def parse(form: str) -> Call:
    """What a user said: ``"x, positions"``, ``"q, k, cos, sin"``, ``"x, positions -> cos, sin"``.

    Raises:
        ValueError: anything else.
    """
    text, arrow, result = form.partition("->")
    names = [name.strip() for name in text.split(",")]
    given = "".join(result.split())
    if (
        all(name in ROLES for name in names)
        and len(set(names)) == len(names)
        and ("x" in names) != ("q" in names)
        and ("cos" in names) == ("sin" in names)
        and (not arrow or given == "cos,sin")
        and not (arrow and "q" in names)
    ):
        return Call(tuple((name, None) for name in names), gives_tables=bool(arrow))
    raise bad_value(
        "form must list the arguments, of x or q, k, positions, offset, seq_dim, cos, sin and cis, "
        f"such as 'x, positions' or 'q, k, cos, sin', but got {form!r}"
    )


def calls_of(fn: Callable[..., Any]) -> list[Call]:
    """Ways to call a function that its signature suggests, likeliest first."""
    try:
        # Calling a module passes through __call__, which takes anything.
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):
        return [parse(form) for forms in _USUAL.values() for form in forms]
    found = _named(signature)
    needed = [
        each
        for each in signature.parameters.values()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    usual = [parse(form) for form in _USUAL.get(len(needed), ())]
    if any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()):
        usual = [parse(form) for forms in _USUAL.values() for form in forms]
    return [*found, *(call for call in usual if str(call) not in {str(each) for each in found})]


def _named(signature: inspect.Signature) -> list[Call]:
    """The calls in which every parameter that must be passed has a name that says its role."""
    arguments: list[tuple[str, str | None]] = []
    seen: set[str] = set()
    for index, each in enumerate(signature.parameters.values()):
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        role = next((role for role, names in _NAMES if names.search(each.name.lower())), None)
        if index == 0 and role not in ("q", "x"):
            role = "x"
        optional = each.default is not each.empty
        if role is None or role in seen or (optional and role in ("q", "k") and index == 0):
            if optional:
                continue
            return []
        if role in ("positions", "offset") and seen & {"cos", "sin", "cis"}:
            # Left over from when the function itself indexed a table.
            if optional:
                continue
            return []
        if role == "offset" and "positions" in seen:
            continue
        seen.add(role)
        arguments.append((role, each.name if optional or each.kind is each.KEYWORD_ONLY else None))
    if ("cos" in seen) != ("sin" in seen) or not arguments:
        return []
    if "q" in seen and "k" not in seen:
        arguments = [("x" if role == "q" else role, keyword) for role, keyword in arguments]
    if "cos" in seen and "q" not in seen and "k" in seen:
        return []
    call = Call(tuple(arguments))
    if call.roles == {"x", "positions"}:
        # A model's own rotary module has just this signature and gives tables.
        return [call, replace(call, gives_tables=True)]
    return [call]
