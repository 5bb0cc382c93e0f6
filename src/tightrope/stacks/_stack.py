"""A stack: the arithmetic of one library, from a configuration to cosines and sines."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import bad_type, bad_value, public, unsupported
from .._namespace import operators
from .._tracing import needs_plain
from ..axes import Axes
from ..frequencies import RULES, Given, LongRoPE, Rule, length as checked_length
from ..positions import Positions, PositionsLike, as_positions, check_axes, written_out
from ._formulas import Row, constant_row, row_of


def cos_sin(
    at: torch.Tensor,
    inv_freq: torch.Tensor,
    divisor: Any,
    multiplier: Any,
    factor: Any,
    polar: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines; see ``cos_sin`` in :mod:`tightrope.ops.schema`."""
    if divisor is not None:
        at = at / divisor
    if multiplier is not None:
        at = at * multiplier
    angle = at * inv_freq
    if polar:
        cos, sin = torch.view_as_real(torch.polar(torch.ones_like(angle), angle)).unbind(-1)
    else:
        cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if factor is None else (cos * factor, sin * factor)


def length_of(where: Positions, tokens: int) -> int | None:
    """Return the largest position plus 1; None without positions."""
    if where.ids is None:
        count = tokens if where.add_index else 1
        return where.offset + count if count else None
    if torch.compiler.is_compiling():
        raise bad_value(
            "seq_len must be given in compiled code, as the frequencies of this stack depend on the "
            "largest position"
        )
    places = written_out(where, tokens)
    return math.ceil(places.max()) + 1 if places.numel() else None


#: How a stack was verified. RUN: the library's own code, run on the CPU, gave the same bits.
#: GIVEN_TABLES: it gave the same bits when this module used the library's cosines and sines, which
#: may differ from those computed here in the last bit. READ: the code was only read, because it
#: runs on a GPU; the compiler chooses which products are fused with a sum, so single results may
#: differ in the last bit.
RUN, GIVEN_TABLES, READ = "run", "run, given its tables", "read"

#: The stacks that :func:`tightrope.stacks.get` returns, by name.
BY_NAME: dict[str, Stack] = {}


