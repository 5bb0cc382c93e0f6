"""The arithmetic of other libraries: their frequencies, tables of cosines and sines, and roundings.

The angles of this library are exact, so the bits of a rotation differ from those of code that
computes frequencies and angles in float32. To compare with such code, or to extend a KV cache that
it wrote, use the arithmetic of that code: ``spec.at(positions, stack="vllm")``. :func:`names` lists
the stacks; :func:`get` returns a stack, with the files and the version that it follows.

Frequencies and tables are computed by the torch functions that the stack itself calls, in the same
order, so their bits are those of the stack on the same device. On another device ``pow``, ``cos`` and
``sin`` may differ in the last bit, and so may a division by a number, which CUDA replaces by a product
with its reciprocal.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ._errors import bad_type, bad_value, public, unsupported
from ._namespace import operators
from ._tracing import Constant, needs_plain, value_of
from .axes import Axes
from .frequencies import (
    DynamicNTK,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Rule,
    YaRN,
    length as checked_length,
)
from .positions import Positions, PositionsLike, as_positions, check_axes, widened

__all__ = ["Stack", "get", "names"]


class Spec(Protocol):
    """The fields of :class:`tightrope.RopeSpec` that determine frequencies and angles."""

    @property
    def base(self) -> float: ...
    @property
    def rotary_dim(self) -> int: ...
    @property
    def scaling(self) -> Rule | None: ...
    @property
    def axes(self) -> Axes | None: ...
    @property
    def constants(self) -> tuple[Constant[Rule | None], Constant[Axes | None], int, float]: ...


class Row(NamedTuple):
    """One row of frequencies, as a stack computes it.

    Attributes:
        inv_freq: radians per position ``(pairs,)``.
        attention_scaling: the factor on cosines and sines.
        divisor: positions are divided by this number; None to leave them.
        multiplier: positions are multiplied by this number; None to leave them.
    """

    inv_freq: torch.Tensor
    attention_scaling: float = 1.0
    divisor: float | None = None
    multiplier: float | None = None


class Problem(NamedTuple):
    """The arguments of a formula.

    Attributes:
        rule: the frequency rule; None for the unscaled geometric row.
        dim: number of channels that the row is made for.
        base: base of the geometric row.
        seq_len: length of the sequence; None for any length up to ``original_max_position``.
        dtype: the dtype to compute in.
        device: the device to compute on.
    """

    rule: Any
    dim: int
    base: float
    seq_len: int | None
    dtype: torch.dtype
    device: torch.device

    def powers(self, base: Any = None, channels: int | None = None) -> torch.Tensor:
        """Return ``base ** (2k / dim)``, the reciprocals of the unscaled frequencies.

        Args:
            base: replaces the base of the problem.
            channels: number of channels that get a power; by default all. The number affects the
                bits, as the vectorised ``pow`` of torch may round the last elements of a vector
                differently.
        """
        end = self.dim if channels is None else channels
        index = torch.arange(0, end, 2, dtype=self.dtype, device=self.device)
        return (self.base if base is None else base) ** (index / self.dim)


Formula = Callable[[Problem], Row]


# --- formulas ---------------------------------------------------------------------------


def _default(problem: Problem) -> Row:
    return Row(1.0 / problem.powers())


def _given(problem: Problem) -> Row:
    rule: Given = problem.rule
    if len(rule.shape) != 1:
        raise unsupported(
            f"frequencies per head or axis must not be used with a stack but have shape {rule.shape}"
        )
    return Row(torch.tensor(rule.inv_freq, dtype=problem.dtype, device=problem.device))


def _linear(problem: Problem) -> Row:
    return Row(1.0 / problem.powers() / problem.rule.factor)


def _linear_by_dividing(problem: Problem) -> Row:
    return Row(1.0 / problem.powers(), divisor=problem.rule.factor)


def _linear_by_multiplying(problem: Problem) -> Row:
    return Row(1.0 / problem.powers(), multiplier=1 / problem.rule.factor)


def _dynamic(problem: Problem) -> Row:
    original, length = problem.rule.original_max_position, problem.seq_len
    if length is None or length <= original:
        return _stretched(problem, original)
    # The length comes from position ids, as a tensor, so float32 rounds the new base.
    return _stretched(problem, torch.tensor(length, device=problem.device))


def _dynamic_once(problem: Problem) -> Row:
    if problem.seq_len is None:
        raise unsupported(
            "seq_len must be given for a DynamicNTK rule: this stack computes one set of frequencies, "
            "for the longest context that it is configured for"
        )
    rule: DynamicNTK = problem.rule
    least = math.floor(rule.original_max_position * (rule.factor - 1) / rule.factor) + 1
    if problem.seq_len < least:
        raise unsupported(
            f"seq_len must be at least {least} for this DynamicNTK rule, as this stack would raise a negative "
            f"number to a power, but got {problem.seq_len}"
        )
    return _stretched(problem, problem.seq_len)


def _stretched(problem: Problem, length: Any) -> Row:
    rule: DynamicNTK = problem.rule
    scale = rule.factor * length / rule.original_max_position - (rule.factor - 1)
    return Row(1.0 / problem.powers(problem.base * scale ** (problem.dim / (problem.dim - 2))))


def _llama3(problem: Problem) -> Row:
    rule: Llama3 = problem.rule
    inv_freq, original = 1.0 / problem.powers(), rule.original_max_position
    wavelength = 2 * math.pi / inv_freq
    slow = wavelength > original / rule.low_freq_factor
    fast = wavelength < original / rule.high_freq_factor
    found = torch.where(slow, inv_freq / rule.factor, inv_freq)
    if rule.low_freq_factor != rule.high_freq_factor:
        smooth = (original / wavelength - rule.low_freq_factor) / (
            rule.high_freq_factor - rule.low_freq_factor
        )
        blend = (1 - smooth) * found / rule.factor + smooth * found
        found = torch.where(slow | fast, found, blend)
    return Row(found)


def _llama3_clamped(problem: Problem) -> Row:
    rule: Llama3 = problem.rule
    inv_freq = 1.0 / problem.powers()
    turns = rule.original_max_position / (2 * math.pi / inv_freq)
    smooth = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    smooth = smooth.clamp(min=0.0, max=1.0)
    return Row((1 - smooth) * (inv_freq / rule.factor) + smooth * inv_freq)


def _magnitude(scale: float, weight: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def _yarn(problem: Problem, zero: bool = False) -> Row:
    """Compute YaRN with the magnitude of both mscales, or without them.

    Args:
        zero: whether an mscale of 0 counts as given.
    """
    rule: YaRN = problem.rule
    inv_freq = _blended(problem, *_ends(problem, problem.dim - 1))
    mscales = rule.mscale, rule.mscale_all_dim
    if rule.attention_factor is not None:
        return Row(inv_freq, rule.attention_factor)
    if None in mscales or not (zero or all(mscales)):
        return Row(inv_freq, _magnitude(rule.factor))
    one, other = (_magnitude(rule.factor, each) for each in mscales if each is not None)
    return Row(inv_freq, one / other)


def _yarn_of_gpt_oss(problem: Problem) -> Row:
    factor = problem.rule.factor
    if factor <= 1.0:
        return _default(problem)
    return Row(_blended(problem, *_ends(problem, None)), _magnitude(factor))


def _yarn_of_litgpt(problem: Problem) -> Row:
    rule: YaRN = problem.rule
    low, high = _ends(problem, problem.dim // 2 - 1)
    scaling = _magnitude(rule.factor, rule.mscale_all_dim) if rule.mscale_all_dim else 1.0
    if rule.mscale:
        scaling = _magnitude(rule.factor, rule.mscale) / scaling
    # Not YaRN: the weights of kept and divided frequencies are exchanged.
    return Row(_blended(problem, low, high, reverse=True), scaling)


def _ends(problem: Problem, most: float | None) -> tuple[float, float]:
    """Return the pair indices between which YaRN blends; from 0 to ``most``, if it is not None."""
    rule: YaRN = problem.rule

    def index(turns: float) -> float:
        span = rule.original_max_position / (turns * 2 * math.pi)
        return problem.dim * math.log(span) / (2 * math.log(problem.base))

    low, high = index(rule.beta_fast), index(rule.beta_slow)
    if rule.truncate:
        low, high = math.floor(low), math.ceil(high)
    if most is None:
        return low, high
    low, high = max(low, 0), min(high, most)
    return low, high + 0.001 if low == high else high


def _blended(problem: Problem, low: float, high: float, reverse: bool = False) -> torch.Tensor:
    powers, factor = problem.powers(), float(problem.rule.factor)
    index = torch.arange(problem.dim // 2, dtype=problem.dtype, device=problem.device)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    keep = ramp if reverse else 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def _longrope(problem: Problem) -> Row:
    rule: LongRoPE = problem.rule
    original = rule.original_max_position
    is_long = problem.seq_len is not None and problem.seq_len > original
    factors = rule.long_factor if is_long else rule.short_factor
    scaling = rule.attention_factor
    if rule.short_mscale is not None:
        scaling = rule.long_mscale if is_long else rule.short_mscale
    if scaling is None:
        extended = rule.factor is not None and rule.factor > 1.0
        ratio = math.log(rule.factor or 1.0) / math.log(original)
        scaling = math.sqrt(1 + ratio) if extended else 1.0
    divisors = torch.tensor(factors, dtype=problem.dtype, device=problem.device)
    return Row(1.0 / (divisors * problem.powers()), scaling)


def _proportional(problem: Problem) -> Row:
    rule: Proportional = problem.rule
    turning = int(rule.rotary_fraction * problem.dim // 2)
    inv_freq = 1.0 / problem.powers(channels=2 * turning)
    still = inv_freq.new_zeros(problem.dim // 2 - turning)
    inv_freq = torch.cat((inv_freq, still)) if len(still) else inv_freq
    return Row(inv_freq / rule.factor if rule.factor != 1.0 else inv_freq)


def _fixed(formula: Formula, **only: object) -> Formula:
    """Return a formula that accepts only these values of a rule's fields."""

    def checked(problem: Problem) -> Row:  # the compiler takes no functools.partial as a constant
        for field, value in only.items():
            if getattr(problem.rule, field) != value:
                raise unsupported(
                    f"{field} must be {value!r}, the only value that this stack supports, but got "
                    f"{getattr(problem.rule, field)!r}"
                )
        return formula(problem)

    return checked


