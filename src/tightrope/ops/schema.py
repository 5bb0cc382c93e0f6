"""The schemas of the operators; their strings are written only here.

PyTorch's dispatcher chooses the backend: each backend that is installed registers its kernels under
these operator names for its dispatch key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from .._namespace import NAMESPACE, operators

#: Layouts, each an order of the dimensions of q and k; the index is the layout's code.
LAYOUTS = ("bhsd", "bshd", "sbhd", "thd", "bsd", "sd")

FORWARD, TRANSPOSE, INVERSE = 0, 1, 2

#: Sources of the angles: phase words; or tables whose second half repeats the first ("cat"), that hold
#: each value twice in a row ("repeat"), one value per pair ("half"), or one per channel ("full"), where
#: those of a pair may differ; or the phases of each token, with or without phase words.
SOURCES = ("words", "cat", "repeat", "half", "full", "phases")
WORDS, HALF, FULL, PHASES = 0, 3, 4, 5
TABLES = SOURCES[1:PHASES]

#: Kinds of P: none; given by the logarithms of its factors; by slopes, whose products with the position are the
#: logarithms; or by the factors themselves, of any sign.
NO_GATE, LOG, SLOPE, FACTOR = 0, 1, 2, 3

#: Where a rotation rounds: indices into :data:`tightrope._rounding.ROUNDINGS`.
ONCE, WIDE, EACH = 0, 1, 2

_START_BITS = 20


class Options(NamedTuple):
    """The options of a call that are neither tensors nor lengths.

    They are packed into one integer argument, because each argument costs 0.1 µs in the dispatcher,
    and rotating one token in place takes only about 8 µs.

    Attributes:
        layout: index into LAYOUTS.
        start: first rotated channel; the phase words or tables determine the number of pairs.
        interleaved: whether the pairing is interleaved rather than half.
        direction: FORWARD, y = P·a·R(φ)f(x); TRANSPOSE, its gradient, dx = f'(x)ᵀ·a·R(-φ)P·dy; or
            INVERSE, x = R(-φ)(y / P) / a, where f is the identity; a is the amplitude, φ the angle.
        add_index: whether to add the token index to the position.
        source: index into SOURCES.
        learned: whether the extra tensors hold the frequencies of the phase words, or zeros added to
            the phases, for their gradient.
        act: code of f: an index into tightrope.activations.ACTS.
        gate: kind of P: NO_GATE, LOG, SLOPE or FACTOR.
        rounding: ONCE, WIDE or EACH; ONCE if there is an act or a gate.
        back: the rounding of the transposed call.
        narrow: whether cosines and sines from phase words round to the dtype of x first.
        dense: whether new results are contiguous, instead of having the strides of q and k.
        dense_back: ``dense`` of the transposed call.
    """

    layout: int = 0
    start: int = 0
    interleaved: bool = False
    direction: int = FORWARD
    add_index: bool = True
    source: int = WORDS
    learned: bool = False
    act: int = 0
    gate: int = 0
    rounding: int = ONCE
    back: int = ONCE
    narrow: bool = False
    dense: bool = False
    dense_back: bool = False

    def pack(self) -> int:
        """Pack into one integer; `Options` in csrc/bind_problem.h unpacks it."""
        # The compiler cannot trace a cached function, and needs no cache.
        return _pack(self) if torch.compiler.is_compiling() else _packed(self)


def _pack(options: Options) -> int:
    if not 0 <= options.start < 1 << _START_BITS:
        raise RuntimeError(
            f"tightrope: start must lie in [0, 2^{_START_BITS}) but got {options.start}"
        )
    packed = 0
    for value, bits in zip(options, _BITS):
        packed = packed << bits | int(value)
    return packed


_packed = lru_cache(maxsize=1024)(_pack)

# Number of bits of each field, in the order of the fields; the first has the highest bits.
_BITS = (3, _START_BITS, 1, 2, 1, 3, 1, 8, 4, 2, 2, 1, 1, 1)


def options_of(packed: int) -> Options:
    """Unpack the integer of :meth:`Options.pack`.

    >>> options_of(Options(start=5, add_index=False).pack())[:5]
    (0, 5, False, 0, False)
    """
    values = []
    for bits in reversed(_BITS):
        values.append(packed & ((1 << bits) - 1))
        packed >>= bits
    values.reverse()
    fields: list[Any] = [bool(v) if type(d) is bool else v for v, d in zip(values, Options())]
    return Options(*fields)


# q, k        the tensors to rotate, by the same angles; k may be None
# out_q, out_k
#             the results: same shapes, dtype and device, any strides
# primary, secondary
#             the source of the angles: phase words and, if some |ω| >= π or frequencies are
#             learned, turns (see tightrope.angles.phase_at); or tables of any floating dtype,
#             [rows|1, heads|1, length, width], indexed by position along length; or phases, int32 or
#             int64 [rows|1, heads|1, tokens, pairs] (see tightrope.phases), and phase words whose
#             angles are added to them, or None
# positions   int32, int64, float32 or float64 [axes, rows|1, tokens|1], or [axes, rows|1, tokens, heads|1], but not
#             with add_index, slopes or tables; None for zeros. The kernels for CPUs
#             also take fewer dimensions: the leading ones are then of size 1
# offset      added to every position
# options     see Options
# amplitude   a, on the rotated channels only
# extras      extra tensors in this order, each kind for q first and then for k:
#             learned frequencies, from which the phase words were computed, floating
#                 [axes, rows|1, heads|1, pairs] (if options.learned; one tensor for q and k); with
#                 phases, zeros through which their gradient flows, [rows|1, heads|1, tokens, pairs|1]
#             weights of a norm, floating [heads|1, channels] (if act is a norm)
#             gates, floating, any strides: LOG and FACTOR [rows|1, heads|1, tokens|1, channels|1] in every
#                 layout; SLOPE [heads|1, channels|1], for positions of one axis
#             q and k of the forward call (if direction is TRANSPOSE and f is not the identity)
# eps         epsilon of a norm
#
# Calls with extra tensors have their own overload: the dispatcher inspects the tensors of a list only
# if the list is not optional, and such a list costs half a microsecond even if it is empty.
#
# rotate returns the results and then, if direction is TRANSPOSE and act is a norm, the gradients of the
# norm's weights, in the shapes of the weights, float32 (float64 if q is).
_ARGUMENTS = "Tensor primary, Tensor? secondary, Tensor? positions, SymInt offset, int options, float amplitude"
_EXTRAS = ", Tensor[] extras, float eps"

#: Schemas by name: two for each operator, without and with extra tensors (overload "extras").
ROTATIONS = {
    name + overload: f"{name}{overload}({xs}, {_ARGUMENTS}{more}) -> {result}"
    for name, xs, result in (
        ("rotate", "Tensor q, Tensor? k", "Tensor[]"),
        ("rotate_", "Tensor(a!) q, Tensor(b!)? k", "()"),
        ("rotate_into", "Tensor q, Tensor? k, Tensor(a!) out_q, Tensor(b!)? out_k", "()"),
    )
    for overload, more in (("", ""), (".extras", _EXTRAS))
}

# Rotates into the caller's tensors, the last result into slots of a cache, and copies values to the same slots.
#
# values      tensor in the layout of k, with its rows, tokens and dtype; None for no values
# out_q, out_k
#             as in rotate_into; the last one is a cache: in the layout of k, with blocks for rows and entries for
#             tokens; for "thd" and "sd" also with a dimension of blocks before that of entries
# out_values  a cache for the values, with the same blocks and entries
# slots       int32 or int64 [rows, tokens], or [tokens] for one row: the entry of each token, counted through all
#             blocks; -1 for none; None, with scales only, for caches in the shapes of k and values
# scale, values_scale
#             float32 [1] or [heads], which keys and values are divided by: the caches are then float8_e4m3fn or
#             float8_e5m2, and values may have another floating dtype than k. The kernel for CPUs takes none
#
# The first overload is for calls without values and extra tensors.
SLOTTED = {
    "rotate_slots": "rotate_slots(Tensor q, Tensor? k, Tensor(a!) out_q, Tensor(b!)? out_k, Tensor slots, "
    f"{_ARGUMENTS}) -> ()",
    "rotate_slots.extras": "rotate_slots.extras(Tensor q, Tensor? k, Tensor? values, Tensor(a!) out_q, "
    "Tensor(b!)? out_k, Tensor(c!)? out_values, Tensor? slots, Tensor? scale, Tensor? values_scale, "
    f"{_ARGUMENTS}{_EXTRAS}) -> ()",
}

# Rotates entries of a cache in place; `slots` as above, but none twice.
ENTRIES = f"rotate_slots_(Tensor(a!) cache, Tensor slots, {_ARGUMENTS}{_EXTRAS}) -> ()"

# Gradients of the angles, in float64 (float32 on devices without float64): for positions, [axes, rows, tokens] or
# [axes, rows, tokens, heads|1], summed over pairs and the heads that share them; for frequencies, in the shape of the
# phase words, summed over tokens and over the rows and heads that share them; for phases, in their shape, float32
# (float64 if y is), summed over the rows and heads that share them. A gradient that is not requested has size 0 in its
# first dimension. There are no gradients for positions with phases.
#
# y, z        results of rotate: one or two
# grad_y, grad_z
#             their gradients
# words … options
#             the arguments of rotate, from primary on
ANGLE_GRADIENTS = (
    "angle_gradients(Tensor y, Tensor? z, Tensor grad_y, Tensor? grad_z, Tensor words, "
    "Tensor? turns, Tensor? positions, SymInt offset, int options, bool by_positions, "
    "bool by_frequencies) -> (Tensor, Tensor)"
)

# Gradients of the logarithms of a gate, Σ y·dy, or of slopes, Σ p·y·dy, summed over the dimensions that
# the gate broadcasts: in the shape of the gates, float32 (float64 for float64); one for each result. Those of factors
# are those of logarithms, for results without the gate.
#
# y, z        results of rotate
# gate_q, gate_k
#             the gates given to rotate
GATE_GRADIENTS = (
    "gate_gradients(Tensor y, Tensor? z, Tensor grad_y, Tensor? grad_z, Tensor gate_q, "
    "Tensor? gate_k, Tensor? positions, SymInt offset, int options) -> Tensor[]"
)

# Phases from data: phase words of angles, or of increments and their running sums over tokens, in 64 bits
# if `wide`, otherwise their upper 32, rounded to nearest. The smallest integer marks a phase that is NaN
# (see tightrope.phases). The first result has the strides of `increments` if it has its shape.
#
# increments  floating [rows|1, heads, tokens, pairs], radians; any strides here and below
# state       the sums before the first token, int64 [rows|1, heads, pairs]; None for 0
# reset       bool [rows|1, tokens]: whether a new sum starts with a token; None for nowhere
# running     whether to return running sums; if not, there are no state and reset
#
# `last` holds the sums after the last token, int64 [rows, heads, pairs]; if not `running`, its first
# dimension has size 0.
PHASE_WORDS = (
    "phase_words(Tensor increments, Tensor? state, Tensor? reset, bool running, bool wide) "
    "-> (Tensor words, Tensor last)"
)

# Zeros of stride 0 in the shapes of the results of phase_words, float32 (float64 for float64): each is the
# differentiable part of a phase in radians. `state` holds such zeros.
PHASE_DRIFT = (
    "phase_drift(Tensor increments, Tensor? state, Tensor? reset, bool running) "
    "-> (Tensor drift, Tensor last)"
)

# Gradients of running sums, added up in float64 from the last token to the first, up to each reset: for
# increments, in the shape of `grad` with all rows, and for a state, [rows, heads, pairs].
#
# grad        gradient of each sum, float32 or float64 [rows|1, heads, tokens, pairs]; any strides
# grad_last   gradient of `last`, [rows|1, heads, pairs], in the same dtype; None for 0
PHASE_SUMS = (
    "phase_sums(Tensor grad, Tensor? grad_last, Tensor? reset) "
    "-> (Tensor by_increments, Tensor by_state)"
)

# Cosines and sines by the arithmetic of another library (see tightrope.stacks), for compiled code. All
# steps are torch's own, so the bits are those of eager code.
#
# positions   floating [rows|1, tokens, pairs|1], contiguous
# inv_freq    [pairs], in the same dtype
# divisor, multiplier
#             scalars that positions are divided or multiplied by first; float64 on the CPU, so that torch
#             computes with them as with Python numbers
# factor      a scalar like these, on the results
# polar       whether torch.polar computes them
COS_SIN = (
    "cos_sin(Tensor positions, Tensor inv_freq, Tensor? divisor, Tensor? multiplier, Tensor? factor, "
    "bool polar) -> (Tensor cos, Tensor sin)"
)

_PHASES = (PHASE_WORDS, PHASE_DRIFT, PHASE_SUMS)

#: All schemas. setup.py also compiles them into the native library, for processes without Python.
SCHEMAS = (
    *ROTATIONS.values(),
    *SLOTTED.values(),
    ENTRIES,
    ANGLE_GRADIENTS,
    GATE_GRADIENTS,
    *_PHASES,
    COS_SIN,
)

# The process may have loaded the native library before; and setup.py may run this file once more.
library = torch.library.Library(NAMESPACE, "FRAGMENT")
if not hasattr(operators, "rotate"):
    for _one in SCHEMAS:
        library.define(_one, tags=(torch.Tag.pt2_compliant_tag,))

rotate = operators.rotate.default
rotate_ = operators.rotate_.default
rotate_into = operators.rotate_into.default
rotate_extras = operators.rotate.extras
rotate_extras_ = operators.rotate_.extras
rotate_extras_into = operators.rotate_into.extras
rotate_slots = operators.rotate_slots.default
rotate_slots_extras = operators.rotate_slots.extras
rotate_slots_ = operators.rotate_slots_.default
angle_gradients = operators.angle_gradients.default
gate_gradients = operators.gate_gradients.default
phase_words = operators.phase_words.default
phase_drift = operators.phase_drift.default
phase_sums = operators.phase_sums.default
cos_sin = operators.cos_sin.default


class Arguments(NamedTuple):
    """The schema's arguments after q, k and the outs, by name."""

    primary: Any
    secondary: Any
    positions: Any
    offset: Any
    options: Any
    amplitude: Any
    extras: Any = ()
    eps: Any = 0.0


