"""How a rotary function takes its tensors, as a value; and what it makes of the tables it is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from ._rotation import Rotation

#: How cosines and sines arrive: as two arguments; as one of complex numbers; as one whose halves are
#: sines and cosines; as one with cosines at 0 and sines at 1, for x with its heads still flat.
CARRIERS = ("pair", "complex", "sines first", "stack")


@dataclass(frozen=True)
class Form:
    """A signature and what was found out about it.

    Attributes:
        parameters: all names, in order, without self.
        rotated: those of the tensors that rotate.
        tables: that of the cosines and that of the sines; or one name.
        carrier: one of CARRIERS.
        unsqueeze: the parameter that says where tables get a dimension, if there is one.
        rows: the parameter that says which rows of the tables, if there is one.
        ignored: parameters that change nothing, whatever they are.
        method: whether the function takes self.
    """

    parameters: tuple[str, ...]
    rotated: tuple[str, ...]
    tables: tuple[str, ...]
    carrier: str
    unsqueeze: str | None = None
    rows: str | None = None
    ignored: frozenset[str] = frozenset()
    method: bool = False

    def split(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, of what a call gives as tables."""
        if self.carrier == "pair":
            return values[self.tables[0]], values[self.tables[1]]
        table = values[self.tables[0]]
        if self.carrier == "complex":
            parts = torch.view_as_real(table)
            return parts[..., 0], parts[..., 1]
        if self.carrier == "stack":
            return table[0].transpose(0, 1), table[1].transpose(0, 1)
        sin, cos = table.chunk(2, dim=-1)
        return cos, sin

    def join(self, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, torch.Tensor]:
        """Arguments that :meth:`split` makes these of: for probes."""
        if self.carrier == "pair":
            return {self.tables[0]: cos, self.tables[1]: sin}
        if self.carrier == "complex":
            value = torch.complex(cos, sin)
        elif self.carrier == "stack":
            value = torch.stack((cos.transpose(0, 1), sin.transpose(0, 1)))
        else:
            value = torch.cat((sin, cos), dim=-1)
        return {self.tables[0]: value}


@dataclass(frozen=True)
class Candidate:
    """What a function was recognised as.

    Attributes:
        form, rotation: see there.
        shapes: what was tried and found right: (dimensions of x, dimensions of the tables, the value
            of ``form.unsqueeze`` or None, where the tables get a dimension, from the end, or None).
        ones: which tables of three dimensions were found to broadcast against x of four as they are:
            "1s", [1, tokens, width] with heads before tokens, or "s1", [tokens, 1, width] behind them.
            Of these nothing is known but the shapes themselves.
        tokens: how x with another number of tokens than the tables is met: "same", it is not;
            "prefix", the last tokens rotate and the others pass; "suffix", by the last rows.
        keeps_dtype: whether results have the dtype of x, or the wider of x's and the tables'.
        alone: what comes back where the second tensor is None: "pair", (y, None); "one", y; None where
            that is an error.
        trailing: whether tensors after the second may be None, and then nothing comes back for them.
    """

    form: Form
    rotation: Rotation
    shapes: frozenset[tuple[int, int, int | None, int | None]]
    ones: frozenset[str] = frozenset()
    tokens: str = "same"
    keeps_dtype: bool = False
    alone: str | None = None
    trailing: bool = False

    def place(self, x: torch.Size, table: torch.Size, given: int | None) -> int | None:
        """Where tables get a dimension in a call, from the end; None where they get none.

        LookupError for shapes that were not tried.
        """
        for dims, table_dims, value, place in self.shapes:
            if (len(x), len(table), given) == (dims, table_dims, value):
                return place
        if len(x) == 4 and len(table) == 3 and given is None:
            if "1s" in self.ones and table[:2] == (1, x[2]):
                return None
            if "s1" in self.ones and table[:2] == (x[1], 1):
                return None
        raise LookupError("shapes that were not tried")

    def __str__(self) -> str:
        words = [str(self.rotation)]
        carrier = {
            "complex": "complex tables",
            "sines first": "sines and cosines in one table",
            "stack": "cosines and sines stacked",
        }.get(self.form.carrier)
        if carrier:
            words.append(carrier)
        count = len(self.form.rotated)
        words.append(f"of {', '.join(self.form.rotated)}" if count > 1 else "of one tensor")
        places = sorted({place for *_, place in self.shapes if place is not None})
        if self.form.unsqueeze:
            words.append(f"heads where {self.form.unsqueeze} says")
        elif places == [-3]:
            words.append("heads before tokens")
        elif places == [-2]:
            words.append("tokens before heads")
        else:
            words.append("tables broadcast as they are")
        if self.form.rows:
            words.append(f"rows by {self.form.rows}")
        if self.tokens != "same":
            words.append(
                "tokens in front pass" if self.tokens == "prefix" else "last rows of the tables"
            )
        words.append("in the dtype of x" if self.keeps_dtype else "in the wider dtype")
        return ", ".join(words)


def unwrapped(function: Any) -> Callable[..., Any]:
    """The plain function behind a static method, a bound method, or a module that wraps one."""
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    elif isinstance(function, torch.nn.Module):
        return unwrapped(function.forward)
    elif inspect.ismethod(function):
        function = function.__func__
    return cast(Callable[..., Any], function)


def signature(function: Any) -> inspect.Signature | None:
    """The signature that callers see, or None where there is none to see."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