def _row_of(
    formula: Formula,
    rule: Rule | None,
    axes: Axes | None,
    rotary_dim: int,
    base: float,
    seq_len: int | None,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
) -> Row:
    """Return the frequencies of a spec, one for each pair.

    Args:
        formula: the stack's formula for the rule.
        rule, axes, rotary_dim, base: see :class:`tightrope.RopeSpec`.
        seq_len, device: see :class:`Problem`.
        dtypes: the dtype to compute in, and those to which frequencies are then rounded in turn.
    """

    def row_of(dim: int) -> Row:
        if dim == 0:
            return Row(torch.zeros(0, dtype=dtypes[0], device=device))
        return formula(Problem(rule, dim, base, seq_len, dtypes[0], device))

    if axes is None:
        found = row_of(rotary_dim)
    else:
        rows = {dim: row_of(dim) for _, _, dim in axes.pairs}
        found = next(iter(rows.values()), row_of(0))
        picked = [rows[dim].inv_freq[k] for _, k, dim in axes.pairs]
        found = found._replace(inv_freq=torch.stack(picked) if picked else found.inv_freq)
    return found._replace(inv_freq=found.inv_freq.to(dtypes[1]).to(dtypes[2]))


def _constant_row(
    formula: Formula, rule: Constant[Rule | None], axes: Constant[Axes | None], *arguments: Any
) -> tuple[Any, ...]:
    """Return the fields of :func:`_row_of`, frequencies as numbers, computed now and not in the graph."""
    with _disable_current_modes():  # that of fake tensors, in an export
        row = _row_of(formula, value_of(rule), value_of(axes), *arguments)
        return row.inv_freq.tolist(), *row[1:]


