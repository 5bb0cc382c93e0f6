"""The schema of the operator: the one place where its strings stand.

The dispatcher is the registry of backends. A backend registers kernels under these names for its
dispatch key, and may be absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

#: Layouts, in the order of the codes that cross the schema: which dimension of a tensor is which.
LAYOUTS = ("bhsd", "bshd", "sbhd", "thd", "bsd", "sd")

FORWARD, TRANSPOSE, INVERSE = 0, 1, 2

#: Where angles come from: phase words, or tables with halves duplicated, pairs duplicated, or one
#: value per pair.
SOURCES = ("words", "cat", "repeat", "half")
WORDS = 0
TABLES = SOURCES[1:]

#: What P is made of: nothing; the logarithms of its factors; or slopes, their logarithms per position.
NO_GATE, LOG, SLOPE = 0, 1, 2

_START_BITS = 20


class Form(NamedTuple):
    """What of a call is neither a tensor nor a length.

    It crosses the schema packed into one integer, as every argument costs a tenth of a microsecond
    on its way through the dispatcher, and a token in place has eight.

    Attributes:
        layout: index into LAYOUTS.
        start: first rotated channel; words or tables say how many pairs rotate.
        interleaved: whether pairs are neighbours.
        direction: FORWARD y = P·a·R(φ)f(x); TRANSPOSE, its gradient, dx = f'(x)ᵀ·a·R(-φ)P·dy;
            INVERSE x = R(-φ)(y / P) / a, of an f that is the identity.
        ramp: whether the index of a token is added to its position.
        source: index into SOURCES.
        learned: whether words were made of frequencies that want a gradient, and are carried.
        act: f by its code, an index into tightrope.activations.ACTS.
        gate: what P is made of: NO_GATE, LOG or SLOPE.
        numerics: 0 is exact; the rest is reserved for the arithmetic of other stacks.
    """

    layout: int = 0
    start: int = 0
    interleaved: bool = False
    direction: int = FORWARD
    ramp: bool = True
    source: int = WORDS
    learned: bool = False
    act: int = 0
    gate: int = 0
    numerics: int = 0

    def pack(self) -> int:
        """One integer; the other side of the fence is `Form` in csrc/bind_problem.h."""
        # The compiler cannot see into a cache, and needs none.
        return _pack(self) if torch.compiler.is_compiling() else _packed(self)


def _pack(form: Form) -> int:
    if not 0 <= form.start < 1 << _START_BITS:
        raise RuntimeError(f"tightrope: start must lie in [0, 2^{_START_BITS})")
    packed = 0
    for value, bits in zip(form, _BITS):
        packed = packed << bits | int(value)
    return packed


_packed = lru_cache(maxsize=1024)(_pack)

# From the highest bits to the lowest, in the order of the fields.
_BITS = (3, _START_BITS, 1, 2, 1, 2, 1, 8, 4, 8)


def form_of(packed: int) -> Form:
    """What :meth:`Form.pack` packed.

    >>> form_of(Form(start=5, ramp=False).pack())[:5]
    (0, 5, False, 0, False)
    """
    values = []
    for bits in reversed(_BITS):
        values.append(packed & ((1 << bits) - 1))
        packed >>= bits
    layout, start, interleaved, direction, ramp, source, learned, *rest = reversed(values)
    return Form(
        layout, start, bool(interleaved), direction, bool(ramp), source, bool(learned), *rest
    )


# q, k        what shares its angles; k may be absent
# out_q, out_k
#             where their rotations go: of the same shapes, dtype and device, any strides
# primary, secondary
#             the source of the angles: words and, where some ω >= π, turns (see
#             tightrope.angles.phases); or a caller's cosines and sines, of any floating dtype,
#             [rows|1, heads|1, length, width], of which a position is a row
# positions   int32, int64, float32 or float64 [axes, rows|1, tokens|1]; none for zeros
# offset      added to every position
# form        see Form
# amplitude   a, on the rotated channels only
# carried     tensors that only some calls have, in this order, each part for q and then for k:
#             the frequencies that words were made of, floating [axes, rows|1, heads|1, pairs] (where
#                 they are learned; one for both)
#             the weights of a norm, floating [heads|1, channels] (act is a norm)
#             what P is made of, floating, any strides: LOG [rows|1, heads|1, tokens|1, channels|1]
#                 whatever the layout; SLOPE [heads|1, channels|1], of positions of one axis
#             x of the forward call (direction is TRANSPOSE and there is an act)
# eps         of a norm
#
# Calls that carry something are an overload of their own. The dispatcher sees into a list only if it is
# not optional, and one that is not costs half a microsecond even if it is empty.
#
# rotate returns the results, and after them, where direction is TRANSPOSE and act is a norm, the
# gradients by its weights: shaped as they are, float32 (float64 for float64).
_ARGUMENTS = (
    "Tensor primary, Tensor? secondary, Tensor? positions, SymInt offset, int form, float amplitude"
)
_CARRIED = ", Tensor[] carried, float eps"

#: Schemas by name and overload: of each operator, and of that which carries tensors.
ROTATIONS = {
    name + overload: f"{name}{overload}({xs}, {_ARGUMENTS}{more}) -> {result}"
    for name, xs, result in (
        ("rotate", "Tensor q, Tensor? k", "Tensor[]"),
        ("rotate_", "Tensor(a!) q, Tensor(b!)? k", "()"),
        ("rotate_into", "Tensor q, Tensor? k, Tensor(a!) out_q, Tensor(b!)? out_k", "()"),
    )
    for overload, more in (("", ""), (".carried", _CARRIED))
}

# The gradients by angles, in float64 (float32 where a device has no other): sums over heads and pairs
# for positions, [axes, rows, tokens], and over tokens, and rows and heads that share them, for
# frequencies, shaped as words. What is not wanted has no axes.
#
# y, z        results of rotate: one or two
# grad_y, grad_z
#             their gradients
# words … form
#             as they were for rotate
ANGLE_GRADIENTS = (
    "angle_gradients(Tensor y, Tensor? z, Tensor grad_y, Tensor? grad_z, Tensor words, "
    "Tensor? turns, Tensor? positions, SymInt offset, int form, bool by_positions, "
    "bool by_frequencies) -> (Tensor, Tensor)"
)

# Gradients by the logarithms of a gate, Σ y·dy, or by slopes, Σ p·y·dy, over all that shares one:
# shaped as the gates, float32 (float64 for float64); one for each result.
#
# y, z        results of rotate
# gate_q, gate_k
#             as they were carried
GATE_GRADIENTS = (
    "gate_gradients(Tensor y, Tensor? z, Tensor grad_y, Tensor? grad_z, Tensor gate_q, "
    "Tensor? gate_k, Tensor? positions, SymInt offset, int form) -> Tensor[]"
)

library = torch.library.Library("tightrope", "DEF")
for _one in (*ROTATIONS.values(), ANGLE_GRADIENTS, GATE_GRADIENTS):
    library.define(_one, tags=(torch.Tag.pt2_compliant_tag,))

rotate = torch.ops.tightrope.rotate.default
rotate_ = torch.ops.tightrope.rotate_.default
rotate_into = torch.ops.tightrope.rotate_into.default
rotate_carried = torch.ops.tightrope.rotate.carried
rotate_carried_ = torch.ops.tightrope.rotate_.carried
rotate_carried_into = torch.ops.tightrope.rotate_into.carried
angle_gradients = torch.ops.tightrope.angle_gradients.default
gate_gradients = torch.ops.tightrope.gate_gradients.default


class Plain(NamedTuple):
    """What follows q and k, or the outs, in the schema; see the comment above it."""

    primary: Any
    secondary: Any
    positions: Any
    offset: Any
    form: Any
    amplitude: Any

    def carrying(self, form: int, carried: Sequence[Any], eps: float) -> Carrying:
        """The same with tensors that it carries, and the form that tells which they are."""
        fixed = (self.primary, self.secondary, self.positions, self.offset)
        return Carrying(*fixed, form, self.amplitude, carried, eps)


class Carrying(NamedTuple):
    """As :class:`Plain`, of the overload for calls that carry tensors."""

    primary: Any
    secondary: Any
    positions: Any
    offset: Any
    form: Any
    amplitude: Any
    carried: Any = ()
    eps: Any = 0.0


Packed: TypeAlias = Plain | Carrying


class Operator(NamedTuple):
    """An operator in its two overloads.

    Attributes:
        plain: for :class:`Plain` arguments.
        carrying: for :class:`Carrying` ones.
    """

    plain: Any
    carrying: Any

    def for_(self, packed: Packed) -> Any:
        """The overload that takes these arguments."""
        return self.plain if type(packed) is Plain else self.carrying


NEW = Operator(rotate, rotate_carried)
IN_PLACE = Operator(rotate_, rotate_carried_)
OUT = Operator(rotate_into, rotate_carried_into)


def present(q: torch.Tensor, k: torch.Tensor | None) -> list[torch.Tensor]:
    """q, and k where there is one."""
    return [q] if k is None else [q, k]


def pair(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The inverse of :func:`present`."""
    return xs[0], xs[1] if len(xs) > 1 else None


def scale(direction: int, amplitude: float) -> float:
    """The factor on the rotated channels: an inverse divides by the amplitude."""
    return 1.0 / amplitude if direction == INVERSE else amplitude
