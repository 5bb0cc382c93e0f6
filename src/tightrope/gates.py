"""Gates: the epilogue of a rotation, the diagonal P of y = P · R · f(x).

A gate is a frozen object that holds its tensors and returns the logarithm of its factor, of shape
``[rows|1, heads|1, tokens|1, channels|1]``. Logarithms of several gates add up, and a recurrence
needs their differences. :class:`Factor` alone may be negative or 0, and has no logarithm.

``tied="pair"`` gives both channels of a pair one value, so that the gate commutes with the rotation;
channels that do not rotate then have the factor 1. If the gate is also the same at all positions, scores
still depend only on the distance between tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from ._errors import (
    as_passed,
    bad_type,
    bad_value,
    check_local,
    check_tensor,
    describe,
    one_or,
    positive,
    public,
    real,
)
from ._parts import Take
from ._tracing import broadcasts, is_readable, is_tracing, may_keep, outside_modes
from ._value import checked_calls
from .channels import Channels as Channels, by_head

__all__ = ["Exp", "Factor", "Gate", "Given", "Scalar", "Slope", "XPos"]


class _At(NamedTuple):
    """What a factor is made for: the arguments of :meth:`Gate.log_factor`."""

    channels: Channels
    positions: torch.Tensor | None
    dtype: torch.dtype


#: The axes of the last dimensions of each tensor of a gate; None for a dimension that no process divides.
_Axes: TypeAlias = Mapping[str, Sequence[str | None]]


class Gate:
    """Base class of all gates.

    Attributes:
        by_position: whether the factor depends on the position.
        signed: whether the factor may be negative or 0, so that it has no logarithm.
        axes: the tensors that ``cut`` divides among processes; None for a gate of your own, which cannot be divided.
    """

    by_position: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    axes: ClassVar[_Axes | None] = None

    @public()
    def log_factor(
        self,
        channels: Channels,
        positions: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return the logarithm of the factor. A gate of your own defines this method.

        Args:
            channels: the rotated slice and pairing of the head that is gated.
            positions: ``[rows|1, tokens]`` or ``[rows|1, tokens, heads]``, integers or floats; required if
                ``by_position``.
            dtype: dtype of the gated tensor. The logarithm is float64 for float64, else float32.

        Returns:
            ``[rows|1, heads|1, tokens|1, channels|1]``.

        Raises:
            ValueError: a factor that may be negative has no logarithm; a tensor that does not fit the channels.
        """
        if self.signed:
            raise bad_value(
                "the gate must be read by factor(), as it may be negative: it has no logarithm"
            )
        return self._made(_At(channels, positions, dtype))

    @public()
    def factor(
        self,
        channels: Channels,
        positions: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return the factor; arguments and shape as in :meth:`log_factor`."""
        if self.signed:
            return self._made(_At(channels, positions, dtype))
        return self.log_factor(channels, positions, dtype).exp()

    def _made(self, at: _At) -> torch.Tensor:
        """Return the factor of a signed gate, and the logarithm of the factor of any other."""
        raise NotImplementedError

    def for_keys(self) -> Gate:
        """Return the gate to use for keys if the caller gave one gate for both queries and keys."""
        return self

    def cut(self, take: Take) -> Gate:
        """Return the gate for a part of the rows, heads and tokens, for DTensors.

        Args:
            take: see :data:`tightrope._parts.Take`.
        """
        kind = type(self).__name__
        if self.axes is None:
            raise bad_type(
                f"gate must be one of tightrope.gates with DTensors but got a {kind}; rotate "
                "to_local() and convert the result with DTensor.from_local"
            )
        parts = {
            name: take(f"{name} of the gate {kind}", getattr(self, name), axes)
            for name, axes in self.axes.items()
        }
        return replace(self, **parts)  # type: ignore[type-var]


@checked_calls
@dataclass(frozen=True, eq=False)
class Scalar(Gate):
    """One factor for all tokens, heads and channels.

    Args:
        value: a positive number, or a floating tensor of shape ``()``; a tensor is learnable.

    >>> Scalar(2.0).factor(Channels(4, 0, 4, False)).flatten().tolist()
    [2.0]
    """

    value: float | torch.Tensor
    axes: ClassVar[_Axes] = {"value": ()}

    @public("Scalar")
    def __post_init__(self) -> None:
        if isinstance(self.value, torch.Tensor):
            check_tensor("value", self.value, "a floating tensor", sharded=True)
            if self.value.dim():
                raise bad_value("value must have shape ()", value=self.value)
        else:
            positive("value", self.value)

    def _made(self, at: _At) -> torch.Tensor:
        device = torch.device("cpu") if at.positions is None else at.positions.device
        return self._log(at.dtype, device)

    def _log(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the logarithm on the device of ``value`` if it is a tensor, else on ``device``."""
        inside = _compute_dtype(dtype)
        if isinstance(self.value, torch.Tensor):
            return self.value.to(inside).log().reshape(1, 1, 1, 1)
        return torch.full((1, 1, 1, 1), math.log(self.value), dtype=inside, device=device)


class _ByChannel(Gate):
    """A gate with one tensor: a value for each head and channel, or with ``tied="pair"`` for each pair."""

    tied: str | None = None
    _field: ClassVar[str]
    _dims: ClassVar[tuple[int, int]] = (1, 2)
    _shapes: ClassVar[str] = "({0},) or (heads, {0})"

    @public()
    def __post_init__(self) -> None:
        name, values = self._field, getattr(self, self._field)
        check_tensor(name, values, "a floating tensor", sharded=True)
        if self.tied not in (None, "pair"):
            raise bad_value(f"tied must be None or 'pair' but got {self.tied!r}")
        if values.dim() not in self._dims:
            kind = "channels" if self.tied is None else "pairs"
            rule = f"{name} must have shape {self._shapes.format(kind)}"
            raise bad_value(rule, **{name: values})

    def _wide(self, values: torch.Tensor, channels: Channels, dtype: torch.dtype) -> torch.Tensor:
        """Return one value for each channel, in the dtype to compute in."""
        width = channels.head_dim if self.tied is None else channels.pairs
        if not broadcasts(values.shape[-1], width):
            needed = one_or(width, "channel" if self.tied is None else "pair")
            raise bad_value(
                f"{self._field} must have {needed} but got {values.shape[-1]}",
                **{self._field: as_passed(values)},
            )
        values = values.to(_compute_dtype(dtype))
        return values if self.tied is None else channels.spread(values)

    def _rows(self, channels: Channels, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of a tensor with one or two dimensions, ``[heads|1, channels|1]``."""
        wide = self._wide(getattr(self, self._field), channels, dtype)
        return wide if wide.dim() == 2 else wide[None]

    def _made(self, at: _At) -> torch.Tensor:
        return self._rows(at.channels, at.dtype)[None, :, None]


@checked_calls
@dataclass(frozen=True, eq=False)
class Exp(_ByChannel):
    """exp(γ), for each head and channel.

    Args:
        gamma: floating ``(channels,)`` or ``(heads|1, channels|1)``; with ``tied="pair"`` one
            value per pair instead of per channel. Learnable.
        tied: None, or "pair".

    >>> gate = Exp(torch.tensor([0.5, -0.5]), tied="pair")
    >>> gate.log_factor(Channels(4, 0, 4, True)).flatten().tolist()
    [0.5, 0.5, -0.5, -0.5]
    """

    gamma: torch.Tensor
    tied: str | None = None
    axes: ClassVar[_Axes] = {"gamma": ("head", None)}
    _field: ClassVar[str] = "gamma"


@checked_calls
@dataclass(frozen=True, eq=False)
class Factor(_ByChannel):
    """A factor of any sign, for each head and channel: such as the weight of a norm after the rotation.

    A rotation keeps the length of a head, so that norm(R x) · w is w · R · norm(x), with the norm without a weight, if
    the factor on the rotated channels (the amplitude) is 1.

    Args:
        value: floating ``(channels,)`` or ``(heads|1, channels|1)``. Learnable. An inverse rotation divides by it.

    >>> Factor(torch.tensor([0.5, -1.0])).factor(Channels(2, 0, 2, True)).flatten().tolist()
    [0.5, -1.0]
    """

    value: torch.Tensor
    axes: ClassVar[_Axes] = {"value": ("head", None)}
    _field: ClassVar[str] = "value"
    signed: ClassVar[bool] = True


@checked_calls
@dataclass(frozen=True, eq=False)
class Slope(_ByChannel):
    """exp(slope · position): a factor that grows or shrinks along the positions.

    Args:
        slope: growth of the logarithm per position; shaped like gamma of :class:`Exp`.
        tied: None, or "pair".

    >>> gate = Slope(torch.tensor([-1.0, 0.5]))
    >>> gate.log_factor(Channels(2, 0, 2, True), torch.tensor([[0, 1, 2]]))[0, 0].tolist()
    [[-0.0, 0.0], [-1.0, 0.5], [-2.0, 1.0]]
    """

    slope: torch.Tensor
    tied: str | None = None
    axes: ClassVar[_Axes] = {"slope": ("head", None)}
    _field: ClassVar[str] = "slope"
    by_position: ClassVar[bool] = True

    def _made(self, at: _At) -> torch.Tensor:
        where = by_head(_required(at.positions).to(_compute_dtype(at.dtype)), 1)
        return onto(self.rates(at.channels, at.dtype), where.device)[None, :, None] * where

    @public("Slope")
    def rates(self, channels: Channels, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the growth of the logarithm per position, ``[heads|1, channels|1]``; arguments as in
        :meth:`Gate.log_factor`."""
        return self._rows(channels, dtype)


@checked_calls
@dataclass(frozen=True, eq=False)
class Given(_ByChannel):
    """exp(g), for a given g: one value for each token of the call, each head and each channel.

    Args:
        log: g, floating ``(tokens|1, heads|1, channels|1)`` or ``(rows|1, tokens|1, heads|1,
            channels|1)``; with ``tied="pair"`` one value per pair instead of per channel. Learnable.
        tied: None, or "pair".

    >>> Given(torch.zeros(5, 2, 1)).factor(Channels(4, 0, 4, True)).shape
    torch.Size([1, 2, 5, 1])
    """

    log: torch.Tensor
    tied: str | None = None
    axes: ClassVar[_Axes] = {"log": ("row", "token", "head", None)}
    _field: ClassVar[str] = "log"

    _dims: ClassVar[tuple[int, int]] = (3, 4)
    _shapes: ClassVar[str] = "(tokens, heads, {0}) or (rows, tokens, heads, {0})"

    def _made(self, at: _At) -> torch.Tensor:
        log = self.log if self.log.dim() == 4 else self.log[None]
        return self._wide(log, at.channels, at.dtype).transpose(1, 2)


@checked_calls
@dataclass(frozen=True)
class XPos(Gate):
    """xPos: queries shrink and keys grow with position, so scores decay with distance to past keys.

    The factor of pair k at position p is ζ_k^((p − centre) / scale_base), with
    ζ_k = (2k / rotary_dim + smoothing) / (1 + smoothing), and its inverse for keys. Scores do not
    depend on the centre, but cached keys do, so the centre is fixed and has no default.

    Args:
        centre: the position where the factor is 1. Give the middle of the positions in use, to keep
            the factors near 1.
        scale_base: number of positions over which the exponent grows by one.
        smoothing: γ of the paper.
        opposite: whether this is the inverse, for keys; see :meth:`for_keys`.

    Source: Sun et al., A Length-Extrapolatable Transformer (arXiv 2212.10554), section 3.2.

    >>> gate = XPos(centre=0, scale_base=1.0)
    >>> where = torch.tensor([[0, 1]])
    >>> both = gate.factor(Channels(4, 0, 4, True), where)
    >>> torch.allclose(both * gate.for_keys().factor(Channels(4, 0, 4, True), where), torch.ones(()))
    True
    """

    centre: float
    scale_base: float = 512.0
    smoothing: float = 0.4
    opposite: bool = False
    axes: ClassVar[_Axes] = {}
    by_position: ClassVar[bool] = True

    @public("XPos")
    def __post_init__(self) -> None:
        if not math.isfinite(real("centre", self.centre)):
            raise bad_value(f"centre must be finite but got {self.centre}")
        positive("scale_base", self.scale_base)
        positive("smoothing", self.smoothing)

    def for_keys(self) -> Gate:
        """Return the inverse gate."""
        # Dynamo ignores lru_cache and warns about each use.
        return _reversed(self) if is_tracing() else _opposite(self)

    def _made(self, at: _At) -> torch.Tensor:
        """Return the logarithm of the factor.

        Raises:
            ValueError: the factor, or its inverse, would overflow ``dtype``. On a GPU, where
                checking would synchronise, and in compiled code, such a factor becomes NaN.
        """
        inside, where = _compute_dtype(at.dtype), _required(at.positions)
        away = by_head(self._away(where, inside), 1) / self.scale_base
        rate = _rates(self.smoothing, at.channels, inside, where.device)
        log = (-rate if self.opposite else rate) * away
        # abs() checks the inverse too: if one of the two underflows, their product is also wrong.
        limit = math.log(torch.finfo(at.dtype).max)
        if not is_readable(where):
            return torch.where(log.abs() <= limit, log, torch.nan)
        if log.numel() and bool((log.abs() > limit).any()):
            strongest = abs(math.log(self.smoothing / (1 + self.smoothing)))
            reach = math.floor(limit * self.scale_base / strongest)
            raise bad_value(
                f"positions must lie within {reach} of the centre {self.centre}, or the factor "
                f"overflows {str(at.dtype).removeprefix('torch.')}, but they reach from "
                f"{where.min().item()} to {where.max().item()}; choose another centre or a larger "
                "scale_base"
            )
        return log

    def _away(self, where: torch.Tensor, inside: torch.dtype) -> torch.Tensor:
        """Return the positions minus the centre, without losing digits of either.

        A plain difference of integers and a float would have the default dtype.
        """
        whole = round(self.centre) if abs(self.centre) < 2.0**62 else 0
        if where.is_floating_point():
            wide = torch.promote_types(where.dtype, inside)
            return (where.to(wide) - self.centre).to(inside)
        return (where.to(torch.int64) - whole).to(inside) - (self.centre - whole)


# log ζ of XPos gates on each device.
_kept: dict[Any, torch.Tensor] = {}
_MOST_KEPT = 64


def _rates(
    smoothing: float, channels: Channels, inside: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return log ζ of each channel, computed on the host and cached per device to avoid copies."""
    key = smoothing, channels, inside, device
    found = None if is_tracing() else _kept.get(key)
    if found is None:
        with outside_modes():
            k = torch.arange(channels.pairs, dtype=torch.float64, device="cpu")
            zeta = (2 * k / max(channels.rotary_dim, 1) + smoothing) / (1 + smoothing)
            found = channels.spread(zeta.log()).to(device, inside)
        if may_keep(device):
            if len(_kept) >= _MOST_KEPT:
                _kept.clear()
            _kept[key] = found
    return found


def _reversed(gate: XPos) -> XPos:
    return replace(gate, opposite=not gate.opposite)


_opposite = lru_cache(maxsize=64)(_reversed)


def on(
    gate: Gate,
    x: torch.Tensor,
    channels: Channels,
    positions: torch.Tensor | None = None,
    signed: bool = False,
) -> torch.Tensor:
    """Return the logarithm of the factor of a gate, or the factor if ``signed``, on the device of x.

    After the first call, nothing is copied from the host if the gate has no tensors, or has them on that device.
    """
    if type(gate) is Scalar:
        log = gate._log(x.dtype, x.device)
        return onto(log.exp() if signed else log, x.device)
    # Those of a gate of your own, too, which may be a subclass of one of the library.
    make = gate.factor if signed else gate.log_factor
    return onto(make(channels, positions, x.dtype), x.device)


def onto(log: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a logarithm to ``device``; leave meta tensors, which :func:`check_own` reports."""
    return log if log.is_meta else log.to(device)


def check_own(name: str, x: torch.Tensor, gate: Gate) -> None:
    """Raise an error if a gate has tensors that kernels cannot read, or that would get no gradient.

    Args:
        name: name of x in errors.
        x: the gated tensor.
        gate: the gate to check.
    """
    # Gates of the library are dataclasses; torch 2.10 cannot compile vars() of an object.
    names = getattr(type(gate), "__dataclass_fields__", None)
    for field in vars(gate) if names is None else names:
        value = getattr(gate, field)
        if not isinstance(value, torch.Tensor):
            continue
        which = f"{field} of the gate {type(gate).__name__}"
        check_local(which, value)
        if value.is_meta is not x.is_meta and (value.is_meta or value.requires_grad):
            raise bad_value(
                f"{which} is on {value.device} but {name} is on {x.device}; put both on one device"
            )


def check_fit(name: str, x: torch.Tensor, gate: Gate, shape: Sequence[int]) -> None:
    """Raise an error if the shape of a gate does not broadcast to x, ``(rows, heads, tokens, …)``."""
    for noun, own, size in zip(("row", "head", "token"), shape, x.shape):
        if not broadcasts(own, size):
            raise bad_value(
                f"the gate {type(gate).__name__} must have {one_or(size, noun)} for {name} but "
                f"got {own}",
                **{name: x},
            )


def pair(gate: object) -> tuple[Gate | None, Gate | None]:
    """Split ``gate=`` into the gate of queries and the gate of keys."""
    both = gate if isinstance(gate, tuple) else (gate, gate)
    if len(both) != 2 or not all(each is None or isinstance(each, Gate) for each in both):
        raise bad_type(
            "gate must be None, a gate of tightrope.gates, or a pair of them for q and k, but got "
            f"{describe(gate)}"
        )
    first, second = both
    if gate is not both and second is not None:
        second = second.for_keys()
    return first, second


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _required(positions: torch.Tensor | None) -> torch.Tensor:
    if positions is None:
        raise bad_value("positions must be given but got None")
    return positions