# torch.compiler.assume_constant_result sets the same attribute, but imports Dynamo.
_constant_row._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


def _places(where: Positions, tokens: int, device: torch.device) -> torch.Tensor:
    """Return the position of each token on each axis, ``[axes, rows|1, tokens]``."""
    ids = where.ids
    if ids is None:
        ids = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    ids = ids.detach().to(device)
    ids = (ids if ids.is_floating_point() else widened(ids)) + where.offset
    return ids + torch.arange(tokens, device=device) if where.add_index else ids


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
    places = _places(where, tokens, where.ids.device)
    return math.ceil(places.max()) + 1 if places.numel() else None


#: How a stack was verified. RUN: the library's own code, run on the CPU, gave the same bits.
#: GIVEN_TABLES: it gave the same bits when this module used the library's cosines and sines, which
#: may differ from those computed here in the last bit. READ: the code was only read, because it
#: runs on a GPU; the compiler chooses which products are fused with a sum, so single results may
#: differ in the last bit.
RUN, GIVEN_TABLES, READ = "run", "run, given its tables", "read"

# --- stacks -----------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Stack:
    """The arithmetic of a library, from a configuration to a rotated tensor.

    Attributes:
        name: its name for :func:`get`.
        about: the library and the code path.
        source: files and version.
        verified: :data:`RUN`, :data:`GIVEN_TABLES` or :data:`READ`.
        rules: the formula for each class of frequency rule that it has; the key None stands for no rule.
        rounding: where its rotation rounds, forward and backward; see
            :func:`tightrope.functional.rotate`.
        table_dtype: the dtype of its cosines and sines; None for the dtype of the rotated tensor.
        dtype: the dtype that frequencies and angles are computed in.
        on_cpu: whether frequencies are computed on the CPU, whatever the device of the model.
        casts: whether casting a model, as in ``model.to(torch.bfloat16)``, rounds "frequencies", or
            "frequencies and positions", which then are multiplied in that dtype, or "tables"; "" if it
            rounds none of them. :meth:`cast` returns the stack of a model that was cast.
        polar: whether cosines and sines come from ``torch.polar``, which computes them one by one: they
            may differ in the last bit from those of ``torch.cos``, which uses vector instructions.
        cast_to: the dtype that the model was cast to, or None.
    """

    name: str
    about: str
    source: str
    verified: str
    rules: Mapping[type[Rule] | None, Formula] = dataclasses.field(compare=False)
    rounding: tuple[str, str] = ("each", "each")
    table_dtype: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    on_cpu: bool = False
    casts: str = ""
    polar: bool = False
    cast_to: torch.dtype | None = None

    def __repr__(self) -> str:
        cast = "" if self.cast_to is None else f".cast({self.cast_to})"
        return f"<Stack {self.name!r}{cast}: {self.about}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By name: some formulas are functions made in a function, which cannot be pickled.
        known = _BY_NAME.get(self.name)
        if known is not None and self.rules is known.rules:
            if self == known:
                return get, (self.name,)
            if known.casts and self.cast_to is not None and self == known.cast(self.cast_to):
                return operator.methodcaller("cast", self.cast_to), (known,)
        return super().__reduce_ex__(protocol)

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
        self, spec: Spec, seq_len: int | None = None, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, float]:
        """Return the frequencies of the pairs and the factor on cosines and sines.

        Args:
            spec: a :class:`tightrope.RopeSpec`.
            seq_len: length of the sequence, for rules that depend on it.
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
        spec: Spec,
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
                of all rows, plus 1.
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
        if length is None and spec.scaling is not None and spec.scaling.by_length:
            length = length_of(where, tokens)
        row = self.row(spec, length, torch.device(device))
        return self.tables_of(row, spec.axes, where, tokens, dtype)

    def check(self, spec: Spec, seq_len: int | None) -> None:
        """Raise an error if the stack does not have the frequency rule of a spec."""
        rule = spec.scaling
        if rule is None or not rule.by_length or seq_len is not None:
            self.row(spec, seq_len, torch.device("cpu"))
        else:
            self._formula(rule)

    def tables_of(
        self, row: Row, axes: Axes | None, where: Positions, tokens: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return :meth:`tables` of frequencies, on their device, for checked arguments."""
        inv_freq, scaling = row.inv_freq, row.attention_scaling
        at = _places(where, tokens, inv_freq.device).to(inv_freq.dtype)
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

    def row(self, spec: Spec, seq_len: int | None, device: torch.device) -> Row:
        """Return the frequencies of a spec on a device, as the stack computes them."""
        rule, formula = spec.scaling, self._formula(spec.scaling)
        where = torch.device("cpu") if self.on_cpu else device
        rounded = self.cast_to if self.cast_to and self.casts != "tables" else self.dtype
        kept = rounded if "positions" in self.casts else self.dtype
        dtypes = self.dtype, rounded, kept
        if not torch.compiler.is_compiling():
            row = _row_of(
                formula, rule, spec.axes, spec.rotary_dim, spec.base, seq_len, where, dtypes
            )
            return row._replace(inv_freq=row.inv_freq.to(device))
        if rule is None or not rule.by_length:
            seq_len = None
        elif isinstance(rule, LongRoPE):
            seq_len = rule.regime(seq_len)
        if seq_len is not None:
            seq_len = operator.index(seq_len)  # NTK by length needs another graph for each length
        numbers, *others = _constant_row(formula, *spec.constants, seq_len, where, dtypes)
        return Row(torch.tensor(numbers, dtype=kept, device=device), *others)

    def _formula(self, rule: Rule | None) -> Formula:
        if isinstance(rule, Given):
            return _given
        formula = self.rules.get(None if rule is None else type(rule))
        if formula is None:
            known = ", ".join(sorted(each.__name__ for each in self.rules if each is not None))
            raise unsupported(
                f"scaling must be None, Given or a rule that stack {self.name!r} has "
                f"({known or 'none'}) but got {rule!r}"
            )
        return formula


