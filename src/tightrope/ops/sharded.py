"""Calls on DTensors: each process rotates its own shard, and no process communicates.

The arguments of such a call describe whole tensors, as for all operations on DTensors. A rotation has
no sum over rows, heads or tokens, so a process can rotate its shard if it knows the part of each argument
that belongs to the shard. This module finds these parts, runs the call on local tensors, and returns
DTensors that are placed like the given ones. Only the gradient of an argument that several processes
share is summed between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from .._errors import Refusal, bad_type, bad_value, is_dtensor, one_or
from .._parts import Span, Take
from .._tracing import have_tangents
from ..activations import NONE, RMSNorm
from ..spec import PreparedRotation
from . import checks, memory
from .build import Request, Stages, build
from .call import Call
from .checks import Operands, layout_named
from .layouts import Layout
from .route import any_requires_grad, learns_angles, route
from .run import Results, run, run_quick
from .schema import pair, present

ROW, HEAD, TOKEN = "row", "head", "token"

_NO_AXIS = Span(0, 1, 1)


class Part(NamedTuple):
    """The part of a DTensor that this process holds.

    Attributes:
        name: name of the DTensor in error messages.
        mesh: its device mesh.
        coordinate: the place of this process in the mesh.
        by: for each dimension of the mesh, the axis that it divides: "row", "head" or "token"; None if
            it replicates.
        spans: for each axis, the part that this process holds.
        held: the shape of its local tensor.
        differs: whether q and k of the call are divided by different dimensions of the mesh.
    """

    name: str
    mesh: Any
    coordinate: Any
    by: tuple[str | None, ...]
    spans: dict[str, Span]
    held: tuple[int, ...]
    differs: bool

    def take(self, name: str, x: Any, axes: Sequence[str | None]) -> Any:
        """Return the part of an argument that belongs to this part, as a local tensor.

        Args:
            name: name of the argument in error messages.
            x: a DTensor, whose gradient is placed like it; or a local tensor, which has the same values in
                all processes and gets no gradient. Anything else is returned as it is.
            axes: the axes of its last dimensions; None for a dimension that is not divided.
        """
        if not isinstance(x, torch.Tensor):
            return x
        axes = axes[max(len(axes) - x.dim(), 0) :]
        if is_dtensor(x):
            local, spans = self._local(name, x, axes)
        else:
            check_gradient(name, x, self.name)
            local, spans = x, [Span(0, size, size) for size in x.shape]
        for dim, (axis, own) in enumerate(zip(axes, spans)):
            if axis is None:
                continue
            span = self.spans[axis]
            if own.whole == 1 and (axis != TOKEN or span.whole != 1):
                continue  # broadcasts, also to no rows or heads
            if own.whole != span.whole:
                rule = f"{name} must have {one_or(span.whole, axis)}, like the whole {self.name},"
                raise bad_value(f"{rule} but got {own.whole}", **{name: x})
            begin = span.start - own.start
            if begin < 0 or begin + span.size > own.size:
                raise self._not_alike(name)
            if axis == HEAD and self.differs:
                raise bad_value(
                    f"{name} must not have heads, because q and k are sharded differently along heads; "
                    "rotate q and k one by one"
                )
            if span.size != own.size:
                local = local.narrow(dim, begin, span.size)
        return local

    def _local(
        self, name: str, x: Any, axes: Sequence[str | None]
    ) -> tuple[torch.Tensor, list[Span]]:
        """Return the local tensor of a DTensor, and the part that it is of each dimension."""
        if x.device_mesh != self.mesh:
            raise bad_value(f"{name} must be on the device mesh of {self.name}")
        learns = x.requires_grad and torch.is_grad_enabled()
        if learns and self.differs:
            raise bad_value(
                f"{name} must not require grad, because q and k are sharded differently along heads; "
                "rotate q and k one by one"
            )
        spans, divided = _spans(name, self.mesh, self.coordinate, x.placements, x.shape)
        for by, dim in zip(self.by, divided):
            if dim is None:
                continue
            # Only one process would hold a size of 1, which all must broadcast.
            alone = by is not None and x.shape[dim] == 1 != self.spans[by].whole
            if by is None or axes[dim] != by or alone:
                raise self._not_alike(name)
        _check_held(name, x, [span.size for span in spans])
        if not learns:
            return local_of(x), spans
        from torch.distributed.tensor import Partial

        summed = [
            Partial() if by is not None and dim is None else placement
            for by, dim, placement in zip(self.by, divided, x.placements)
        ]
        # The backward pass of `redistribute` places the gradient like x.
        return x.redistribute(placements=x.placements).to_local(grad_placements=summed), spans

    def _not_alike(self, name: str) -> Refusal:
        return bad_value(
            f"{name} must be replicated, or sharded like {self.name}; call its method redistribute"
        )


def check_gradient(name: str, x: torch.Tensor, sharded: str) -> None:
    """Refuse a local tensor that requires grad, next to a DTensor of the name ``sharded``."""
    if x.requires_grad and torch.is_grad_enabled():
        raise bad_type(
            f"{name} must be a DTensor because {sharded} is one and {name} requires grad: its gradient is "
            f"summed over the mesh; make it one with distribute_tensor"
        )
    if have_tangents((x,), transformed=False):
        raise bad_type(
            f"{name} must not have a tangent because {sharded} is a DTensor, which has none"
        )


def perform(request: Request) -> Results:
    """Run the call of a public function, on local tensors or on DTensors.

    Returns:
        The rotated tensors, in the order of q and k.
    """
    q, k = request.q, request.k
    if not is_dtensor(q) and not is_dtensor(k):
        return run(build(request))
    if request.slots is not None:
        raise bad_type("keys must not be DTensors; pass to_local() of q, k and v, and local caches")
    if request.verb == "out":
        raise bad_type("out must be None with DTensors; rotate in place, or copy the result to out")
    layout, xs = layout_named(request.layout), present(q, k)
    names = request.names[: len(xs)]
    parts = parts_of(names, xs, layout)
    request, watched = local_request(request, Operands(names, xs, layout, sharded=True), parts)
    found: Results | None = None
    if request.verb == "new" or not (torch.is_grad_enabled() and any_requires_grad(xs)):
        q, k = pair(to_local(*xs))
        found = run_quick(request._replace(q=q, k=k))
    if found is None:
        return run_local(build(request), xs, watched)
    return to_dtensors(found, xs, watched) if request.verb == "new" else _written(xs)


def run_local(calls: Sequence[Call], xs: Sequence[Any], watched: Sequence[Any]) -> Results:
    """Run calls on the local tensors of DTensors.

    Args:
        calls: the calls; their q and k are not read.
        xs: the DTensors to rotate.
        watched: the DTensors, other than q and k, that the backward pass may read; see `_FromLocal`.

    Returns:
        DTensors: new ones, or ``xs``.
    """
    # One call for all tensors, or one for each.
    each = [xs] if len(calls) == 1 else [[x] for x in xs]
    whole = [call.on(own) for call, own in zip(calls, each, strict=True)]
    if calls[0].verb == "new":
        return [y for call in whole for y in _new(call, watched)]
    compiling = torch.compiler.is_compiling()
    if not (compiling or any(route(call).needs_grad for call in whole)):
        run([call.on(to_local(*call.xs())) for call in whole])
        return _written(xs)
    # Autograd and compilers see a change of a DTensor, but not one of its local tensor.
    names = [name for call in calls for name in call.names]
    if not compiling:
        memory.check_in_place(names, [local_of(x) for x in xs])
    memory.check_in_place_grad(names, xs)
    # The backward pass may read the inputs, which are overwritten below.
    copies = [call.copied() if call.keeps_inputs() else call for call in whole]
    ys = [y for call in copies for y in _new(call, watched)]
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)
    return xs


def _new(call: Call, watched: Sequence[Any]) -> Results:
    """Rotate the DTensors of a call into new ones."""
    xs = call.xs()
    ys = run([call.on(to_local(*xs))._replace(verb="new")])
    # What the backward pass may read, for angles, tables or gates.
    learn = learns_angles(call)
    reads = learn or call.options.act != NONE
    return to_dtensors(ys, xs, [*watched, *(xs if reads else ())], learn)


def _written(xs: Sequence[Any]) -> Results:
    """Return DTensors whose local tensors were written."""
    torch.autograd.graph.increment_version(xs)
    return xs


def parts_of(names: Sequence[str], xs: Sequence[Any], layout: Layout) -> list[Part]:
    """Return the parts of DTensors that are rotated by the same angles.

    Raises:
        TypeError: one of them is a local tensor.
        ValueError: placements that do not let each process rotate its shard alone.
    """
    for name, x in zip(names, xs):
        if not is_dtensor(x):
            raise bad_type(
                f"{' and '.join(names)} must all be DTensors or all be local tensors", **{name: x}
            )
        if x.dim() != layout.dims:
            checks.shape_of(name, x, layout, sharded=True)
    parts = [_part_of(name, x, layout) for name, x in zip(names, xs)]
    first = parts[0]
    for other, x in zip(parts[1:], xs[1:]):
        if other.spans[ROW] != first.spans[ROW] or other.spans[TOKEN] != first.spans[TOKEN]:
            checks.check_partner(first.name, other.name, xs[0], x, layout)
        if other.mesh != first.mesh:
            raise bad_value(f"{other.name} must be on the device mesh of {first.name}")
        if any(a != b and {a, b} != {HEAD, None} for a, b in zip(first.by, other.by)):
            raise bad_value(
                f"{first.name} and {other.name} must be sharded alike along rows and tokens but are placed "
                f"as {xs[0].placements} and {x.placements}; rotate them one by one"
            )
    differs = any(part.by != first.by for part in parts)
    # Not _replace, which takes longer.
    return [Part(*part[:-1], differs) for part in parts]


def axes_of(layout: Layout) -> list[str | None]:
    """Return the axis of each dimension, or None if it cannot be divided."""
    axes: list[str | None] = [None] * layout.dims
    for axis, dim in ((ROW, layout.row), (HEAD, layout.head), (TOKEN, layout.token)):
        if dim is not None:
            axes[dim] = axis
    return axes


def _part_of(name: str, x: Any, layout: Layout) -> Part:
    mesh = x.device_mesh
    make = _made_part if torch.compiler.is_compiling() else _cached_part
    # A list before torch 2.11; None for a process outside the mesh.
    coordinate = tuple(mesh.get_coordinate() or ())
    part = make(name, mesh, coordinate, x.placements, x.shape, layout)
    _check_held(name, x, part.held)
    return part


def _check_held(name: str, x: Any, held: Sequence[int]) -> None:
    own = local_of(x).shape
    if own != tuple(held):
        raise bad_value(
            f"{name} must be divided as by torch.chunk, so that this process holds {list(held)}, but it "
            f"holds {list(own)}; give its whole shape to DTensor.from_local",
            **{name: x},
        )
    if x.device_mesh.ndim == 1 or torch.compiler.is_compiling():
        return
    for entry in getattr(x._spec, "shard_order", None) or ():
        if tuple(entry.mesh_dims) != tuple(sorted(entry.mesh_dims)):
            raise bad_value(
                f"{name} must be divided by the dimensions of its mesh in their order, but they divide "
                f"dimension {entry.tensor_dim} in the order {tuple(entry.mesh_dims)}; call "
                f"{name}.redistribute"
            )


def _made_part(
    name: str,
    mesh: Any,
    coordinate: Any,
    placements: Sequence[Any],
    shape: torch.Size,
    layout: Layout,
) -> Part:
    spans, divided = _spans(name, mesh, coordinate, placements, shape)
    axes = axes_of(layout)
    for dim in divided:
        if dim is not None and axes[dim] is None:
            raise bad_value(
                f"{name} must not be sharded along its channels, which a rotation mixes; call "
                f"{name}.redistribute to replicate it, or to shard its rows, heads or tokens"
            )
    by = tuple([None if dim is None else axes[dim] for dim in divided])
    whole = {ROW: _NO_AXIS, HEAD: _NO_AXIS, TOKEN: _NO_AXIS}
    for axis, span in zip(axes, spans):
        if axis is not None:
            whole[axis] = span
    return Part(name, mesh, coordinate, by, whole, tuple([span.size for span in spans]), False)


_cached_part = lru_cache(maxsize=256)(_made_part)


def _spans(
    name: str, mesh: Any, coordinate: Any, placements: Sequence[Any], shape: torch.Size
) -> tuple[list[Span], list[int | None]]:
    """Return the part of each dimension of a DTensor that this process holds.

    Returns:
        The parts; and for each dimension of the mesh, the dimension that it divides, or None.
    """
    if not coordinate:
        raise bad_value(f"{name} must be on a device mesh that contains this process")
    starts, sizes = [0] * len(shape), list(shape)
    divided: list[int | None] = []
    for at, placement in enumerate(placements):
        if placement.is_replicate():
            divided.append(None)
            continue
        if not placement.is_shard() or type(placement).__name__ != "Shard":
            raise bad_value(
                f"{name} must be replicated or sharded but is {placement} on dimension {at} of its "
                f"mesh; call {name}.redistribute"
            )
        dim = placement.dim
        chunk = -(-sizes[dim] // mesh.size(at))
        begin = min(chunk * coordinate[at], sizes[dim])
        starts[dim] += begin
        sizes[dim] = min(chunk, sizes[dim] - begin)
        divided.append(dim)
    return [Span(*each) for each in zip(starts, sizes, shape)], divided


def local_request(
    request: Request, operands: Operands, parts: Sequence[Part]
) -> tuple[Request, list[Any]]:
    """Return the request of this process, with local tensors, and the DTensors that its backward pass may read.

    q and k are outside of autograd, and not among these DTensors.
    """
    first = parts[0]
    rotation = _kept(request, first)
    if rotation is None:
        whole = checks.prepare(operands, request.rope, request.positions, request.wider)
        rotation = _cut(whole, first)
    else:
        whole = cast(PreparedRotation, request.rope)
    if whole.phases is not None:
        raise bad_type(
            "phases must be None with DTensors; rotate to_local() by the phases of its own tokens, and "
            "convert the result with DTensor.from_local"
        )
    if whole.inv_freq is not None:
        own = first.take("inv_freq", whole.inv_freq, (None, HEAD, None))
        rotation = rotation.replaced(own, None)
    q, k = pair([local_of(x) for x in operands.xs])
    stages, watched = request.stages, dtensors_of(whole.ids, whole.inv_freq)
    if stages is not None:
        stages, of_stages = _cut_stages(stages, parts)
        watched += of_stages
    return request._replace(q=q, k=k, rope=rotation, positions=None, stages=stages), watched


def dtensors_of(*xs: Any) -> list[Any]:
    """Return the DTensors among values."""
    return [x for x in xs if is_dtensor(x)]


def _kept(request: Request, part: Part) -> PreparedRotation | None:
    """Return the rotation of a part that was cut before, so that it fits; None if it must be cut."""
    rotation = request.rope
    if (
        type(rotation) is not PreparedRotation
        or torch.compiler.is_compiling()
        or rotation.angles.words.shape[2] != 1
        or rotation.stated is not None
        or request.positions is not None
        or (rotation.ids is not None and rotation.ids.requires_grad)
    ):
        return None
    return rotation.kept.known(tuple(part.spans.values()))  # type: ignore[no-any-return]


def _cut(rotation: PreparedRotation, part: Part) -> PreparedRotation:
    """Return the rotation of a part of the rows, heads and tokens."""
    if rotation.where.part is not None:
        rank, size = 0, 1
        for at, by in enumerate(part.by):
            if by == TOKEN:
                rank = rank * part.mesh.size(at) + part.coordinate[at]
                size *= part.mesh.size(at)
        its_rank, its_size, its_whole = rotation.where.part
        if (its_rank, its_size) != (rank, size):
            raise bad_value(
                f"positions are those of rank {its_rank} of {its_size}, but this process holds part "
                f"{rank} of {size} of the tokens of {part.name}"
            )
        whole = part.spans[TOKEN].whole
        if its_whole != whole:
            raise bad_value(
                f"positions must be those of a part of {whole} tokens, like the whole {part.name}, but are "
                f"those of a part of {its_whole}"
            )
    if part.differs:
        # Refuses angles per head, of which no part is kept.
        part.take("rope", rotation.angles.words, (None, ROW, HEAD, None))
    return rotation.cut(part.spans, part.take)


def _cut_stages(stages: Stages, parts: Sequence[Part]) -> tuple[Stages, list[Any]]:
    """Return f and P of the parts of q and k, and the DTensors among their tensors."""
    found: list[Any] = []

    def noting(part: Part) -> Take:
        # Each belongs to one tensor, so it does not matter how the other is sharded.
        own = part._replace(differs=False)

        def take(name: str, x: Any, axes: Sequence[str | None]) -> Any:
            found.extend(dtensors_of(x))
            return own.take(name, x, axes)

        return take

    takes = [noting(part) for part in parts]
    acts = [
        act.cut(take) if isinstance(act, RMSNorm) else act for act, take in zip(stages.acts, takes)
    ]
    gates = [[gate.cut(take) for gate in own] for own, take in zip(stages.gates, takes)]
    return Stages((acts[0], acts[-1]), (gates[0], gates[-1])), found


def to_local(*xs: Any) -> Sequence[torch.Tensor]:
    """Return the local tensors of DTensors; the gradient of each is placed like the DTensor."""
    if not torch.is_grad_enabled() or not any_requires_grad(xs):
        return [local_of(x) for x in xs]
    if torch.compiler.is_compiling():
        return [x.to_local() for x in xs]
    return _ToLocal.apply(*xs)  # type: ignore[no-any-return, no-untyped-call]


def local_of(x: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, outside of autograd."""
    if torch.compiler.is_compiling():
        return x.detach().to_local()  # type: ignore[no-any-return]
    local = x._local_tensor  # as to_local() without gradients, in a tenth of its time
    # Kernels must not read the result of a collective that still runs.
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local  # type: ignore[no-any-return]


