"""One call of the operator, with its arguments by name.

:mod:`.build` makes a :class:`Call`, :mod:`.route` chooses its route and :mod:`.run` runs it. A call
converts to two flat sequences and back: :func:`pack` and :func:`unpack` for the arguments of the
schema, :meth:`Call.tensors` and :meth:`Call.with_tensors` for autograd functions. Outside this
module only :mod:`.autograd` and :mod:`.memory` depend on the order of :meth:`Call.tensors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from ..activations import NONE, RMS_NORM
from .layouts import BY_CODE, Layout
from .schema import (
    FACTOR,
    FORWARD,
    INVERSE,
    NO_GATE,
    PHASES,
    TRANSPOSE,
    WORDS,
    Options,
    Packed,
    options_of,
    present,
    scale,
)

# Tensors, or one value in place of each, such as whether it needs a gradient.
_Tensors: TypeAlias = tuple[Any, ...]

#: Where results are written: to new tensors, to the inputs themselves, or to `out`.
VERBS = ("new", "in place", "out")


class Extras(NamedTuple):
    """Extra tensors of a call.

    A field is empty, or holds a tensor for q and then, if k is given, one for k; ``frequencies``
    holds one tensor for both.

    Attributes:
        frequencies: learned frequencies, from which the phase words were computed; or zeros that are
            added to phases, for their gradient.
        weights: RMSNorm weights.
        gates: logarithms or slopes of P.
        inputs: q and k of the forward call; the transpose of an activation needs them.
    """

    frequencies: _Tensors = ()
    weights: _Tensors = ()
    gates: _Tensors = ()
    inputs: _Tensors = ()

    def flat(self) -> _Tensors:
        """Return all extra tensors in the order of the schema.

        >>> Extras(("theta",), (), ("gate",)).flat()
        ('theta', 'gate')
        """
        return self.frequencies + self.weights + self.gates + self.inputs

    def like(self, values: Iterable[Any]) -> Extras:
        """Return the same structure, filled with these values.

        >>> Extras(("theta",), (), ("gate",)).like([True, False])
        Extras(frequencies=(True,), weights=(), gates=(False,), inputs=())
        """
        rest = iter(values)
        # Lists first: torch 2.11 cannot trace a generator that reads variables of this function.
        return Extras(*[tuple([next(rest) for _ in part]) for part in self])

    def of(self, which: Sequence[int]) -> Extras:
        """Keep only the tensors of the given operands: q (0), k (1)."""

        def kept(tensors: _Tensors) -> _Tensors:
            return tuple([tensors[i] for i in which]) if tensors else ()

        weights, gates, inputs = kept(self.weights), kept(self.gates), kept(self.inputs)
        return Extras(self.frequencies, weights, gates, inputs)


#: The names of caches for keys and for values in error messages.
KEYS, VALUES = "cache[0]", "cache[1]"


class Slots(NamedTuple):
    """Where the last result of a call goes, if that is a cache.

    Attributes:
        slot: the slot of each token, int32 or int64, ``(tokens,)`` or ``(rows, tokens)``, -1 for none; None if
            the cache has the shape of the keys, for example a slice of a contiguous one.
        values: tensor to copy to the same slots, or None.
        cache: the cache for it.
        scales: the scales of keys and of values, for caches in 8 bits; else None. See :mod:`.scaled`.
    """

    slot: Any
    values: torch.Tensor | None = None
    cache: torch.Tensor | None = None
    scales: tuple[Any, Any] | None = None

    def written(self) -> list[torch.Tensor]:
        """Return the cache for values, if there is one."""
        return [] if self.cache is None else [self.cache]

    def read(self) -> list[torch.Tensor]:
        """Return the values, if there are some."""
        return [] if self.values is None else [self.values]


class Call(NamedTuple):
    """One call of the operator.

    Derived values are methods, because torch 2.10 cannot trace properties of named tuples.

    Attributes:
        q, k: the tensors to rotate; k may be None.
        primary, secondary: the source of the angles: phase words and turns; cosine and sine tables; or
            phases and phase words.
        positions: int32, int64, float32 or float64 ``[axes, rows|1, tokens|1]`` or
            ``[axes, rows|1, tokens, heads|1]``, or None for zeros.
        offset: added to every position.
        options: layout, channels, direction and the kinds of f and P.
        amplitude: the factor on the rotated channels.
        extras: extra tensors.
        eps: epsilon of RMSNorm.
        names: names of q and k in error messages.
        verb: where results are written: one of :data:`VERBS`.
        outs: the caller's result tensors, for the verb "out".
        backend: the backend that the caller forces, by name, or None.
        slots: where the last result goes, if its ``out`` is a cache; for the verb "out".
    """

    q: Any
    k: Any
    primary: Any
    secondary: Any
    positions: Any
    offset: int
    options: Options
    amplitude: float
    extras: Extras = Extras()
    eps: float = 0.0
    names: Sequence[str] = ("q", "k")
    verb: str = "new"
    outs: Sequence[torch.Tensor] = ()
    backend: str | None = None
    slots: Slots | None = None

    def xs(self) -> list[torch.Tensor]:
        """Return q, and k if there is one."""
        return present(self.q, self.k)

    def layout(self) -> Layout:
        """Return the layout: the order of the dimensions."""
        return BY_CODE[self.options.layout]

    def is_plain(self) -> bool:
        """Return whether f and P are the identity: a rotation alone, which is linear."""
        return self.options.act == NONE and self.options.gate == NO_GATE

    def keeps_inputs(self) -> bool:
        """Return whether the backward pass may need q and k as they were before the call."""
        return not self.is_plain() or self.options.source not in (WORDS, PHASES)

    def on(self, xs: Sequence[torch.Tensor]) -> Call:
        """Return this call with these tensors as q and k."""
        return self._replace(q=xs[0], k=xs[1] if len(xs) > 1 else None)

    def copied(self) -> Call:
        """Return this call on copies of q and k, which are about to be overwritten."""
        return self.on([x.clone() for x in self.xs()])

    def only(self, which: Sequence[int]) -> Call:
        """Return this call for only the given operands: q (0), k (1)."""
        xs, outs = self.xs(), self.outs
        return self.on([xs[i] for i in which])._replace(
            extras=self.extras.of(which),
            names=[self.names[i] for i in which],
            outs=[outs[i] for i in which] if outs else (),
            slots=self.slots if len(xs) - 1 in which else None,
        )

    def transposed(self, inputs: Sequence[torch.Tensor]) -> Call:
        """Return the backward call, which maps gradients of the results to gradients of q and k.

        Args:
            inputs: q and k of the forward call; used only if f is not the identity.
        """
        options, extras = self.options, self.extras
        if options.direction != FORWARD:
            signed = options.gate == FACTOR
            gates = [gate.reciprocal() if signed else -gate for gate in extras.gates]
            extras = extras._replace(gates=tuple(gates))
        elif options.act != NONE:
            extras = extras._replace(inputs=tuple(inputs))
        amplitude = scale(options.direction, self.amplitude)
        return self._replace(options=_transposed(options), amplitude=amplitude, extras=extras)

    def tensors(self) -> _Tensors:
        """Return all tensors as one tuple, for autograd functions; None for an absent tensor."""
        fixed = (self.q, self.k, self.primary, self.secondary, self.positions)
        return (*fixed, *self.extras.flat())

    def with_tensors(self, values: Iterable[Any]) -> Call:
        """Return this call with its :meth:`tensors` replaced."""
        q, k, primary, secondary, positions, *extras = values
        return self._replace(
            q=q,
            k=k,
            primary=primary,
            secondary=secondary,
            positions=positions,
            extras=self.extras.like(extras),
        )

    def with_arguments(self, values: Sequence[Any]) -> Call:
        """Return this call with each tensor replaced by the value for it, such as its vmap dimension.

        Args:
            values: one for each argument of the schema of ``rotate``.
        """
        q, k, primary, secondary, positions, _, _, _, *rest = values
        extras = (rest[0] if rest else None) or [None] * len(self.extras.flat())
        return self.with_tensors((q, k, primary, secondary, positions, *extras))


def _transposed(options: Options) -> Options:
    return options._replace(
        direction=TRANSPOSE if options.direction == FORWARD else FORWARD,
        rounding=options.back,
        back=options.rounding,
        dense=options.dense_back,
        dense_back=options.dense,
    )


@lru_cache(maxsize=1024)
def transposed(options: int, amplitude: float) -> tuple[int, float]:
    """Return the packed options and the amplitude of the backward call of a rotation alone."""
    unpacked = options_of(options)
    return _transposed(unpacked).pack(), scale(unpacked.direction, amplitude)


def pack(call: Call) -> Packed:
    """Return the operator's arguments that follow q and k."""
    packed = (
        call.primary,
        call.secondary,
        call.positions,
        call.offset,
        call.options.pack(),
        call.amplitude,
    )
    extras = call.extras.flat()
    return (*packed, extras, call.eps) if extras else packed