_META_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_NO_MSCALES = {"attention_factor": None, "mscale": None, "mscale_all_dim": None}
_YARN_BY_GIVEN = _fixed(lambda problem: _yarn(problem, zero=True), attention_factor=None)
_TRANSFORMERS: dict[type[Rule] | None, Formula] = {
    None: _default,
    Linear: _linear,
    DynamicNTK: _dynamic,
    YaRN: _yarn,
    LongRoPE: _fixed(_longrope, short_mscale=None, long_mscale=None),
    Llama3: _llama3,
    Proportional: _proportional,
}
_SERVING: dict[type[Rule] | None, Formula] = {
    None: _default,
    Linear: _linear_by_dividing,
    YaRN: _yarn,
    Llama3: _llama3,
    LongRoPE: _fixed(_longrope, attention_factor=None),
}
_VLLM = {
    **_SERVING,
    DynamicNTK: _dynamic_once,
    Proportional: _fixed(_proportional, factor=1.0),
}
_ENGINE: dict[type[Rule] | None, Formula] = {None: _default, Linear: _linear_by_multiplying}
_ROTARY = "model_executor/layers/rotary_embedding"

_ALL = [
    Stack(
        "transformers",
        "transformers, eager, as in Llama",
        "transformers 5.23: modeling_rope_utils.py; models/llama/modeling_llama.py",
        RUN,
        _TRANSFORMERS,
        on_cpu=True,
        casts="frequencies",
    ),
    Stack(
        "transformers-compiled",
        "transformers, whole model in one graph of torch.compile, which does not round tables",
        "transformers 5.23 and torch 2.13 (Inductor, CPU)",
        GIVEN_TABLES,
        _TRANSFORMERS,
        ("wide", "wide"),
        torch.float32,
        on_cpu=True,
        casts="frequencies",
    ),
    Stack(
        "meta",
        "Meta's Llama: complex64",
        "llama-models 0.3.0: llama3/model.py",
        RUN,
        {None: _default, Llama3: _fixed(_llama3, factor=8.0, **_META_LLAMA3)},
        ("wide", "wide"),
        torch.float32,
        polar=True,
    ),
    Stack(
        "gpt-oss",
        "OpenAI's reference in PyTorch",
        "gpt-oss at 7b58334: gpt_oss/torch/model.py",
        RUN,
        {None: _default, YaRN: _fixed(_yarn_of_gpt_oss, **_NO_MSCALES, truncate=False)},
    ),
    Stack(
        "torchtune",
        "torchtune",
        "torchtune 0.6.1: modules/position_embeddings.py; models/llama3_1/_position_embeddings.py",
        RUN,
        {None: _default, Llama3: _llama3},
        ("wide", "wide"),
        torch.float32,
        casts="tables",
    ),
    Stack(
        "litgpt",
        "LitGPT, with tables in float32",
        "litgpt 0.5.13: model.py",
        RUN,
        {
            None: _default,
            Linear: _linear,
            Llama3: _llama3_clamped,
            YaRN: _fixed(_yarn_of_litgpt, attention_factor=None),
        },
        ("wide", "each"),
        torch.float32,
        casts="tables",
    ),
    Stack(
        "diffusers",
        "diffusers' shared function, frequencies in float32",
        "diffusers 0.42.1: models/embeddings.py (get_1d_rotary_pos_embed, apply_rotary_emb)",
        RUN,
        {None: _default, Linear: _linear},
        ("wide", "each"),
        torch.float32,
    ),
    Stack(
        "diffusers-float64",
        "diffusers' shared function, frequencies in float64, as in Flux and Wan",
        "diffusers 0.42.1: models/embeddings.py (freqs_dtype=torch.float64)",
        RUN,
        {None: _default, Linear: _linear},
        ("wide", "each"),
        torch.float32,
        torch.float64,
    ),
    Stack(
        "megatron",
        "Megatron-LM without fusion",
        "megatron-core 0.16.1: models/common/embeddings/rotary_pos_embedding.py, "
        "yarn_rotary_pos_embedding.py, rope_utils.py",
        RUN,
        {
            **_ENGINE,
            Llama3: _fixed(_llama3, **_META_LLAMA3),
            YaRN: _YARN_BY_GIVEN,
        },
    ),
    Stack(
        "flash-attention-reference",
        "flash-attention's reference in PyTorch",
        "flash-attn 2.8.3: layers/rotary.py (apply_rotary_emb_torch)",
        RUN,
        {None: _default},
    ),
    Stack(
        "flash-attention",
        "flash-attention's layer and Triton kernel",
        "flash-attn 2.8.3: layers/rotary.py, ops/triton/rotary.py",
        READ,
        {None: _default},
        ("once", "once"),
    ),
    Stack(
        "vllm-native",
        "vLLM, forward_native",
        f"vllm 0.33.0: {_ROTARY}/",
        RUN,
        _VLLM,
    ),
    Stack(
        "vllm",
        "vLLM as it runs by default, compiled, and its CUDA kernel",
        f"vllm 0.33.0: {_ROTARY}/; csrc/pos_encoding_kernels.cu",
        READ,
        _VLLM,
        ("once", "once"),
    ),
    Stack(
        "sglang-native",
        "SGLang, forward_native",
        "sglang 0.5.23: srt/layers/rotary_embedding/",
        RUN,
        {**_SERVING, YaRN: _YARN_BY_GIVEN},
    ),
    Stack(
        "sglang",
        "SGLang's CUDA kernel, with its cache in float32",
        "sglang 0.5.23: srt/layers/rotary_embedding/",
        READ,
        {**_SERVING, YaRN: _YARN_BY_GIVEN},
        ("once", "once"),
        torch.float32,
    ),
    Stack(
        "flashinfer",
        "FlashInfer with a cache of cosines and sines, which must be float32",
        "flashinfer-python 0.7.2: rope.py (apply_rope_with_cos_sin_cache)",
        READ,
        _SERVING,
        ("once", "once"),
        torch.float32,
    ),
    Stack(
        "transformer-engine-unfused",
        "TransformerEngine without fusion",
        "TransformerEngine at d0067d0: pytorch/attention/rope.py (_apply_rotary_pos_emb_base)",
        RUN,
        _ENGINE,
        casts="frequencies and positions",
    ),
    Stack(
        "transformer-engine",
        "TransformerEngine's fused kernel, which takes angles in float32",
        "TransformerEngine at d0067d0: pytorch/attention/rope.py; common/fused_rope/fused_rope.cu",
        READ,
        _ENGINE,
        ("once", "once"),
        torch.float32,
        casts="frequencies and positions",
    ),
]
_BY_NAME = {stack.name: stack for stack in _ALL}


def names() -> tuple[str, ...]:
    """Return the names of all stacks.

    >>> "vllm" in names()
    True
    """
    return tuple(_BY_NAME)


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
    found = _BY_NAME.get(stack) if isinstance(stack, str) else None
    if found is None:
        raise bad_value(f"stack must be one of {', '.join(_BY_NAME)} but got {stack!r}")
    return found
