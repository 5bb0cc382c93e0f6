"""How rotary functions in the field are called and what they compute, as tables of rows.

A function is of a kind if one row of each table computes the same: a :class:`Form` (how the angles come), a
:class:`Turn` (what happens to a pair of channels), an :class:`Arithmetic` (where it rounds) and one of SHAPES.
`_verify` tries the rows on random tensors; `tightrope_tools.audit` tries the forms, roles and shapes on unknown functions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Both = tuple[torch.Tensor, torch.Tensor]

#: How tables with one entry per pair are widened. Full width: "cat" repeats the whole table, "repeat" each entry.
#: Half width: "half" has each entry once.
WIDTHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cat": lambda table: torch.cat((table, table), -1),
    "repeat": lambda table: table.repeat_interleave(2, -1),
    "half": lambda table: table,
}


class Form(NamedTuple):
    """A way in which functions take their angles.

    Attributes:
        roles: the roles of the arguments that hold them, also their usual parameter names.
        build: if the caller passes cosines and sines, makes these arguments of them.
        read: the inverse of ``build``; it may raise any error for arguments of another form. Without it, `patch` leaves
            functions of this form as they are.
        narrow: whether the arguments may have 16 bits.
        widths: how they may hold the entry of each pair, likeliest first; keys of WIDTHS.
        gives_tables: whether the function returns (cos, sin) and rotates nothing.
        others: the roles that further arguments may have, beside those that rotate.
    """

    roles: tuple[str, ...]
    build: Any = None
    read: Any = None
    narrow: bool = True
    widths: tuple[str, ...] = tuple(WIDTHS)
    gives_tables: bool = False
    others: tuple[str, ...] = ("seq_dim", "positions", "offset", "cu_seqlens", "max_seqlen")


def _parts(table: torch.Tensor) -> Both:
    cos, sin = torch.view_as_real(table).unbind(-1)  # raises an error for real tables
    return cos, sin


def _matrices(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor]:
    entries = cos[..., ::2], -sin[..., ::2], sin[..., 1::2], cos[..., 1::2]
    return (torch.stack(entries, -1).unflatten(-1, (2, 2)),)


def _of_matrices(table: torch.Tensor) -> Both:
    (a, b), (c, d) = (row.unbind(-1) for row in table.unbind(-2))
    return torch.stack((a, d), -1).flatten(-2), torch.stack((-b, c), -1).flatten(-2)


COS_SIN, COMPLEX, ANGLES = "cos and sin", "a complex table", "angles"
#: The forms, by their names in reports; if a signature fits several, the likeliest first.
FORMS = {
    "positions": Form(("positions",), others=("seq_dim", "offset")),
    "positions, for tables": Form(("positions",), gives_tables=True, others=()),
    COS_SIN: Form(("cos", "sin"), lambda cos, sin: (cos, sin), lambda cos, sin: (cos, sin)),
    "a pair (cos, sin)": Form(("pair",), lambda *both: (both,), lambda pair: (pair[0], pair[1])),
    "cosines and sines stacked": Form(
        ("stacked",), lambda *both: (torch.stack(both),), lambda table: table.unbind(0)
    ),
    COMPLEX: Form(
        *(("cis",), lambda *both: (torch.complex(*both),), _parts),
        *(False, ("half",)),
    ),
    "2 x 2 matrices": Form(("matrix",), _matrices, _of_matrices, widths=("repeat",)),
    "sines and cosines in one table": Form(
        ("sin_cos",),
        lambda cos, sin: (torch.cat((sin, cos), -1),),
        lambda table: table.chunk(2, -1)[::-1],
    ),
    "cosines and sines in one table": Form(
        ("cos_sin",),
        lambda cos, sin: (torch.cat((cos, sin), -1),),
        lambda table: table.chunk(2, -1),
    ),
    ANGLES: Form(
        *(("angles",), lambda cos, sin: (torch.atan2(sin, cos),)),
        *(lambda t: (t.cos(), t.sin()), False),
    ),
    "a pair (sin, cos)": Form(("reversed_pair",), lambda cos, sin: ((sin, cos),)),
    "packed rows": Form(("cu_seqlens",), others=("seq_dim", "max_seqlen")),
    "an offset": Form(("offset",), others=("seq_dim",)),
    "no positions": Form((), others=("seq_dim",)),
}


class Turn(NamedTuple):
    """A way in which functions turn pairs of channels.

    Attributes:
        words: the description in reports.
        interleaved: whether adjacent channels form pairs.
        tables: the operator's format of the entries that are read.
        read: selects the entries that the function reads.
        as_halves: whether adjacent pairs are returned as halves.
        last: whether narrow tables turn the last channels instead of the first.
    """

    words: str
    interleaved: bool
    tables: str
    read: Callable[..., Both] = lambda cos, sin: (cos, sin)
    as_halves: bool = False
    last: bool = False


def _first(cos: torch.Tensor, sin: torch.Tensor) -> Both:
    return cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]


TURNS = (
    Turn("halves (rotate_half)", False, "full"),
    Turn("adjacent pairs", True, "full"),
    Turn("adjacent pairs by the first half of the entries", True, "half", _first),
    Turn("adjacent pairs by the first half of the entries, as halves", True, "half", _first, True),
    Turn("adjacent pairs by one entry each", True, "half"),
    Turn("halves by one entry for each pair", False, "half"),
    Turn(
        "adjacent pairs by even cosines and odd sines",
        True,
        "half",
        lambda cos, sin: (cos[..., ::2], sin[..., 1::2]),
    ),
    Turn("halves, by the negative angles", False, "full", lambda cos, sin: (cos, -sin)),
    Turn("adjacent pairs of the last channels by one entry each", True, "half", last=True),
)


class Arithmetic(NamedTuple):
    """The places where a function rounds.

    Attributes:
        rounding: forward and backward; see :meth:`tightrope.RopeSpec.at`.
        cast: "tables" if tables are cast to the dtype of x first, "float64" if everything is computed in it.
        result: the dtype of results; None for that of x.
        dense: for each result, whether it is contiguous instead of having the strides of x, and whether the gradient
            is.
        gradients, tables: whether the gradients of x, and those of the tables, have the function's bits too.
    """

    rounding: tuple[str, str]
    cast: str = ""
    result: torch.dtype | None = None
    dense: tuple[tuple[bool, bool], ...] = ((False, False),) * 3
    gradients: bool = True
    tables: bool = True


ARITHMETICS = (
    Arithmetic(("each", "each")),
    Arithmetic(("wide", "wide")),
    Arithmetic(("wide", "each")),
    Arithmetic(("each", "each"), "tables"),
    Arithmetic(("each", "each"), "float64"),
)


class Shape(NamedTuple):
    """Letters for the dimensions of x and of its tables.

    b is rows, h heads, s tokens, d channels; f has the channels of all heads, and S is two tokens more than s. Tables align
    with x at the last dimension, if need be after an unsqueeze.
    """

    x: str
    table: str


SHAPES = tuple(
    Shape(*text.split("/"))
    for text in (
        "bhsd/bsd bshd/bsd bshd/sd bhsd/sd bhsd/b1sd bshd/bs1d bsd/bsd bsd/sd shd/sd hsd/sd hsd/1sd shd/s1d bhsd/bhsd "
        "bhsd/1sd bshd/s1d sbhd/s11d bsf/s11d bhSd/sd bhSd/b1sd"
    ).split()
)
#: The shapes of tables among them that do not differ by head, likeliest first.
TABLE_SHAPES = tuple(dict.fromkeys(shape.table for shape in SHAPES if "h" not in shape.table))


def fits(shape: Shape, unsqueeze: int | None) -> bool:
    """Return whether tables fit x, after an unsqueeze at a dimension from the end unless that is None."""
    table, x = shape.table, shape.x.replace("bsf", "sbhd")
    if unsqueeze is not None:
        at = len(table) + 1 + unsqueeze
        table = f"{table[:at]}1{table[at:]}"
    pairs = zip(table[::-1], x[::-1].lower())
    return len(table) <= len(x) and all(one in ("1", other) for one, other in pairs)


# --- the roles of parameters ----------------------------------------------------------------------

#: Parameters that select one of several rotations, or where tables go -> the values that are tried. So are both values
#: of each parameter that is True or False by default.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "unsqueeze_dim": (1, 2, 0),
    "use_real_unbind_dim": (-1, -2),
    "sequence_dim": (2, 1),
}
#: Names of parameters that hold cosines, or sines; and those that hold both in any form.
COS_SIN_NAMES = re.compile(r"cos|sin(?!us)")
TABLE_NAMES = re.compile(r"sinus|freq|cis|rope|rotary|emb(ed(ding)?)?s?$|^angles?$|^theta$|^pe$")
#: Role -> the names of parameters that suggest it, in lower case; if a name suggests several, the first counts. The last
#: have no role in a rotation: a length and a number of channels are for functions that make tables.
ROLES = {
    "q": re.compile(r"^(x?q|q_|query|queries)(_states|_layer|_heads?)?$"),
    "k": re.compile(r"^(x?k|k_|key|keys)(_states|_layer|_heads?)?$"),
    "cu_seqlens": re.compile(r"^cu_?(seq_?)?len|(^|_)start_loc$|seq_loc$"),
    "max_seqlen": re.compile(r"^max_?seq_?len"),
    "offset": re.compile(r"offset|start_pos|position_start|^past_len"),
    "seq_dim": re.compile(r"(^|_)seq(uence)?_(dim|axis)$"),
    "positions": re.compile(r"pos(ition)?|(^|_)ids$"),
    "length": re.compile(r"len|^end$|^n$|size$"),
    "head_dim": re.compile(r"dim$|^d$"),
    "other": re.compile(r"config|mask|cache|past_key|^grid_(sizes?|thw)$"),
}


def role_of(name: str) -> str | None:
    """The role that a parameter's name suggests; None for tables and unknown names."""
    return next((role for role, names in ROLES.items() if names.search(name.lower())), None)