_WHOLE = 4  # dimensions of tables: rows, heads, length, width


def unpack(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    q: torch.Tensor,
    k: torch.Tensor | None,
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    options: int,
    amplitude: float,
    extras: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> Call:
    """Build the call from the arguments of the schema.

    Raises:
        RuntimeError: ``extras`` does not match the options.
    """
    unpacked = options_of(options)
    parts = extras_of(unpacked, extras)
    # The kernels for CPUs take positions and tables without their leading dimensions of size 1.
    if positions is not None and positions.dim() < _WHOLE - 1:
        positions = positions[(None,) * (_WHOLE - 1 - positions.dim())]
    if unpacked.source not in (WORDS, PHASES) and secondary is not None and primary.dim() < _WHOLE:
        primary, secondary = (
            t[None, None] if t.dim() < 3 else t[:, None] for t in (primary, secondary)
        )
    return Call(q, k, primary, secondary, positions, offset, unpacked, amplitude, parts, eps)


def extras_of(options: Options, extras: Sequence[Any]) -> Extras:
    """Split the flat list of extra tensors into the fields of :class:`Extras`.

    Raises:
        RuntimeError: the list does not match the options.
    """
    extras = tuple(extras)
    if options.act != NONE and options.direction == INVERSE:
        raise RuntimeError(
            "tightrope::rotate: options must not combine an act with inverse, as an act has no inverse"
        )
    kinds = (
        options.act == RMS_NORM,
        options.gate != NO_GATE,
        options.act != NONE and options.direction == TRANSPOSE,
    )
    # Dynamo does not support divmod of SymInts.
    others, groups = len(extras) - options.learned, max(sum(kinds), 1)
    count, rest = others // groups, others % groups
    if rest or count not in ((1, 2) if any(kinds) else (0,)):
        raise RuntimeError(
            "tightrope::rotate: the number of extra tensors does not match the options"
        )
    at = int(options.learned)
    parts = [extras[:at]]
    for is_there in kinds:
        parts.append(extras[at : at + count] if is_there else ())
        at += count if is_there else 0
    return Extras(*parts)


def tensors_of(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments, including those inside lists and tuples."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_of(argument)