#: The values of :class:`Arguments`; without the last two, if there are no extra tensors.
Packed: TypeAlias = tuple[Any, ...]


class Operator(NamedTuple):
    """The two overloads of an operator.

    Attributes:
        plain: takes the arguments of a call without extra tensors.
        carrying: takes those of a call with extra tensors.
    """

    plain: Any
    carrying: Any

    def for_(self, packed: Packed) -> Any:
        """Return the overload that takes these arguments."""
        return self.plain if len(packed) == 6 else self.carrying


NEW = Operator(rotate, rotate_extras)
IN_PLACE = Operator(rotate_, rotate_extras_)
OUT = Operator(rotate_into, rotate_extras_into)
SLOTS = Operator(rotate_slots, rotate_slots_extras)


def new_like(x: torch.Tensor, options: Options) -> torch.Tensor:
    """Return uninitialised memory for the result of rotating x."""
    return x.new_empty(x.shape) if options.dense else torch.empty_like(x)


def present(q: torch.Tensor, k: torch.Tensor | None) -> list[torch.Tensor]:
    """Return q, and k if there is one."""
    return [q] if k is None else [q, k]


def pair(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return q and k from a list of one or two tensors; k is None if there is one. Undoes :func:`present`."""
    return xs[0], xs[1] if len(xs) > 1 else None


def scale(direction: int, amplitude: float) -> float:
    """Return the factor on the rotated channels: an inverse divides by the amplitude."""
    return 1.0 / amplitude if direction == INVERSE else amplitude
