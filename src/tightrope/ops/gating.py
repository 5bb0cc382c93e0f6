"""Lower f and P to codes and tensors of the operator, given the rotation's channels and token positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from .. import gates as gates_
from .._errors import bad_value
from ..activations import Act, RMSNorm, code_of
from ..gates import Gate, Slope, XPos
from ..positions import explicit
from ..spec import PreparedRotation
from .layouts import Layout
from .schema import FACTOR, LOG, NO_GATE, SLOPE


class Stages(NamedTuple):
    """Prologue f and epilogue P of a call, for q and for k.

    Attributes:
        acts: the activation or norm of each; None for the identity.
        gates: the gates of each, any number; their factors multiply.
    """

    acts: tuple[Act, Act]
    gates: tuple[Sequence[Gate], Sequence[Gate]]

    def of_keys(self) -> Stages:
        """Return f and P of a call that rotates k alone."""
        return Stages((self.acts[1],) * 2, (self.gates[1],) * 2)


class Lowered(NamedTuple):
    """f and P of one tensor as the operator takes them.

    Attributes:
        kind: the codes of f and of P in the schema, and the epsilon of a norm; tensors of one kind share a call.
        weight: the weight of a norm, or None.
        gate: the tensor of P, or None.
    """

    kind: tuple[int, int, float]
    weight: torch.Tensor | None
    gate: torch.Tensor | None


def lower(
    stages: Stages,
    names: Sequence[str],
    xs: Sequence[torch.Tensor],
    layout: Layout,
    rotation: PreparedRotation,
    inverse: bool,
    quick: bool = False,
) -> list[Lowered]:
    """Lower f and P of each tensor.

    Args:
        names: names of the tensors in error messages.
        rotation: the rotation of all tensors.
        quick: whether to leave out the checks that the kernel repeats; nothing may be differentiated then.

    Raises:
        ValueError: an activation or a gate does not fit its tensor, has no inverse, or depends on positions that have
            several axes.
        TypeError: one of them holds a DTensor.
    """
    tokens, where = xs[0].shape[layout.token], None
    found: list[Lowered] = []
    for name, x, act, own in zip(names, xs, *stages):
        if inverse and act is not None:
            raise bad_value(
                f"inverse must be False with an act, which has no inverse, but act is {act!r}"
            )
        weight, eps = None, 0.0
        if isinstance(act, RMSNorm):
            weight, eps = act.weight, float(act.eps)
            if quick and weight is not None and not act.unit_offset:
                weight = weight if weight.dim() == 2 else weight[None]  # kernels read any dtype
            else:
                heads = 1 if layout.head is None else x.shape[layout.head]
                weight = act.factors(name, x, heads)
        signed, code, total = False, NO_GATE, None
        if own:
            signed = any(gate.signed for gate in own)
            code = FACTOR if signed else LOG
        # Whether q and k have the same gate. A caller's class may compare tensors by ==.
        again = quick and found and [*map(id, own)] == [*map(id, stages.gates[0])]
        if again:
            code, total = found[0].kind[1], found[0].gate
        for gate in () if again else own:
            if not quick:
                gates_.check_own(name, x, gate)
            if len(own) == 1 and type(gate) is Slope and not _needs_log(rotation):
                code, one = SLOPE, gates_.onto(gate.rates(rotation.channels, x.dtype), x.device)
            elif quick and type(gate) is XPos and not _needs_log(rotation):
                # Unless ids are on a device, all layers share the logarithm.
                key, make = (gate, x.dtype, tokens), partial(_of_tokens, gate, x, tokens, rotation)
                one = rotation.kept.find(key, rotation.ids, x.device, make)
            else:
                if gate.by_position and where is None:
                    where = _token_positions(rotation, tokens, x.device)
                one = gates_.on(gate, x, rotation.channels, where, signed)
            if not quick:
                shape = one.shape if code != SLOPE else (1, one.shape[0], 1)
                gates_.check_fit(name, layout.to_bhsd(x), gate, shape)
            total = one if total is None else total * one if signed else total + one
        found.append(Lowered((code_of(act), code, eps), weight, total))
    return found


def _of_tokens(
    gate: Gate, x: torch.Tensor, tokens: int, rotation: PreparedRotation
) -> torch.Tensor:
    """Return the logarithm of a gate that depends on positions."""
    return gates_.on(gate, x, rotation.channels, _token_positions(rotation, tokens, x.device))


def _needs_log(rotation: PreparedRotation) -> bool:
    """Return whether kernels cannot multiply slopes by the positions: they need a gradient or have heads."""
    return rotation.ids is not None and (rotation.ids.requires_grad or rotation.ids.dim() == 4)


def _token_positions(rotation: PreparedRotation, tokens: int, device: torch.device) -> torch.Tensor:
    """Return the position of each token, ``[rows|1, tokens]`` or ``[rows|1, tokens, heads]``."""
    written = explicit(rotation.where, tokens, device=device).ids
    if written is None or written.shape[0] != 1:
        axes = 0 if written is None else written.shape[0]
        raise bad_value(
            f"positions must have 1 axis for a gate that depends on them but got {axes}; give its "
            "values per token with gates.Given"
        )
    return written[0].to(device)
