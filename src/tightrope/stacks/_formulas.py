"""The frequencies of other libraries: one formula for each rule, by the torch functions that they call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .._errors import unsupported
from .._tracing import Constant, value_of
from ..axes import Axes
from ..frequencies import DynamicNTK, Given, Llama3, LongRoPE, Proportional, Rule, YaRN


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


def default(problem: Problem) -> Row:
    return Row(1.0 / problem.powers())


def given(problem: Problem) -> Row:
    rule: Given = problem.rule
    if len(rule.shape) != 1:
        raise unsupported(
            f"frequencies per head or axis must not be used with a stack but have shape {rule.shape}"
        )
    return Row(torch.tensor(rule.inv_freq, dtype=problem.dtype, device=problem.device))


def linear(problem: Problem) -> Row:
    return Row(1.0 / problem.powers() / problem.rule.factor)


def linear_by_dividing(problem: Problem) -> Row:
    return Row(1.0 / problem.powers(), divisor=problem.rule.factor)


def linear_by_multiplying(problem: Problem) -> Row:
    return Row(1.0 / problem.powers(), multiplier=1 / problem.rule.factor)


def dynamic(problem: Problem) -> Row:
    original, length = problem.rule.original_max_position, problem.seq_len
    if length is None or length <= original:
        return _stretched(problem, original)
    # The length comes from position ids, as a tensor, so float32 rounds the new base.
    return _stretched(problem, torch.tensor(length, device=problem.device))


def dynamic_once(problem: Problem) -> Row:
    rule: DynamicNTK = problem.rule
    length: Any = problem.seq_len  # given: the stacks of this formula have a length
    least = math.floor(rule.original_max_position * (rule.factor - 1) / rule.factor) + 1
    if length < least:
        raise unsupported(
            f"seq_len must be at least {least} for this DynamicNTK rule, as this stack would raise a negative "
            f"number to a power, but got {length}"
        )
    return _stretched(problem, length)


def _stretched(problem: Problem, length: Any) -> Row:
    rule: DynamicNTK = problem.rule
    scale = rule.factor * length / rule.original_max_position - (rule.factor - 1)
    return Row(1.0 / problem.powers(problem.base * scale ** (problem.dim / (problem.dim - 2))))


def llama3(problem: Problem) -> Row:
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


def llama3_clamped(problem: Problem) -> Row:
    rule: Llama3 = problem.rule
    inv_freq = 1.0 / problem.powers()
    turns = rule.original_max_position / (2 * math.pi / inv_freq)
    smooth = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    smooth = smooth.clamp(min=0.0, max=1.0)
    return Row((1 - smooth) * (inv_freq / rule.factor) + smooth * inv_freq)


def _magnitude(scale: float, weight: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def yarn(problem: Problem, zero: bool = False) -> Row:
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


def yarn_by_given(problem: Problem) -> Row:
    return yarn(problem, zero=True)


def yarn_of_gpt_oss(problem: Problem) -> Row:
    factor = problem.rule.factor
    if factor <= 1.0:
        return default(problem)
    return Row(_blended(problem, *_ends(problem, None)), _magnitude(factor))


def yarn_of_litgpt(problem: Problem) -> Row:
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


def longrope(problem: Problem) -> Row:
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


def longrope_of_sglang(problem: Problem) -> Row:
    first = problem.rule.original_max_position + 1
    if problem.seq_len == first:
        raise unsupported(
            f"seq_len must not be {first} for this LongRoPE rule: this stack compares positions with the original "
            "length, and reads the wrong row of its table for the last token of such a step"
        )
    return longrope(problem)


def proportional(problem: Problem) -> Row:
    rule: Proportional = problem.rule
    turning = int(rule.rotary_fraction * problem.dim // 2)
    inv_freq = 1.0 / problem.powers(channels=2 * turning)
    still = inv_freq.new_zeros(problem.dim // 2 - turning)
    inv_freq = torch.cat((inv_freq, still)) if len(still) else inv_freq
    return Row(inv_freq / rule.factor if rule.factor != 1.0 else inv_freq)


def row_of(
    formula: str,
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
        formula: the name of the stack's formula for the rule.
        rule, axes, rotary_dim, base: see :class:`tightrope.RopeSpec`.
        seq_len, device: see :class:`Problem`.
        dtypes: the dtype to compute in, and those to which frequencies are then rounded in turn.
    """

    def row_of(dim: int) -> Row:
        if dim == 0:
            return Row(torch.zeros(0, dtype=dtypes[0], device=device))
        made: Row = globals()[formula](Problem(rule, dim, base, seq_len, dtypes[0], device))
        return made

    if axes is None:
        found = row_of(rotary_dim)
    else:
        rows = {dim: row_of(dim) for _, _, dim in axes.pairs}
        found = next(iter(rows.values()), row_of(0))
        picked = [rows[dim].inv_freq[k] for _, k, dim in axes.pairs]
        found = found._replace(inv_freq=torch.stack(picked) if picked else found.inv_freq)
    return found._replace(inv_freq=found.inv_freq.to(dtypes[1]).to(dtypes[2]))


def constant_row(
    formula: str, rule: Constant[Rule | None], axes: Constant[Axes | None], *arguments: Any
) -> tuple[Any, ...]:
    """Return the fields of :func:`row_of`, frequencies as numbers, computed now and not in the graph."""
    with _disable_current_modes():  # that of fake tensors, in an export
        row = row_of(formula, value_of(rule), value_of(axes), *arguments)
        return row.inv_freq.tolist(), *row[1:]


# torch.compiler.assume_constant_result sets the same attribute, but imports Dynamo.
constant_row._dynamo_marked_constant = True  # type: ignore[attr-defined]