@dataclass(frozen=True, repr=False)
class Stack:
    """The arithmetic of a library, from a configuration to a rotated tensor.

    Attributes:
        name: its name for :func:`get`.
        about: the library and the code path.
        source: files and version.
        verified: :data:`RUN`, :data:`GIVEN_TABLES` or :data:`READ`.
        rules: the formula of each frequency rule that it has, by the rule's name, or "default" for no rule: a function
            of ``_formulas`` by name, or its name and the only values of the rule's fields that it takes.
        rounding: where its rotation rounds, forward and backward; see :meth:`tightrope.RopeSpec.at`.
        table_dtype: the dtype of its cosines and sines; None for the dtype of the rotated tensor.
        dtype: the dtype that frequencies and angles are computed in.
        on_cpu: whether frequencies are computed on the CPU, whatever the device of the model.
        casts: whether casting a model, as in ``model.to(torch.bfloat16)``, rounds "frequencies", or
            "frequencies and positions", which then are multiplied in that dtype, or "tables"; "" if it
            rounds none of them. :meth:`cast` returns the stack of a model that was cast.
        polar: whether cosines and sines come from ``torch.polar``, which computes them one by one: they
            may differ in the last bit from those of ``torch.cos``, which uses vector instructions.
        cast_to: the dtype that the model was cast to, or None.
        length: the length by which rules that depend on one choose frequencies, where positions do not tell it: a
            server's, for rows of all lengths. "" for the largest position of a call, plus 1.
    """

    name: str
    about: str
    source: str
    verified: str
    rules: Mapping[str, Any] = dataclasses.field(hash=False)
    rounding: tuple[str, str] = ("each", "each")
    table_dtype: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    on_cpu: bool = False
    casts: str = ""
    polar: bool = False
    cast_to: torch.dtype | None = None
    length: str = ""

    def __repr__(self) -> str:
        cast = "" if self.cast_to is None else f".cast({self.cast_to})"
        return f"<Stack {self.name!r}{cast}: {self.about}>"

    @public("cast")
    def cast(self, dtype: torch.dtype) -> Stack:
        """Return the stack of a model that was cast to a dtype, as by ``model.to(dtype)``.

        Raises:
            TypeError: not a floating dtype.
            ValueError: casting a model changes neither frequencies nor tables of this stack.

        >>> get("transformers").cast(torch.bfloat16)
        <Stack 'transformers'.cast(torch.bfloat16): transformers, eager, as in Llama>
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise bad_type(f"dtype must be a floating dtype but got {dtype!r}")
        if not self.casts:
            raise bad_value(
                f"stack {self.name!r} must not be cast: casting a model does not change it"
            )
        if self.casts != "tables":
            return dataclasses.replace(self, cast_to=dtype)
        # Products with tables in float32 are not rounded; those of two 16-bit tensors are.
        rounding = ("each", "each") if self.rounding == ("wide", "each") else self.rounding
        return dataclasses.replace(self, cast_to=dtype, table_dtype=dtype, rounding=rounding)

    @public("frequencies")
    def frequencies(
        self, spec: Any, seq_len: int | None = None, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, float]:
        """Return the frequencies of the pairs and the factor on cosines and sines.

        Args:
            spec: a :class:`tightrope.RopeSpec`.
            seq_len: length of the sequence, for rules that depend on it; see :attr:`length`.
            device: the device of the model.

        Returns:
            Radians per position ``(pairs,)``, in the stack's dtype, and the attention scaling. A stack
            that applies :class:`tightrope.frequencies.Linear` to positions returns unscaled frequencies.

        Raises:
            NotImplementedError: a rule, or a parameter of a rule, that the stack does not have.
            TypeError, ValueError: an invalid length.

        >>> from tightrope import RopeSpec
        >>> get("transformers").frequencies(RopeSpec(4))
        (tensor([1.0000, 0.0100]), 1.0)
        """
        length = None if seq_len is None else checked_length(seq_len)
        row = self.row(spec, length, torch.device(device))
        return row.inv_freq, row.attention_scaling

    @public("tables")
    def tables(
        self,
        spec: Any,
        positions: PositionsLike,
        dtype: torch.dtype = torch.float32,
        *,
        tokens: int | None = None,
        seq_len: int | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, one entry per pair, as the stack's rotation reads them.

        Args:
            spec: a :class:`tightrope.RopeSpec`.
            positions: see :meth:`tightrope.RopeSpec.at`.
            dtype: the dtype of the tensors to rotate.
            tokens: number of tokens, if the positions do not determine it (None or an int).
            seq_len: length of the sequence, for rules that depend on it; by default the largest position
                of all rows, plus 1; see :attr:`length`.
            device: the device of the tables; by default that of the positions, else the CPU.

        Returns:
            Cosines and sines ``(rows|1, 1, tokens, pairs)``, attention scaling included, in
            :attr:`table_dtype`, or in ``dtype`` if that is None.

        Raises:
            NotImplementedError: a rule, or a parameter of a rule, that the stack does not have.
            TypeError, ValueError: invalid positions or lengths.

        >>> from tightrope import RopeSpec
        >>> cos, sin = get("transformers").tables(RopeSpec(64), None, torch.bfloat16, tokens=16)
        >>> cos.shape, cos.dtype
        (torch.Size([1, 1, 16, 32]), torch.bfloat16)
        """
        where = as_positions(positions)
        check_axes(where, 1 if spec.axes is None else spec.axes.count)
        if device is None:
            device = torch.device("cpu") if where.ids is None else where.ids.device
        if tokens is None:
            if where.add_index:
                raise bad_value(
                    "tokens must be given, as the positions do not determine their number"
                )
            tokens = 1 if where.ids is None else where.ids.shape[2]
        length = None if seq_len is None else checked_length(seq_len)
        by_length = spec.scaling is not None and spec.scaling.by_length
        if length is None and by_length and not self.length:
            length = length_of(where, tokens)
        row = self.row(spec, length, torch.device(device))
        return self.tables_of(row, spec.axes, where, tokens, dtype)

    def check(self, spec: Any, seq_len: int | None) -> None:
        """Raise an error if the stack does not have the frequency rule of a spec."""
        rule = spec.scaling
        if rule is None or not rule.by_length or seq_len is not None or self.length:
            self.row(spec, seq_len, torch.device("cpu"))
        else:
            self._formula(rule)

    def tables_of(
        self, row: Row, axes: Axes | None, where: Positions, tokens: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return :meth:`tables` of frequencies, on their device, for checked arguments."""
        inv_freq, scaling = row.inv_freq, row.attention_scaling
        at = (
            written_out(where, tokens, inv_freq.device).detach().to(inv_freq.device, inv_freq.dtype)
        )
        if axes is not None:
            at = at[[axis for axis, _, _ in axes.pairs]].movedim(0, -1)
        else:
            at = at[0, :, :, None]
        numbers = row.divisor, row.multiplier, None if scaling == 1.0 else scaling
        if torch.compiler.is_compiling() and not needs_plain():
            # Inductor's own cosines have other bits, and it drops roundings to 16 bits in between.
            scalars = [
                None if each is None else torch.tensor(each, dtype=torch.float64, device="cpu")
                for each in numbers
            ]
            cos, sin = operators.cos_sin.default(at.contiguous(), inv_freq, *scalars, self.polar)
        else:
            cos, sin = cos_sin(at, inv_freq, *numbers, self.polar)
        kept = self.table_dtype or dtype
        return cos[:, None].to(kept), sin[:, None].to(kept)

    def row(self, spec: Any, seq_len: int | None, device: torch.device) -> Row:
        """Return the frequencies of a spec on a device, as the stack computes them."""
        rule, formula = spec.scaling, self._formula(spec.scaling)
        if seq_len is None and self.length and rule is not None and rule.by_length:
            raise bad_value(
                f"seq_len must be given for {type(rule).__name__} with stack {self.name!r}, which chooses frequencies by "
                f"one length: {self.length}"
            )
        where = torch.device("cpu") if self.on_cpu else device
        rounded = self.cast_to if self.cast_to and self.casts != "tables" else self.dtype
        kept = rounded if "positions" in self.casts else self.dtype
        dtypes = self.dtype, rounded, kept
        if not torch.compiler.is_compiling():
            row = row_of(
                formula, rule, spec.axes, spec.rotary_dim, spec.base, seq_len, where, dtypes
            )
            return row._replace(inv_freq=row.inv_freq.to(device))
        if rule is None or not rule.by_length:
            seq_len = None
        elif isinstance(rule, LongRoPE) and not self.length:
            seq_len = rule.regime(seq_len)
        if seq_len is not None:
            seq_len = operator.index(seq_len)  # NTK by length needs another graph for each length
        numbers, *others = constant_row(formula, *spec.words.constants, seq_len, where, dtypes)
        return Row(torch.tensor(numbers, dtype=kept, device=device), *others)

    def _formula(self, rule: Rule | None) -> str:
        """Return the name of the formula for a rule."""
        if isinstance(rule, Given):
            return "given"
        known = {RULES[name]: name for name in self.rules if name in RULES}
        formula = self.rules.get("default" if rule is None else known.get(type(rule), ""))
        if formula is None:
            names = ", ".join(sorted(kind.__name__ for kind in known))
            raise unsupported(
                f"scaling must be None, Given or a rule that stack {self.name!r} has "
                f"({names or 'none'}) but got {rule!r}"
            )
        name: str
        name, only = (formula, {}) if isinstance(formula, str) else formula
        for field, value in only.items():
            if getattr(rule, field) != value:
                raise unsupported(
                    f"{field} must be {value!r}, the only value that this stack supports, but got "
                    f"{getattr(rule, field)!r}"
                )
        return name


def names() -> tuple[str, ...]:
    """Return the names of all stacks.

    >>> "vllm" in names()
    True
    """
    return tuple(BY_NAME)


@public("stacks.get")
def get(name: str) -> Stack:
    """Return the stack of that name.

    Raises:
        ValueError: an unknown name; the message lists all.

    >>> get("meta").rounding
    ('wide', 'wide')
    """
    return named(name)


def named(stack: object) -> Stack:
    """Return a stack given by name or as a :class:`Stack`; errors get the name of the calling function."""
    if isinstance(stack, Stack):
        return stack
    found = BY_NAME.get(stack) if isinstance(stack, str) else None
    if found is None:
        raise bad_value(f"stack must be one of {', '.join(BY_NAME)} but got {stack!r}")
    return found
