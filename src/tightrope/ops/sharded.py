"""Calls on DTensors: each process rotates its own shard, and no process communicates.

The arguments of such a call describe whole tensors, as for all operations on DTensors. A rotation has
no sum over rows, heads or tokens, so a process can rotate its shard if it knows the part of each argument
that belongs to the shard. This module finds these parts, runs the call on local tensors, and returns
DTensors that are placed like the given ones. Only the gradient of an argument that several processes
share is summed between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch

from .._errors import Refusal, bad_type, bad_value, is_dtensor, one_or
from .._parts import Span
from .._tracing import have_tangents
from ..activations import NONE, RMSNorm
from ..spec import PreparedRotation
from . import checks, memory
from .build import Request, Stages, build
from .call import Call
from .checks import Place, layout_named
from .layouts import Layout
from .route import any_requires_grad, route
from .run import Results, run, run_prepared
from .schema import present

ROW, HEAD, TOKEN = "row", "head", "token"

_NO_AXIS = Span(0, 1, 1)
_WORDS = (None, ROW, HEAD, None)


class Part(NamedTuple):
    """The part of a DTensor that this process holds.

    Attributes:
        name: name of the DTensor in error messages.
        mesh: its device mesh.
        coordinate: the place of this process in the mesh.
        by: for each dimension of the mesh, the axis that it divides: "row", "head" or "token"; None if
            it replicates.
        spans: for each axis, the part that this process holds.
        differs: whether q and k of the call are divided by different dimensions of the mesh.
        watched: for calls that autograd may record, the DTensors that the backward pass may read; see
            `_FromLocal`.
    """

    name: str
    mesh: Any
    coordinate: Any
    by: tuple[str | None, ...]
    spans: dict[str, Span]
    differs: bool = False
    watched: list[Any] | None = None

    def take(self, name: str, x: torch.Tensor, axes: Sequence[str | None]) -> torch.Tensor:
        """Return the part of an argument that belongs to this part, as a local tensor.

        Args:
            name: name of the argument in error messages.
            x: a DTensor, whose gradient is placed like it; or a local tensor, which has the same values in
                all processes and gets no gradient.
            axes: the axes of its last dimensions; None for a dimension that is not divided.
        """
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

    def whole(
        self,
        local: torch.Tensor,
        mesh: Any,
        dims: dict[str, int | None],
        watched: Sequence[Any] = (),
        kept: bool = False,
    ) -> torch.Tensor:
        """Return the DTensor of which this part is a local tensor.

        Args:
            local: the local tensor.
            mesh: the caller's device mesh; :attr:`mesh` may be an equal one of an earlier process group.
            dims: the dimension of each axis that may be divided.
            watched, kept: see `_FromLocal`.
        """
        from torch.distributed.tensor import Replicate, Shard

        placements = [Replicate() if by is None else Shard(dims[by]) for by in self.by]  # type: ignore[arg-type]
        shape = list(local.shape)
        for axis, dim in dims.items():
            if dim is not None:
                shape[dim] = self.spans[axis].whole
        return _from_local(local, mesh, placements, torch.Size(shape), watched, kept)

    def place(self, axis: str) -> tuple[int, int]:
        """Return the index of this part of an axis, and the number of parts."""
        index, count = 0, 1
        for at, by in enumerate(self.by):
            if by == axis:
                size = self.mesh.size(at)
                index, count = index * size + self.coordinate[at], count * size
        return index, count

    def _local(
        self, name: str, x: Any, axes: Sequence[str | None]
    ) -> tuple[torch.Tensor, list[Span]]:
        """Return the local tensor of a DTensor, and the part that it is of each dimension."""
        if x.device_mesh != self.mesh:
            raise bad_value(f"{name} must be on the device mesh of {self.name}")
        if self.watched is not None:
            self.watched.append(x)
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


def divides(x: Any, dim: int) -> bool:
    """Return whether a DTensor is sharded along a dimension."""
    return any(placement.is_shard(dim) for placement in x.placements)


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
    # The type of most tensors, compared first because that takes half the time of `is_dtensor`.
    if (type(q) is torch.Tensor or not is_dtensor(q)) and (k is None or not is_dtensor(k)):
        return run(build(request))
    layout, xs = layout_named(request.layout), present(request.q, request.k)
    names = request.names[: len(xs)]
    parts, outs = parts_of(names, xs, layout), request.outs
    request = local_request(request, Place(names, xs, layout, sharded=True), parts)
    if request.inv_freq is None and request.backend is None and request.verb != "out":
        found = run_prepared(
            request.verb, request.spec, request.q, request.k, layout.name,
            request.inverse, request.stages, request.rounding,
        )  # fmt: skip
        if found is not None:
            return _placed(request.verb, found, xs, ())
    return run_local(build(request), xs, parts[0].watched, outs)


def run_local(
    calls: Sequence[Call], xs: Sequence[Any], watched: list[Any] | None, outs: Sequence[Any] = ()
) -> Results:
    """Run calls on the local tensors of DTensors.

    Args:
        calls: the calls, on local tensors.
        xs: the DTensors to rotate.
        watched: see :class:`Part`.
        outs: the DTensors of the caller, for the verb "out".

    Returns:
        DTensors: new ones, ``xs`` or ``outs``.
    """
    verb = calls[0].verb
    if verb != "in place" or not (
        torch.compiler.is_compiling() or any(route(call).needs_grad for call in calls)
    ):
        ys = run(calls)
        if watched is not None and verb == "new" and any(y.requires_grad for y in ys):
            learn = any(map(_learns_angles, calls))
            reads = learn or any(call.options.act != NONE for call in calls)
            return [_like(y, x, [*watched, *(xs if reads else ())], learn) for x, y in zip(xs, ys)]
        return _placed(verb, ys, xs, outs)
    # Autograd and compilers see a change of a DTensor, but not one of its local tensor.
    names = [name for call in calls for name in call.names]
    if not torch.compiler.is_compiling():
        memory.check_in_place(names, [local_of(x) for x in xs])
    memory.check_in_place_grad(names, xs)
    # Autograd does not notice either that the change below overwrites inputs which it has saved.
    copies = [call.copied() if call.keeps_inputs() else call for call in calls]
    for x, y in zip(xs, run([call._replace(verb="new") for call in copies]), strict=True):
        x.copy_(_like(y, x, watched or ()))
    return xs


def _learns_angles(call: Call) -> bool:
    """Return whether the backward pass may read the inputs and results, for angles, tables or gates."""
    angles = (call.primary, call.secondary, call.positions, *call.extras.frequencies)
    return any_requires_grad((*angles, *call.extras.gates))


def _placed(verb: str, ys: Results, xs: Sequence[Any], outs: Sequence[Any]) -> Results:
    """Return the DTensors of local results."""
    if verb == "new":
        return [_like(y, x) for x, y in zip(xs, ys, strict=True)]
    written = outs if verb == "out" else xs
    torch.autograd.graph.increment_version(written)
    return written


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
    watched: list[Any] | None = None
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        watched = []
    if not differs and watched is None:
        return parts
    return [part._replace(differs=differs, watched=watched) for part in parts]


def _part_of(name: str, x: Any, layout: Layout) -> Part:
    mesh = x.device_mesh
    make = _made_part if torch.compiler.is_compiling() else _cached_part
    part, held = make(name, mesh, mesh.get_coordinate(), x.placements, x.shape, layout)
    _check_held(name, x, held)
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
) -> tuple[Part, tuple[int, ...]]:
    """Return the part of a DTensor that this process holds, and the shape of its local tensor."""
    spans, divided = _spans(name, mesh, coordinate, placements, shape)
    dims = {ROW: layout.row, HEAD: layout.head, TOKEN: layout.token}
    axes = {dim: axis for axis, dim in dims.items() if dim is not None}
    for dim in divided:
        if dim is not None and dim not in axes:
            raise bad_value(
                f"{name} must not be sharded along its channels, which a rotation mixes; call "
                f"{name}.redistribute to replicate it, or to shard its rows, heads or tokens"
            )
    by = tuple([None if dim is None else axes[dim] for dim in divided])
    whole = {axis: _NO_AXIS if dim is None else spans[dim] for axis, dim in dims.items()}
    return Part(name, mesh, coordinate, by, whole), tuple([span.size for span in spans])


_cached_part = lru_cache(maxsize=256)(_made_part)


def _spans(
    name: str, mesh: Any, coordinate: Any, placements: Sequence[Any], shape: torch.Size
) -> tuple[list[Span], list[int | None]]:
    """Return the part of each dimension of a DTensor that this process holds.

    Returns:
        The parts; and for each dimension of the mesh, the dimension that it divides, or None.
    """
    if coordinate is None:
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


def local_request(request: Request, place: Place, parts: Sequence[Part]) -> Request:
    """Return the request of this process, with local tensors."""
    first, xs = parts[0], place.xs
    if request.phases is not None:
        raise bad_type(
            "phases must be None with DTensors; rotate to_local() by the phases of its own tokens, and "
            "convert the result with DTensor.from_local"
        )
    rotation = _kept(request, first)
    if rotation is None:
        whole = checks.prepare(
            place, request.spec, request.positions, request.seq_len, request.wider
        )
        rotation = cut(whole, first)
    else:
        whole = cast(PreparedRotation, request.spec)
    if first.watched is not None and is_dtensor(whole.ids):
        first.watched.append(whole.ids)
    inv_freq, outs = request.inv_freq, request.outs
    if isinstance(inv_freq, torch.Tensor):
        inv_freq = first.take("inv_freq", inv_freq, (None, HEAD, None))
    if request.verb == "out":
        checks.check_outs(place.names, xs, outs, sharded=True)
    for out, x in zip(outs, xs):
        if not _placed_alike(out, x):
            raise bad_value(f"out must be a DTensor that is placed like {first.name}")
        if out.requires_grad and torch.is_grad_enabled():
            raise bad_value(
                "out must not require grad, because a result written to it has none; use "
                "torch.no_grad(), or omit out",
                out=out,
            )
    return request._replace(
        q=to_local(xs[0]),
        k=to_local(xs[1]) if len(xs) > 1 else None,
        spec=rotation,
        positions=None,
        seq_len=None,
        inv_freq=inv_freq,
        stages=None if request.stages is None else cut_stages(request.stages, parts),
        outs=[local_of(out) for out in outs],
    )


def _kept(request: Request, part: Part) -> PreparedRotation | None:
    """Return the rotation of a part that was cut before, so that it fits; None if it must be cut."""
    rotation = request.spec
    if type(rotation) is not PreparedRotation or torch.compiler.is_compiling():
        return None
    if rotation.words.shape[2] != 1 or rotation.limit is not None or rotation.is_stale:
        return None
    if request.positions is not None or request.seq_len is not None:
        return None
    if rotation.ids is not None and rotation.ids.requires_grad:
        return None
    spans = part.spans
    return rotation.memo.parts.get((spans[ROW], spans[HEAD], spans[TOKEN]))


def cut(rotation: PreparedRotation, part: Part) -> PreparedRotation:
    """Return the rotation of a part of the rows, heads and tokens."""
    if rotation.part is not None:
        rank, size = part.place(TOKEN)
        its_rank, its_size, its_whole = rotation.part
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
        part.take("spec", rotation.words, _WORDS)
    if rotation.part is None and not any(part.by) and not is_dtensor(rotation.ids):
        if rotation.ids is not None:
            check_gradient("positions", rotation.ids, part.name)
        return rotation
    spans = part.spans
    return rotation.cut(spans[ROW], spans[HEAD], spans[TOKEN], part.take)


def _placed_alike(one: Any, other: Any) -> bool:
    return (
        is_dtensor(one)
        and one.device_mesh == other.device_mesh
        and one.placements == other.placements
    )


def cut_stages(stages: Stages, parts: Sequence[Part]) -> Stages:
    """Return f and P of the parts of q and k."""
    # Each belongs to one tensor, so it does not matter how the other is sharded.
    takes = [part._replace(differs=False).take for part in parts]
    acts = [
        act.cut(take) if isinstance(act, RMSNorm) else act for act, take in zip(stages.acts, takes)
    ]
    gates = [[gate.cut(take) for gate in own] for own, take in zip(stages.gates, takes)]
    return Stages((acts[0], acts[-1]), (gates[0], gates[-1]))


def to_local(x: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor; its gradient is placed like the DTensor."""
    return x.to_local() if x.requires_grad and torch.is_grad_enabled() else local_of(x)