def to_dtensors(
    ys: Sequence[torch.Tensor], xs: Sequence[Any], watched: Sequence[Any] = (), kept: bool = False
) -> list[torch.Tensor]:
    """Return the DTensors of local results, each with the shape and the placements of its x.

    Args:
        watched, kept: see `_FromLocal`.
    """
    if torch.compiler.is_compiling():
        return [from_local(y, x.device_mesh, x.placements, x.shape) for y, x in zip(ys, xs)]
    return _placed(ys, _places(xs), watched, kept)


# The specification of a DTensor, and the strides of its local tensor.
_Place: TypeAlias = tuple[Any, tuple[int, ...]]


def _places(xs: Sequence[Any]) -> list[_Place]:
    return [(x._spec, x._local_tensor.stride()) for x in xs]


def _placed(
    ys: Sequence[torch.Tensor],
    places: Sequence[_Place],
    watched: Sequence[Any] = (),
    kept: bool = False,
) -> list[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    specs = []
    for y, (spec, strides) in zip(ys, places, strict=True):
        # To derive a specification takes most of the time of from_local, and strides of sizes below 2 say no order.
        if (
            y.stride() != strides
            and 0 not in y.shape
            and any(
                size > 1 and own != other for size, own, other in zip(y.shape, y.stride(), strides)
            )
        ):
            like: Any = from_local(y.detach(), spec.mesh, spec.placements, spec.shape)
            spec = like._spec
        specs.append(spec)
    if any_requires_grad(ys):
        return list(_FromLocal.apply(tuple(specs), tuple(watched), kept, *ys))  # type: ignore[no-untyped-call]
    return [DTensor(y, spec, requires_grad=False) for y, spec in zip(ys, specs)]


def _placed_gradients(
    grads: Sequence[torch.Tensor | None], places: Sequence[_Place]
) -> list[torch.Tensor | None]:
    """Return the DTensors of local gradients, placed like the DTensors that they belong to."""
    return [None if y is None else _placed([y], [at])[0] for y, at in zip(grads, places)]


def from_local(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size
) -> torch.Tensor:
    """Return the DTensor of a local tensor that may be divided unevenly, with its order of dimensions."""
    from torch.distributed.tensor import DTensor

    stride = [1] * len(shape)
    for dim, own in enumerate(local.stride()):
        for inner, other in enumerate(local.stride()):
            if other < own or (other == own and inner > dim):
                stride[dim] *= max(shape[inner], 1)
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=tuple(stride))


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local` for known specifications.

    The backward pass of a call reads local tensors, whose version counters do not count changes of their
    DTensors. So this function saves these DTensors: ``watched``, and the results if they are ``kept``.
    """

    @staticmethod
    def forward(
        ctx: Any, specs: tuple[Any, ...], watched: tuple[Any, ...], kept: bool, *ys: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from torch.distributed.tensor import DTensor

        ctx.specs = specs
        ctx.set_materialize_grads(False)
        found = tuple(
            [DTensor(y.view_as(y), s, requires_grad=y.requires_grad) for y, s in zip(ys, specs)]
        )
        ctx.mark_non_differentiable(*[y for y in found if not y.requires_grad])
        ctx.save_for_backward(*watched, *(found if kept else ()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  (reading them compares their versions)
        return None, None, None, *_local_gradients(grads, ctx.specs)


class _ToLocal(torch.autograd.Function):
    """`DTensor.to_local` of several DTensors; its backward pass can be differentiated."""

    @staticmethod
    def forward(ctx: Any, *xs: Any) -> tuple[torch.Tensor, ...]:
        ctx.places = _places(xs)
        ctx.set_materialize_grads(False)
        locals_ = [local_of(x) for x in xs]
        found = tuple([local.view_as(local) for local in locals_])
        ctx.mark_non_differentiable(*[y for y, x in zip(found, xs) if not x.requires_grad])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(_placed_gradients(grads, ctx.places))


def _local_gradients(grads: Sequence[Any], specs: Sequence[Any]) -> list[torch.Tensor | None]:
    """Return the local tensors of gradients, which autograd may have placed unlike the results."""
    found: list[torch.Tensor | None] = []
    for grad, spec in zip(grads, specs):
        if grad is not None and grad.placements != spec.placements:
            grad = grad.redistribute(placements=spec.placements)
        found.append(None if grad is None else to_local(grad)[0])
    return found
