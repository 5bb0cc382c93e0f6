"""Choose how a call runs: its route. Only this module inspects torch's modes to choose it.

The first rule that matches decides:

* DEFINITION (plain torch): the caller forces the reference; float64 with f or P; a tensor has, or in a functorch transform
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
from .._rounding import ONCE, codes_of
from .._tracing import have_tangents, is_transformed, may_keep, needs_plain
from ..phases import Phases
from ..positions import DTYPES, Positions, as_positions
from ..spec import LONGEST, Angles, Lengths, PreparedRotation, RopeSpec, prepared
from . import gating, registry
from .build import rotation_options
from .call import Call, tensors_of
from .gating import Stages
from .layouts import BY_NAME, WITH_ROWS
from .registry import takes_on
from .schema import (
    FORWARD,
    HALF,
    INVERSE,
    NEW,
    PHASES,
    Options,
    Packed,
    options_of,
    present,
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
    needs_grad = torch.is_grad_enabled() and any_requires_grad((*call.tensors(), *call.outs))
    is_wide = call.q.dtype == torch.float64 and not call.is_plain()
    if (
        is_wide
        or call.backend == "reference"
        or (
            forward_ad._current_level >= 0
            and have_tangents(tensors_of((call.tensors(), call.outs)), transformed)
        )
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


def route_quick(request: tuple[Any, ...]) -> Packed | None:
    """Return the arguments of the operator if the kernel may be called directly.

    Rotating one decoded token takes a few microseconds, and full checks in Python would take most of
    the time. What concerns the rotation alone is checked once, see :class:`_Launch`. What is left here is
    only what the kernel cannot check; it refuses every other invalid input before it writes.

    Args:
        request: the fields of a :class:`tightrope.ops.build.Request`.

    Returns:
        The arguments, whether or not q and k require grad. None if the call must be built: because it needs
        another route or arguments that are not kept, or to raise the readable error.
    """
    if not is_plain_eager() or registry.forced is not None:
        return None  # modes that watch see the operators of the full path in every call
    _, _, q, k, rope, positions, layout, inverse, stages, _, _, _ = request
    if type(layout) is not str or type(inverse) is not bool:
        return None
    if type(q) is not torch.Tensor or q.layout is not _STRIDED:
        return None
    if k is not None and (type(k) is not torch.Tensor or k.layout is not _STRIDED):
        return None
    try:
        device, shape = q.device, q.shape
    except RuntimeError:
        return None  # a nested tensor
    is_spec = type(rope) is RopeSpec
    if type(rope) is RopeSpec:
        ready = rope._ready  # type: ignore[attr-defined]
        launch = ready.get((device, layout, inverse)) or _of_spec(rope, device, layout, inverse)
    elif type(rope) is PreparedRotation and positions is None and rope.device == device:
        launch = rope.kept.launches.get((layout, inverse)) or _launch(rope, layout, inverse)
    else:
        return None
    if launch.options is None or not shape or shape[-1] != launch.width:
        return None
    at = _line(positions, launch, device) if is_spec else launch.at
    if at is None:
        return None
    ids, offset, add_index = at
    if ids is not None and ids.requires_grad and torch.is_grad_enabled():
        return None
    words, turns, amplitude = launch.angles
    if launch.by_length is not None:
        found = _by_length(launch, at, positions if is_spec else rope.where, shape)
        if found is None:
            return None
        words, turns, amplitude = found
    packed: Packed | None = words, turns, ids, offset, launch.options[add_index], amplitude
    if not is_spec and rope.phases is not None:
        packed = _with_phases(packed, rope.phases, q)  # type: ignore[arg-type]
    elif launch.keeps and stages is None and len(shape) == launch.layout.dims:
        tokens = shape[launch.layout.token]
        # Fewer angles gain less than it takes to look for what is kept, and to compare ids.
        if (tokens if ids is None else tokens * ids.shape[1] // 4) >= _FEW_TOKENS:
            packed = _with_kept(packed, rope, q, k, tokens)  # type: ignore[arg-type]
    if stages is None or packed is None:
        return packed
    if not launch.once or q.dtype == torch.float64:
        return None
    try:
        if is_spec:
            rope = prepared(rope, as_positions(positions), device)
        return _with_stages(packed, q, k, rope, layout, inverse, stages)
    except (Refusal, TypeError, ValueError):
        return None  # the checks of a call that is built come first, and name the tensors


# Ids, offset, and whether to add the token index.
_At: TypeAlias = tuple[torch.Tensor | None, int, bool]


class _Launch(NamedTuple):
    """What a rotation gives to each launch of the kernel in one layout and direction.

    Attributes:
        options: the packed options, for positions that do not add the token index and for those that do; None
            if calls of this rotation must be built.
        angles: phase words, turns and the factor on the rotated channels; of short sequences, if they depend on
            the length.
        at: the positions of a prepared rotation.
        width: the number of channels of a head.
        axes: the number of coordinates of a position.
        layout: the order of the dimensions.
        by_length: where phase words come from that depend on the length; else None.
        once: whether results round once, so that f and P may follow.
        keeps: whether calls share cosines and sines.
    """

    options: tuple[int, int] | None
    angles: Any = None
    at: _At = (None, 0, True)
    width: int = 0
    axes: int = 1
    layout: Any = None
    by_length: Any = None
    once: bool = False
    keeps: bool = False


_UNFIT = _Launch(None)


def _launch(rope: PreparedRotation, layout: str, inverse: bool) -> _Launch:
    """Make what a prepared rotation gives to each launch, and keep it."""
    where, ids, angles = rope.where, rope.ids, rope.angles
    special = rope.stated, rope.stack, rope.inv_freq, where.part
    # Where the definition runs, it checks less than a kernel.
    fits = takes_on(rope.device) and all(one is None for one in special)
    if layout not in BY_NAME:
        return _UNFIT
    if not fits or not (ids is None or (type(ids) is torch.Tensor and ids.device == rope.device)):
        rope.kept.launches[layout, inverse] = _UNFIT
        return _UNFIT
    order, codes = BY_NAME[layout], codes_of(rope.rounding)
    direction = INVERSE if inverse else FORWARD
    options = [
        rotation_options(rope.channels, order.code, direction, add_index, *codes).pack()
        for add_index in (False, True)
    ]
    found = rope.kept.launches[layout, inverse] = _Launch(
        (options[0], options[1]),
        (angles.words, angles.turns, rope.amplitude),
        (ids, where.offset, where.add_index),
        rope.channels.head_dim,
        angles.words.shape[0],
        order,
        rope.source,
        rope.rounding == ONCE,
        rope.device.type == "cpu" and rope.source is None and "each" not in rope.rounding,
    )
    return found


def _of_spec(spec: RopeSpec, device: torch.device, layout: str, inverse: bool) -> _Launch:
    """Make what a spec gives to each launch, and keep it if a cache may hold it."""
    if layout not in BY_NAME or not takes_on(device) or not may_keep(device):
        return _UNFIT
    words = spec.words
    angles = Angles(*words.of(None, device), words.amplitude_hex)
    source = words if words.by_length else None
    rope = PreparedRotation(spec.channels, angles, Positions(), device, spec, source)
    found = _launch(rope, layout, inverse)._replace(keeps=False)
    spec._ready[device, layout, inverse] = found  # type: ignore[attr-defined]
    return found


def _line(positions: object, launch: _Launch, device: torch.device) -> _At | None:
    """Return the positions of a call with a spec; None to build it."""
    ids, offset, add_index, axes = None, 0, True, 1
    if type(positions) is int:
        offset = positions
        if not -(2**63) <= offset < 2**63:
            return None
    elif type(positions) is Positions:
        if positions.part is not None:
            return None
        ids, offset, add_index = positions.ids, positions.offset, positions.add_index
        if ids is not None:
            axes = ids.shape[0]
    elif type(positions) is torch.Tensor:
        if positions.layout is not _STRIDED or positions.dtype not in DTYPES:
            return None
        if not 1 <= positions.dim() <= 2:
            return None
        ids, add_index = positions, False
        if device.type != "cpu":
            # Only the kernels for CPUs read ids without their leading dimensions.
            ids = as_positions(positions).ids
    elif positions is not None:
        return None
    if axes != launch.axes:
        return None
    if ids is not None and (type(ids) is not torch.Tensor or ids.device != device):
        return None
    return ids, offset, add_index


def _by_length(
    launch: _Launch, at: _At, positions: object, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor | None, float] | None:
    """Return the phase words and the factor for the lengths of a call; None to build it."""
    (ids, offset, _), order, own = at, launch.layout, launch.by_length
    if len(shape) != order.dims:
        return None
    tokens, device = shape[order.token], launch.angles[0].device
    lengths: Lengths | None = (min(max(0, offset + tokens), LONGEST),)
    if ids is not None:
        where = as_positions(positions)  # type: ignore[arg-type]
        lengths = own.lengths(where, tokens, device, WITH_ROWS.get(order.name))
    elif tokens > 1 and offset > 0:
        return None  # a slice of a sequence whose length is not given: an error
    amplitude = launch.angles[2]
    if not own.one_amplitude:
        amplitude = float.fromhex(own.amplitude(lengths))
    return *own.of(lengths, device), amplitude


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
    order = BY_NAME[layout]
    if q.dim() != order.dims:
        return None
    found = gating.lower(stages, ("q", "k"), present(q, k), order, rotation, inverse, quick=True)
    act, gate, eps = found[0].kind
    if found[-1].kind != found[0].kind:
        return None
    extras = [
        t for t in (*[one.weight for one in found], *[one.gate for one in found]) if t is not None
    ]
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


def either_learns(q: torch.Tensor, k: torch.Tensor | None) -> bool:
    """Return whether q or k requires grad."""
    return q.requires_grad or (k is not None and k.requires_grad)


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
