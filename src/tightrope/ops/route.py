"""Choose how a call runs: its route. Only this module inspects torch's modes to choose it.

The first rule that matches decides:

* DEFINITION (plain torch): the caller forces the reference; a tensor has, or in a functorch transform
  may have, a forward-mode tangent; the call is compiled inside a functorch transform, or exported to
  a runtime that lacks the operators; a transform other than functionalize is active and the call has
  f or P;
* TRACED: compile, other exports, functionalize;
* AUTOGRAD: other functorch transforms; eager code in which a tensor requires grad;
* KERNEL: everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import forward_ad

from .._errors import Refusal
from .._tracing import have_tangents, is_transformed, may_keep, needs_plain
from ..activations import NONE, RMSNorm, code_of
from ..phases import Phases
from ..positions import DTYPES, Positions, as_positions
from ..spec import LONGEST, Lengths, PreparedRotation, RopeSpec, prepared
from . import gating
from .build import Stages, rotation_options
from .call import Call, tensors_of
from .checks import RoundingLike
from .layouts import BY_NAME, WITH_ROWS
from .registry import takes
from .schema import (
    FORWARD,
    HALF,
    INVERSE,
    NEW,
    NO_GATE,
    PHASES,
    ROUNDINGS,
    Options,
    Packed,
    options_of,
)

DEFINITION, TRACED, AUTOGRAD, KERNEL = ROUTES = ("definition", "traced", "autograd", "kernel")

_DENSE_TYPES = (torch.Tensor, torch.nn.Parameter)


class Way(NamedTuple):
    """The route of a call and the torch modes that were active when it was chosen.

    Attributes:
        route: one of :data:`ROUTES`.
        transformed: whether a functorch transform is active.
        needs_grad: whether autograd records the call.
        sees_memory: whether the tensors have real data pointers, so that overlap can be checked.
    """

    route: str
    transformed: bool
    needs_grad: bool
    sees_memory: bool


_KERNEL_WAY = Way(KERNEL, False, False, True)


def route(call: Call) -> Way:
    """Choose the route of a call."""
    compiling, transformed = torch.compiler.is_compiling(), is_transformed()
    needs_grad = torch.is_grad_enabled() and _any_wants_grad(call)
    if call.backend == "reference" or (
        forward_ad._current_level >= 0
        and have_tangents(tensors_of((call.tensors(), call.outs)), transformed)
    ):
        found = DEFINITION
    elif compiling:
        # Inside torch.func.grad the compiler ignores gradient formulas registered from Python, but it can
        # trace and fuse plain torch.
        found = DEFINITION if transformed or needs_plain() else TRACED
    elif transformed:
        if _functionalizes():
            found = TRACED
        else:
            # Every transform handles plain torch, even if vmap maps a weight.
            found = AUTOGRAD if call.is_plain() else DEFINITION
    elif needs_grad:
        found = AUTOGRAD
    else:
        return _KERNEL_WAY
    return Way(found, transformed, needs_grad, not (compiling or transformed))


# The operator's arguments that do not depend on positions, which a spec keeps for each device, layout,
# direction and rounding: phase words and turns; the packed options, for positions that do not add the token
# index and for those that do; the factor on the rotated channels; the number of coordinates of a position;
# and whether phase words depend on the length, these then being those of short sequences.
_Ready: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, tuple[int, int], float, int, bool]


def route_quick(  # noqa: PLR0913, PLR0917  (a tuple of arguments would cost a decoded token time)
    rope: object,
    positions: object,
    q: torch.Tensor,
    k: torch.Tensor | None,
    layout: str,
    inverse: bool,
    stages: Stages | None,
    rounding: RoundingLike | None = None,
    phases: object = None,
) -> Packed | None:
    """Return the arguments of the operator if the kernel may be called directly.

    Rotating one decoded token takes a few microseconds, and full checks in Python would take most of
    the time. This function therefore checks only what the kernel cannot check. The kernel
    refuses every other invalid input before it writes.

    Args:
        rope: a spec, or a rotation that was prepared from one.

    Returns:
        The arguments, whether or not q and k require grad. None if the call must be built: because it needs
        another route or arguments that are not kept, or to raise the readable error.
    """
    if not is_plain_eager():
        return None  # modes that watch see the operators of the full path in every call
    if type(layout) is not str or type(inverse) is not bool or type(q) is not torch.Tensor:
        return None
    if rounding is None:
        rounding = "once"
    elif type(rounding) is not str:
        return None
    if k is not None and type(k) is not torch.Tensor:
        return None
    spec, where, angles, source = rope, positions, None, None
    if type(rope) is PreparedRotation and positions is None:
        if rope.stated is not None or rope.stack is not None:
            return None
        spec, where, angles, source = rope.spec, rope.where, rope.angles, rope.source
    if type(spec) is not RopeSpec:
        return None
    if q.layout is not _STRIDED or (k is not None and k.layout is not _STRIDED):
        return None
    try:
        device, shape = q.device, q.shape
    except RuntimeError:
        return None  # a nested tensor
    ready = spec._ready.get((device, layout, inverse, rounding))  # type: ignore[attr-defined]
    if ready is None:
        ready = _ready(spec, q, layout, inverse, rounding)
        if ready is None:
            return None
    words, turns, options, amplitude, axes, by_length = ready
    if (
        not shape
        or shape[-1] != spec.head_dim
        or (angles is not None and angles.words is not words)
    ):
        return None
    ids, offset, add_index, own_axes = None, 0, True, 1
    if type(where) is Positions:
        if where.part is not None:
            return None
        ids, offset, add_index = where.ids, where.offset, where.add_index
        if ids is not None:
            if type(ids) is not torch.Tensor:
                return None
            own_axes = ids.shape[0]
    elif type(where) is int:
        offset = where
        if not -(2**63) <= offset < 2**63:
            return None
    elif type(where) is torch.Tensor:
        if where.layout is not _STRIDED or not 1 <= where.dim() <= 2 or where.dtype not in DTYPES:
            return None
        ids, add_index = where, False
        if by_length or not q.is_cpu:
            # Only the kernels for CPUs read ids without their leading dimensions.
            where = as_positions(where)
            ids = where.ids
    elif where is not None:
        return None
    if own_axes != axes or (ids is not None and ids.device != device):
        return None
    if ids is not None and ids.requires_grad and torch.is_grad_enabled():
        return None
    if by_length:
        at = BY_NAME[layout]
        if len(shape) != at.dims or (angles is not None and source is None):
            return None
        tokens, own = shape[at.token], spec.words
        if tokens > 1 and offset > 0 and ids is None:
            return None  # a slice of a sequence whose length is not given: an error
        lengths: Lengths | None = (min(max(0, offset + tokens), LONGEST),)
        if type(where) is Positions and ids is not None:
            lengths = own.lengths(where, tokens, device, WITH_ROWS.get(layout))
        words, turns = own.of(lengths, device)
        if not own.one_amplitude:
            amplitude = float.fromhex(own.amplitude(lengths))
    plain = words, turns, ids, offset, options[add_index], amplitude
    if angles is not None and q.is_cpu and not by_length:
        tokens = shape[BY_NAME[layout].token] if len(shape) == BY_NAME[layout].dims else 0
        # Fewer angles gain less than it takes to look for what is kept, and to compare ids.
        worth = tokens if ids is None else tokens * ids.shape[1] // 4
        if worth >= _FEW_TOKENS and phases is None and stages is None and rounding != "each":
            plain = _with_kept(plain, rope, q, k, tokens)  # type: ignore[arg-type]
    packed = plain if phases is None else _with_phases(plain, phases, q)
    if stages is None or packed is None:
        return packed
    if rounding != "once":
        return None
    try:
        if rope is spec:
            rope = prepared(spec, as_positions(where), device)
        return _with_stages(packed, q, k, rope, layout, inverse, stages)  # type: ignore[arg-type]
    except (Refusal, TypeError, ValueError):
        return None  # the checks of a call that is built come first, and name the tensors


_STRIDED = torch.strided
_FEW_TOKENS = 64
# Heads that share the angles of a token, up to which it is faster to read cosines and sines than to compute them.
_FEW_HEADS = 8
# Bytes of the largest tables of one rotation that are kept.
_MOST_KEPT = 1 << 25


def _with_kept(
    packed: Packed, rope: PreparedRotation, q: torch.Tensor, k: torch.Tensor | None, tokens: int
) -> Packed:
    """Replace phase words by the cosines and sines that a prepared rotation keeps, if few heads share them."""
    words, turns, ids, offset, options, amplitude = packed
    rows, pairs, wide = 1 if ids is None else ids.shape[1], words.shape[-1], q.element_size() == 8
    shared = rows * tokens * q.shape[-1]
    many = q.numel() + (0 if k is None else k.numel()) > _FEW_HEADS * shared
    apart = words.shape[2] != 1 or (ids is not None and ids.dim() == 4)
    if many or apart or rows * tokens * pairs * (16 if wide else 8) > _MOST_KEPT:
        return packed

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        dtype = q.dtype if wide else torch.float32
        x = torch.zeros((rows, 1, tokens, 2 * pairs), dtype=dtype, device=q.device)
        x[..., :pairs] = 1.0  # the pairs (1, 0) become (cosine, sine)
        own = Options(BY_NAME["bhsd"].code, add_index=options_of(options).add_index).pack()
        with torch._C._AutoDispatchBelowAutograd():
            (y,) = NEW.plain(x, None, words, turns, ids, offset, own, 1.0)
        return y[..., :pairs], y[..., pairs:]

    found = rope.kept_angles((tokens, wide), make)
    return packed if found is None else (*found, None, 0, _by_tables(options), amplitude)


@lru_cache(maxsize=1024)
def _by_tables(options: int) -> int:
    """Return the packed options of the same rotation by tables of its tokens, an entry for each pair."""
    return options_of(options)._replace(add_index=True, source=HALF).pack()


def _ready(
    spec: RopeSpec, q: torch.Tensor, layout: str, inverse: bool, rounding: str
) -> _Ready | None:
    """Make the arguments that a spec keeps; None if the call must be built."""
    where, device = BY_NAME.get(layout), q.device
    if where is None or rounding not in ROUNDINGS or not may_keep(device):
        return None
    if not takes(q):
        return None  # the definition runs, which checks less than a kernel
    found, code = spec.words.on(device), ROUNDINGS.index(rounding)
    direction = INVERSE if inverse else FORWARD
    options = [
        rotation_options(spec.channels, where.code, direction, add_index, code, code).pack()
        for add_index in (False, True)
    ]
    both = options[0], options[1]
    scaling, axes = spec.attention_scaling(), spec.axis_count
    ready = found.words, found.turns, both, scaling, axes, spec.by_length
    spec._ready[device, layout, inverse, rounding] = ready  # type: ignore[attr-defined]
    return ready


def is_plain(x: object, learns: bool = False) -> bool:
    """Return whether the kernels for CPUs check all else of a tensor, so that they may take it directly.

    Args:
        learns: whether the tensor may require grad.
    """
    return (
        type(x) is torch.Tensor
        and x.is_cpu
        and x.layout is _STRIDED
        and (learns or not (x.requires_grad and torch.is_grad_enabled()))
    )


def is_plain_eager() -> bool:
    """Return whether no mode, transform or compiler watches: the kernel may be called directly."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def mode() -> str:
    """Return the active mode: "compiled", "transformed" (functorch), "forward" (forward-mode AD) or "eager".

    Used by code that has an alternative to the operator, such as the original function of a model.
    """
    if torch.compiler.is_compiling():
        return "compiled"
    if is_transformed():
        return "transformed"
    return "eager" if forward_ad._current_level < 0 else "forward"


