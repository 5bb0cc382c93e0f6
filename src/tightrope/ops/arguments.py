"""The arguments of the operator by their names, and the tensors that only some calls carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..activations import NONE, RMS_NORM
from .layouts import BY_CODE, Layout
from .schema import INVERSE, NO_GATE, TRANSPOSE, Form

# Of tensors; or of what somebody knows of each of them.
_Tensors = tuple[Any, ...]


class Carried(NamedTuple):
    """What ``carried`` of the schema holds; each part for q and then for k.

    Attributes:
        frequencies: those that words were made of: one for both.
        weights: of a norm.
        gates: what P is made of.
        inputs: of the forward call.
    """

    frequencies: _Tensors = ()
    weights: _Tensors = ()
    gates: _Tensors = ()
    inputs: _Tensors = ()

    def packed(self, eps: float) -> tuple[Any, ...]:
        """What follows the amplitude in the schema: nothing where nothing is carried.

        >>> Carried().packed(0.0), Carried(("theta",), (), ("gate",)).packed(0.0)
        ((), (('theta', 'gate'), 0.0))
        """
        carried = self.frequencies + self.weights + self.gates + self.inputs
        return (carried, eps) if carried else ()

    def of(self, which: Sequence[int]) -> Carried:
        """What is left where only some of q (0) and k (1) are."""

        def kept(tensors: _Tensors) -> _Tensors:
            return tuple(tensors[i] for i in which) if tensors else ()

        return Carried(self.frequencies, *map(kept, self[1:]))


def carried_of(form: Form, carried: Sequence[Any]) -> Carried:
    """The parts of ``carried``.

    Args:
        form: of the call.
        carried: as in the schema.

    Raises:
        RuntimeError: it does not hold what the form says.
    """
    there = tuple(carried)
    if form.act != NONE and form.direction == INVERSE:
        raise RuntimeError("tightrope::rotate: an act has no inverse")
    kinds = (
        form.act == RMS_NORM,
        form.gate != NO_GATE,
        form.act != NONE and form.direction == TRANSPOSE,
    )
    # Dynamo has no divmod of symbols.
    own, ways = len(there) - form.learned, max(sum(kinds), 1)
    count, rest = own // ways, own % ways
    if rest or count not in ((1, 2) if any(kinds) else (0,)):
        raise RuntimeError("tightrope::rotate: carried must hold what the form says")
    at = int(form.learned)
    parts = [there[:at]]
    for is_there in kinds:
        parts.append(there[at : at + count] if is_there else ())
        at += count if is_there else 0
    return Carried(*parts)


class Call(NamedTuple):
    """What follows q and k in the schema, unpacked."""

    primary: torch.Tensor
    secondary: torch.Tensor | None
    positions: torch.Tensor | None
    offset: int
    form: Form
    amplitude: float
    carried: Carried = Carried()
    eps: float = 0.0

    @property
    def layout(self) -> Layout:
        """Which dimension is which."""
        return BY_CODE[self.form.layout]

    def packed(self) -> tuple[Any, ...]:
        """As the schema has it."""
        *fixed, form, amplitude, carried, eps = self
        return (*fixed, form.pack(), amplitude, *carried.packed(eps))

    def without_gates(self, which: Sequence[int]) -> Call:
        """The same for some of q (0) and k (1), with P the identity."""
        return self._replace(
            form=self.form._replace(gate=NO_GATE),
            carried=self.carried.of(which)._replace(gates=()),
        )


def tensors_of(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, and in lists among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_of(argument)