def local_of(x: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, outside of autograd."""
    if torch.compiler.is_compiling():
        return x.detach().to_local()  # type: ignore[no-any-return]
    local = x._local_tensor  # as to_local() without gradients, in a tenth of its time
    # Kernels must not read the result of a collective that still runs.
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local  # type: ignore[no-any-return]


def _like(
    local: torch.Tensor, x: Any, watched: Sequence[Any] = (), kept: bool = False
) -> torch.Tensor:
    """Return the DTensor of a local result that has the shape of x and is placed like it.

    Args:
        watched, kept: see `_FromLocal`.
    """
    if torch.compiler.is_compiling() or local.stride() != x._local_tensor.stride():
        return _from_local(local, x.device_mesh, x.placements, x.shape, watched, kept)
    # DTensor.from_local would derive this specification again, which takes most of its time.
    return _of_spec(local, copy(x._spec), watched, kept)


def _from_local(
    local: torch.Tensor,
    mesh: Any,
    placements: Sequence[Any],
    shape: torch.Size,
    watched: Sequence[Any] = (),
    kept: bool = False,
) -> torch.Tensor:
    """Return the DTensor of a local tensor that may be divided unevenly, with its order of dimensions."""
    from torch.distributed.tensor import DTensor

    order: list[int] = []  # by stride; Dynamo cannot sort symbols
    for dim in reversed(range(len(shape))):
        at = len(order)
        while at and local.stride(order[at - 1]) > local.stride(dim):
            at -= 1
        order.insert(at, dim)
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    if torch.compiler.is_compiling():
        return DTensor.from_local(local, mesh, placements, shape=shape, stride=tuple(stride))
    plain = DTensor.from_local(local.detach(), mesh, placements, shape=shape, stride=tuple(stride))
    return _of_spec(local, plain._spec, watched, kept)


def _of_spec(local: torch.Tensor, spec: Any, watched: Sequence[Any], kept: bool) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if local.requires_grad:
        return _FromLocal.apply(local, spec, tuple(watched), kept)  # type: ignore[no-any-return, no-untyped-call]
    return DTensor(local, spec, requires_grad=False)


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local` for a known specification.

    The backward pass of a call reads local tensors, whose version counters do not count changes of their
    DTensors. So this function saves these DTensors: ``watched``, and the result if it is ``kept``.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, spec: Any, watched: tuple[Any, ...], kept: bool
    ) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        ctx.placements = spec.placements
        y = DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)
        ctx.save_for_backward(*watched, *((y,) if kept else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None, None, None]:
        ctx.saved_tensors  # noqa: B018  (reading them compares their versions)
        if grad.placements != ctx.placements:
            grad = grad.redistribute(placements=ctx.placements)
        return grad.to_local(), None, None, None
