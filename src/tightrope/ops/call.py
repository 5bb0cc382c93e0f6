"""A call of the operator, with its arguments by name.

:mod:`.build` makes it, :mod:`.route` chooses its route and :mod:`.run` runs it. It has two other forms:
:func:`pack` gives the arguments of the schema, and :meth:`Call.tensors` a flat row of tensors for
autograd. :func:`unpack` and :meth:`Call.with_tensors` are their inverses. Only autograd functions and
formulas, which torch hands flat rows, also depend on the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ..activations import NONE, RMS_NORM
from .layouts import BY_CODE, Layout
from .schema import (
    FORWARD,
    INVERSE,
    NO_GATE,
    TRANSPOSE,
    WORDS,
    Form,
    Packed,
    Plain,
    form_of,
    present,
    scale,
)

# Tensors, or one fact about each, such as whether it needs a gradient.
_Tensors: TypeAlias = tuple[Any, ...]

#: Where results go: new tensors, the inputs themselves, or `out`.
VERBS = ("new", "in place", "out")


class Carried(NamedTuple):
    """Extra tensors of a call; each part holds that of q, then that of k.

    Attributes:
        frequencies: learned frequencies, from which the phase words were made: one tensor for both.
        weights: of RMSNorm.
        gates: logarithms or slopes of P.
        inputs: x of the forward call, for the transpose of an act.
    """

    frequencies: _Tensors = ()
    weights: _Tensors = ()
    gates: _Tensors = ()
    inputs: _Tensors = ()

    def flat(self) -> _Tensors:
        """All of them, in the order of the schema.

        >>> Carried(("theta",), (), ("gate",)).flat()
        ('theta', 'gate')
        """
        return self.frequencies + self.weights + self.gates + self.inputs

    def like(self, values: Iterable[Any]) -> Carried:
        """Other values in the same parts.

        >>> Carried(("theta",), (), ("gate",)).like([True, False])
        Carried(frequencies=(True,), weights=(), gates=(False,), inputs=())
        """
        rest = iter(values)
        # Lists first: torch 2.11 cannot trace a generator that reads variables of this function.
        return Carried(*[tuple([next(rest) for _ in part]) for part in self])

    def of(self, which: Sequence[int]) -> Carried:
        """The part for some of q (0) and k (1)."""

        def kept(tensors: _Tensors) -> _Tensors:
            return tuple([tensors[i] for i in which]) if tensors else ()

        weights, gates, inputs = kept(self.weights), kept(self.gates), kept(self.inputs)
        return Carried(self.frequencies, weights, gates, inputs)


class Call(NamedTuple):
    """One call of the operator.

    Derived facts are methods: torch 2.10 cannot trace properties of named tuples.

    Attributes:
        q, k: what is rotated; k may be None.
        primary, secondary: the source of the angles: phase words and turns, or tables.
        positions: int32, int64, float32 or float64 ``[axes, rows|1, tokens|1]``, or None for zeros.
        offset: added to every position.
        form: layout, channels, direction and the kinds of f and P.
        amplitude: the factor on the rotated channels.
        carried: tensors that only some calls have.
        eps: of RMSNorm.
        names: what errors call q and k.
        verb: where results go: one of :data:`VERBS`.
        outs: the tensors that the caller gives for them.
        backend: the name of the backend that the caller forces, or None.
    """

    q: Any
    k: Any
    primary: Any
    secondary: Any
    positions: Any
    offset: int
    form: Form
    amplitude: float
    carried: Carried = Carried()
    eps: float = 0.0
    names: Sequence[str] = ("q", "k")
    verb: str = "new"
    outs: Sequence[torch.Tensor] = ()
    backend: str | None = None

    def xs(self) -> list[torch.Tensor]:
        """q, and k where there is one."""
        return present(self.q, self.k)

    def layout(self) -> Layout:
        """Order of the dimensions."""
        return BY_CODE[self.form.layout]

    def is_plain(self) -> bool:
        """Whether f and P are the identity: a rotation alone, which is linear."""
        return self.form.act == NONE and self.form.gate == NO_GATE

    def keeps_inputs(self) -> bool:
        """Whether the backward pass may need q and k as they were before the call."""
        return not self.is_plain() or self.form.source != WORDS

    def on(self, xs: Sequence[torch.Tensor]) -> Call:
        """This call on other tensors."""
        return self._replace(q=xs[0], k=xs[1] if len(xs) > 1 else None)

    def only(self, which: Sequence[int]) -> Call:
        """This call on some of q (0) and k (1)."""
        xs, outs = self.xs(), self.outs
        return self.on([xs[i] for i in which])._replace(
            carried=self.carried.of(which),
            names=[self.names[i] for i in which],
            outs=[outs[i] for i in which] if outs else (),
        )

    def without_gates(self) -> Call:
        """The same with P the identity."""
        carried = self.carried._replace(gates=())
        return self._replace(form=self.form._replace(gate=NO_GATE), carried=carried)

    def transposed(self, inputs: Sequence[torch.Tensor]) -> Call:
        """The backward call: it maps gradients of results to gradients of what was rotated.

        Args:
            inputs: what was rotated, for an act.
        """
        form, carried = self.form, self.carried
        if form.direction == FORWARD:
            direction = TRANSPOSE
            if form.act != NONE:
                carried = carried._replace(inputs=tuple(inputs))
        else:
            direction = FORWARD
            carried = carried._replace(gates=tuple([-gate for gate in carried.gates]))
        return self._replace(
            form=form._replace(direction=direction),
            amplitude=scale(form.direction, self.amplitude),
            carried=carried,
        )

    def tensors(self) -> _Tensors:
        """All tensors, flat, as autograd functions take them; None where one is absent."""
        fixed = (self.q, self.k, self.primary, self.secondary, self.positions)
        return (*fixed, *self.carried.flat())

    def with_tensors(self, values: Iterable[Any]) -> Call:
        """The same with other values in the place of :meth:`tensors`."""
        q, k, primary, secondary, positions, *carried = values
        return self._replace(
            q=q,
            k=k,
            primary=primary,
            secondary=secondary,
            positions=positions,
            carried=self.carried.like(carried),
        )

    def with_arguments(self, values: Sequence[Any]) -> Call:
        """The same with other values in the place of the schema's arguments, such as vmap's dimensions."""
        q, k, primary, secondary, positions, _, _, _, *rest = values
        carried = (rest[0] if rest else None) or [None] * len(self.carried.flat())
        return self.with_tensors((q, k, primary, secondary, positions, *carried))


def pack(call: Call) -> Packed:
    """The arguments of the operator after q and k."""
    packed = Plain(
        call.primary,
        call.secondary,
        call.positions,
        call.offset,
        call.form.pack(),
        call.amplitude,
    )
    carried = call.carried.flat()
    return packed.carrying(packed.form, carried, call.eps) if carried else packed


def unpack(  # noqa: PLR0913, PLR0917  (its parameters are those of the schema)
    q: torch.Tensor,
    k: torch.Tensor | None,
    primary: torch.Tensor,
    secondary: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    form: int,
    amplitude: float,
    carried: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> Call:
    """The call that the schema's arguments stand for.

    Raises:
        RuntimeError: ``carried`` does not match the form.
    """
    what = form_of(form)
    parts = carried_of(what, carried)
    return Call(q, k, primary, secondary, positions, offset, what, amplitude, parts, eps)


def carried_of(form: Form, carried: Sequence[Any]) -> Carried:
    """The parts of what a call of that form carries.

    Raises:
        RuntimeError: it does not match the form.
    """
    carried = tuple(carried)
    if form.act != NONE and form.direction == INVERSE:
        raise RuntimeError("tightrope::rotate: an act has no inverse")
    kinds = (
        form.act == RMS_NORM,
        form.gate != NO_GATE,
        form.act != NONE and form.direction == TRANSPOSE,
    )
    # Dynamo does not support divmod of SymInts.
    own, ways = len(carried) - form.learned, max(sum(kinds), 1)
    count, rest = own // ways, own % ways
    if rest or count not in ((1, 2) if any(kinds) else (0,)):
        raise RuntimeError("tightrope::rotate: carried must hold what the form says")
    at = int(form.learned)
    parts = [carried[:at]]
    for is_there in kinds:
        parts.append(carried[at : at + count] if is_there else ())
        at += count if is_there else 0
    return Carried(*parts)


def tensors_of(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, and in lists among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_of(argument)