class Roles(NamedTuple):
    """The parameters of a function.

    Attributes:
        names: all of them, without self.
        xs: those that rotate, one to three.
        tables: those that hold cosines and sines, in the order of the form.
        options: those of which several values are tried.
        rows: the parameter that selects rows of the tables, if there is one.
        defaults: the defaults of all that have one. Other parameters must keep theirs.
        method: whether the function takes self first.
    """

    names: tuple[str, ...]
    xs: tuple[str, ...]
    tables: tuple[str, ...]
    options: tuple[str, ...]
    rows: tuple[str, ...]
    defaults: dict[str, Any]
    method: bool

    def rounding(self, options: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of options without the place of an unsqueeze, which does not change where results round."""
        return tuple(value for name, value in zip(self.options, options) if name != "unsqueeze_dim")


def roles(function: Any, method: bool = False, given: str = "") -> Roles | None:
    """The roles of a rotary function's parameters, by their names; None if it has others.

    Args:
        method: whether the function takes self first.
        given: roles by position instead, separated by spaces: "x" rotates, "cos", "sin" and "table" hold them, and "-"
            keeps its default.
    """
    parameters = [*inspect.signature(function).parameters.values()][int(method) :]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return None
    parameters = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    held = given.split() or [_role(each) for each in parameters]
    if len(held) != len(parameters):
        return None

    def having(*wanted: str) -> tuple[str, ...]:
        return tuple(p.name for role in wanted for p, own in zip(parameters, held) if own == role)

    of_tables = sorted(role for role in held if role in ("cos", "sin", "table"))
    if not 1 <= held.count("x") <= 3 or of_tables not in (["table"], ["cos", "sin"]):
        return None
    return Roles(
        names=tuple(each.name for each in parameters),
        xs=having("x"),
        tables=having("cos", "sin", "table"),
        options=having("option"),
        rows=having("rows")[:1],
        defaults={p.name: p.default for p in parameters if p.default is not p.empty},
        method=method,
    )


def _role(parameter: inspect.Parameter) -> str:
    """The role that a name suggests; "-" for a parameter that keeps its default."""
    name, needed = parameter.name, parameter.default in (None, parameter.empty)
    if name in OPTIONS or isinstance(parameter.default, bool):
        return "option"
    if needed and (found := COS_SIN_NAMES.search(name)):
        return found[0]
    if needed and TABLE_NAMES.search(name):
        return "table"
    if parameter.default is parameter.empty:
        return "rows" if role_of(name) == "positions" else "x"
    return "x" if role_of(name) == "k" else "-"
