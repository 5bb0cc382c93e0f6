"""The result of recognising a rotary function, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import torch

from ..forms import COS_SIN, FORMS, Argument, Call, Rotation

# The end of the description of a rotation whose bits are those of the function.
TO_THE_BIT = "to the bit"


class Bits(NamedTuple):
    """The choices that determine the bits of a rotation by given tables.

    Attributes:
        rounding: where results and gradients round; see :func:`tightrope.functional.rotate`.
        dense: for each tensor, whether its result and its gradient are contiguous; otherwise they have
            the strides of x and of the gradient of the result. The bits of later sums depend on the
            strides. If empty, (False, False) for every tensor.
        gradients: whether the gradients of q and k have the bits of the original too.
        tables: whether the gradients of the tables do.
        cast: "tables" if the tables are cast to the dtype of x first; "float64" if x and the tables are
            cast to float64 first, and results to their dtype last; "" for neither.
        by_batch: whether the choices hold only if sequences lie one after the other in memory; else for
            any strides of x.
    """

    rounding: tuple[str, str] = ("once", "once")
    dense: tuple[tuple[bool, bool], ...] = ()
    gradients: bool = True
    tables: bool = True
    cast: str = ""
    by_batch: bool = False

    @classmethod
    def of(cls, rounding: Sequence[str], dense: Sequence[Sequence[bool]], *others: Any) -> Bits:
        """Make the choices from lists, as JSON has them."""
        forward, backward = rounding
        return cls((forward, backward), tuple((y, grad) for y, grad in dense), *others)

    def strides(self, which: int) -> tuple[bool, bool]:
        """Return ``dense`` of one tensor."""
        return self.dense[which] if self.dense else (False, False)


def _dtype(name: str) -> Any:
    """The dtype of a name such as "torch.float32"; other texts themselves."""
    return getattr(torch, name.removeprefix("torch.")) if name.startswith("torch.") else name


def same(one: Any, other: Any) -> bool:
    """Return whether two arguments are the same: 1 is 1.0, True is not; tensors are not compared."""
    if one is other:
        return True
    kinds = {type(one), type(other)}
    # Zeros may differ in sign.
    return (kinds <= {int, float} or kinds == {str}) and one == other != 0


def tokens_first(x: torch.Size, table: torch.Size) -> bool:
    """Return whether tables fit only x of the layout (seq, batch, heads, dim)."""
    return (
        len(x) == len(table) == 4 and table[1:3] == (1, 1) and table[0] == x[0] and 1 not in x[:3]
    )


@dataclass(frozen=True)
class Candidate:
    """A rotary function as it was recognised: how to call it and what it computes.

    Attributes:
        call: how it is called.
        rotation: what it computes.
        shapes: the ranks that were tried and match: (rank of x, rank of the tables, the value of
            unsqueeze_dim or None, the dimension at which the tables are unsqueezed, counted from the
            end, or None).
        ones: the tables that broadcast against x of rank four without unsqueezing and were tried only
            in this exact shape: "1sd" for x (batch, heads, seq, dim), "s1d" and, with a row for each
            head, "shd" for (batch, seq, heads, dim), "s11d" for (seq, batch, heads, dim). "11sd" or "1s1d":
            the function makes its tables itself, for x (batch, heads, seq, dim) or (batch, seq, heads,
            dim).
        tokens: what happens if x and the tables differ in the number of tokens: "same", an error;
            "prefix", the last tokens rotate and the leading ones pass through; "suffix", the last
            rows of the tables are used.
        dtype: the dtype of results: "x", that of x; "promoted", the one that x and the tables promote
            to; or one dtype, whatever the arguments have.
        excluded: the parameter that is the number of tokens at the end of k that pass through.
        repeats: whether a k with several times as many tokens as q takes the tables several times, one
            after the other.
        alone: the result if the second tensor is None: "pair" for (y, None), "one" for y; None for
            any other outcome, or if the function does not take exactly two tensors.
        ignored: parameters that do not affect the result.
        trailing: whether tensors after the second may be None; they are then left out of the result.
        bits: (dtype of x, dtype of the tables, choices) for each pair of dtypes for which the
            operator can equal the original bit for bit, with these choices.
        channels_first: whether the last two dimensions of x are (dim, seq) instead of (seq, dim).
        constants: keyword arguments that select this rotation among several of the function.
        calls: for a method, the methods of its class that it calls.
    """

    call: Call
    rotation: Rotation
    shapes: frozenset[tuple[int, int, int | None, int | None]]
    ones: frozenset[str] = frozenset()
    tokens: str = "same"
    dtype: str | torch.dtype = "promoted"
    excluded: str | None = None
    repeats: bool = False
    alone: str | None = None
    ignored: frozenset[str] = frozenset()
    trailing: bool = False
    bits: tuple[tuple[torch.dtype, torch.dtype, Bits], ...] = ()
    channels_first: bool = False
    constants: tuple[tuple[str, Any], ...] = ()
    calls: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The candidate as plain data, for JSON; :meth:`from_dict` is the inverse."""
        call = self.call
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "call": [call.form.name, call.arguments, call.method],
            "rotation": astuple(self.rotation),
            "shapes": sorted(self.shapes, key=str),
            "ones": sorted(self.ones),
            "ignored": sorted(self.ignored),
            "dtype": str(self.dtype),
            "bits": [(str(x), str(table), bits) for x, table, bits in self.bits],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        """Make a candidate from :meth:`to_dict`."""
        form, arguments, method = values["call"]
        return cls(
            **{
                **values,
                "call": Call(FORMS[form], tuple(Argument(*each) for each in arguments), method),
                "rotation": Rotation(*values["rotation"]),
                "shapes": frozenset(map(tuple, values["shapes"])),
                "ones": frozenset(values["ones"]),
                "ignored": frozenset(values["ignored"]),
                "dtype": _dtype(values["dtype"]),
                "bits": tuple(
                    (_dtype(x), _dtype(table), Bits.of(*bits)) for x, table, bits in values["bits"]
                ),
                "constants": tuple(map(tuple, values["constants"])),
                "calls": tuple(values["calls"]),
            }
        )

    def bits_of(
        self,
        dtype: torch.dtype,
        table_dtype: torch.dtype,
        needs_grad: bool,
        rounding: str = "model",
    ) -> Bits | None:
        """The choices with which the operator equals the original bit for bit; None if none does.

        Args:
            rounding: another rounding than "model" is used whatever the bits of the original.
        """
        if rounding != "model":
            return Bits((rounding, rounding))
        for x, table, bits in self.bits:
            if (x, table) == (dtype, table_dtype):
                return None if needs_grad and not bits.gradients else bits
        return None

    def result_dtype(self, x: torch.dtype, table: torch.dtype) -> torch.dtype:
        """The dtype of results for a dtype of x and one of the tables."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return x if self.dtype == "x" else torch.promote_types(x, table)

    def place(self, x: torch.Size, table: torch.Size, given: int | None) -> int | None:
        """The dimension at which a call unsqueezes its tables, counted from the end; None for none.

        Raises:
            LookupError: these shapes were not tried.
        """
        if tokens_first(x, table):
            if "s11d" in self.ones and given is None:
                return None
            raise LookupError("shapes that were not tried")
        if len(x) == len(table) == 4 and self.ones & {"11sd", "1s1d"}:
            return None
        for dims, table_dims, value, place in self.shapes:
            if (len(x), len(table), given) == (dims, table_dims, value):
                return place
        if len(x) == 4 and len(table) == 3 and given is None:
            if "1sd" in self.ones and table[:2] == (1, x[2]):
                return None
            if "s1d" in self.ones and table[:2] == (x[1], 1):
                return None
            if "shd" in self.ones and table[:2] == x[1:3]:
                return None
        raise LookupError("shapes that were not tried")

    def ranks(self) -> list[int]:
        """The ranks of x that were tried; see :meth:`place`."""
        tried = {dims for dims, *_ in self.shapes} | {4 for _ in self.ones}
        return sorted(rank - self.call.form.flat for rank in tried)

    def __str__(self) -> str:
        words = [str(self.rotation)]
        if self.call.form is not COS_SIN and self.call.form.takes_tables:
            words.append(self.call.form.name)
        *first, last = self.call.rotated
        words.append(f"{', '.join(first)} and {last}" if first else "one tensor")
        words.append(self._layout())
        if positions := self.call.parameter("positions"):
            made = "made from" if self.call.makes_its_tables else "indexed by"
            words.append(f"cos/sin {made} {positions}")
        if self.tokens == "prefix":
            words.append("extra leading tokens pass through")
        elif self.tokens == "suffix":
            words.append("last rows of cos/sin if x is shorter")
        if self.excluded:
            words.append(f"the last {self.excluded} keys pass through")
        if self.repeats:
            words.append("cos/sin repeated for more keys")
        kinds = {"x": "dtype of x", "promoted": "promoted dtype"}
        words.append(f"result in {kinds.get(str(self.dtype), str(self.dtype)[6:])}")
        words.append(TO_THE_BIT if self.bits else "to rounding")
        return ", ".join(words)

    def _layout(self) -> str:
        if unsqueeze_dim := self.call.parameter("unsqueeze_dim"):
            return f"heads axis by {unsqueeze_dim}"
        if self.channels_first:
            return "(batch, heads, dim, seq)"
        if self.call.makes_its_tables:
            behind = "1s1d" in self.ones
            return "(batch, seq, heads, dim)" if behind else "(batch, heads, seq, dim)"
        places = {place for *_, place in self.shapes if place is not None}
        if places == {-3}:
            return "(batch, heads, seq, dim)"
        if places == {-2}:
            batched = any(dims == 4 for dims, *_ in self.shapes)
            return "(batch, seq, heads, dim)" if batched else "(seq, heads, dim)"
        return "layout by the rank of cos/sin" if places else "cos/sin broadcast to x"