def is_differentiated() -> bool:
    """Return whether the running backward pass may itself be differentiated."""
    return torch.is_grad_enabled() or is_transformed()


def _with_phases(packed: Packed, phases: object, q: torch.Tensor) -> Packed | None:
    """Add phases to packed arguments; None if the call must be built."""
    words, turns, positions, offset, options, amplitude = packed
    if (
        type(phases) is not Phases
        or phases.drift is not None
        or turns is not None
        or (positions is not None and positions.is_floating_point())
    ):
        return None
    found = phases.words(q.dtype == torch.float64)
    if found.shape[3] != words.shape[3] or found.device != q.device:
        return None
    return found, words, positions, offset, _options_with(options, source=PHASES), amplitude


@lru_cache(maxsize=1024)
def _options_with(options: int, **changes: Any) -> int:
    return options_of(options)._replace(**changes).pack()


def _with_stages(
    packed: Packed,
    q: torch.Tensor,
    k: torch.Tensor | None,
    rotation: PreparedRotation,
    layout: str,
    inverse: bool,
    stages: Stages,
) -> Packed | None:
    """Add f and P to packed arguments; None if the call must be built, for example because the tensors
    of f and P cannot be passed on unchanged.

    Nothing computed from a tensor of f or P is cached, so each call sees the current values.
    """
    count = 1 if k is None else 2
    first, eps, act, gate = stages.acts[0], 0.0, NONE, NO_GATE
    extras: list[torch.Tensor] = []
    if first is not None or stages.acts[count - 1] is not None:
        if inverse:
            return None
        for own in stages.acts[:count]:
            if not isinstance(first, RMSNorm):
                if own != first:
                    return None
                continue
            if not isinstance(own, RMSNorm) or own.unit_offset or own.eps != first.eps:
                return None
            if own.weight is None:
                return None
            extras.append(own.weight if own.weight.dim() == 2 else own.weight[None])
            eps = float(first.eps)
        act = code_of(first)
    if stages.gates[0] or stages.gates[1]:
        found = gating.lower_quickly(stages.gates[:count], q, rotation, layout)
        if found is None:
            return None
        gate, logs = found
        extras += logs
    device, learns = q.device, torch.is_grad_enabled()
    for t in extras:
        if type(t) not in _DENSE_TYPES or t.device != device or (learns and t.requires_grad):
            return None
    *fixed, options, amplitude = packed
    changed = (*fixed, _options_with(options, act=act, gate=gate), amplitude)
    return (*changed, extras, eps) if extras else changed


def _functionalizes() -> bool:
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() == torch._C._functorch.TransformType.Functionalize


def wants_grad(q: torch.Tensor, k: torch.Tensor | None) -> bool:
    """Return whether autograd records a rotation of q and k."""
    return torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))


def _any_wants_grad(call: Call) -> bool:
    # Written out because a loop over all tensors takes three times as long.
    k, primary, secondary, positions = call.k, call.primary, call.secondary, call.positions
    return (
        call.q.requires_grad
        or (k is not None and k.requires_grad)
        or primary.requires_grad
        or (secondary is not None and secondary.requires_grad)
        or (positions is not None and positions.requires_grad)
        or any_requires_grad(call.extras.flat())
        or any_requires_grad(call.outs)
    )


def learns_angles(call: Call) -> bool:
    """Return whether a tensor other than q, k and the weights of a norm requires grad."""
    angles = (call.primary, call.secondary, call.positions, *call.extras.frequencies)
    return any_requires_grad((*angles, *call.extras.gates))


def any_requires_grad(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Return whether one of the tensors requires grad."""
    for t in tensors:
        if t is not None and t.requires_grad:
            return True
    return False
