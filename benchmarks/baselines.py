"""Who is measured. Each contender may be absent, and says why.

A contender is made for a case from its own copies of q and k. It gives a call to time, and the rotated
q and k of one call, which the gate compares with the definition in float64.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tightrope import Axes, RopeSpec, positions
from tightrope.functional import rotate_qk, rotate_qk_
from tightrope.positions import PositionsLike

from .cases import Case
from .method import Call

Pair = tuple[torch.Tensor, torch.Tensor]


class Made(NamedTuple):
    """A contender ready to be timed.

    Attributes:
        call: what is timed.
        result: rotated q and k of a first call; None for floors, which rotate nothing.
    """

    call: Call
    result: Pair | None


@dataclass(frozen=True)
class Contender:
    """Somebody to measure.

    Attributes:
        name: unique.
        why_not: why it cannot take part in a case; None if it can.
        make: from a case, its q, k and ids to something to time.
        own_threads: whether it computes on threads of its own, not on torch's.
    """

    name: str
    why_not: Callable[[Case], str | None]
    make: Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Made]
    own_threads: bool = False


def spec_of(case: Case) -> RopeSpec:
    """The rotation of a case."""
    axes = None
    if case.positions == "M-RoPE":
        pairs = (case.rotary_dim or case.head_dim) // 2
        side = pairs * 3 // 8  # 16, 24, 24 of 64, as in Qwen2-VL
        axes = Axes.sections((pairs - 2 * side, side, side))
    return RopeSpec(
        case.head_dim, rotary_dim=case.rotary_dim, interleaved=case.interleaved, axes=axes
    )


def positions_of(case: Case, ids: torch.Tensor) -> PositionsLike:
    """The positions of a case.

    Args:
        ids: ``(rows, tokens)``, or ``(axes, rows, tokens)`` for M-RoPE.
    """
    if case.positions == "0..n-1":
        return None
    return positions.multi_axis(ids) if ids.dim() == 3 else ids


def _always(_: Case) -> None:
    return None


def _training(
    rotate: Callable[[torch.Tensor, torch.Tensor], Pair], q: torch.Tensor, k: torch.Tensor
) -> Made:
    """Forward and backward. The leaves' gradients are handed over and dropped, not accumulated."""
    a, b = q.detach().requires_grad_(), k.detach().requires_grad_()
    grads = torch.randn_like(a), torch.randn_like(b)

    def call() -> None:
        torch.autograd.grad(rotate(a, b), (a, b), grads)

    y, z = rotate(a, b)
    return Made(call, (y.detach(), z.detach()))


def _functional(
    rotate: Callable[[torch.Tensor, torch.Tensor], Pair],
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
) -> Made:
    if case.work == "training":
        return _training(rotate, q, k)

    # Nothing here requires grad, so nobody's call has to enter no_grad: that is 2 us.
    return Made(lambda: rotate(q, k), rotate(q, k))


# ---- ours -----------------------------------------------------------------------------------------


def _tightrope(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    rope = spec_of(case).at(positions_of(case, ids))
    if case.work != "in place":
        return _functional(lambda q, k: rotate_qk(q, k, rope), case, q, k)  # type: ignore[arg-type, return-value]
    result = rotate_qk(q, k, rope)
    return Made(lambda: rotate_qk_(q, k, rope), result)


def _no_plain(case: Case) -> str | None:
    return "the positions are plain" if case.positions == "0..n-1" else None


def _plain(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """The same tensors at 0..n-1: what the positions of the case cost beside them."""
    made = _tightrope(replace(case, positions="0..n-1"), q, k, ids)
    return Made(made.call, None)


def _no_compiled(case: Case) -> str | None:
    return None if case.compiled else "not a case about compiling"


def _ours_compiled(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, backend: str | None = None
) -> Made:
    """Our function inside a compiled one: the operator, or the definition for Inductor to fuse."""
    torch._dynamo.reset()
    rope = spec_of(case).at(positions_of(case, ids))
    rotate = torch.compile(lambda q, k: rotate_qk(q, k, rope, backend=backend), fullgraph=True)
    return _functional(rotate, case, q, k)


# ---- floors: what memory alone costs --------------------------------------------------------------


def _neg(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    return Made(lambda: (q.neg_(), k.neg_()), None)


def _clone(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    if case.work == "training":
        return Made(lambda: (q.clone(), k.clone(), q.clone(), k.clone()), None)
    return Made(lambda: (q.clone(), k.clone()), None)


def _copy(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    a, b = torch.empty_like(q), torch.empty_like(k)
    return Made(lambda: (a.copy_(q), b.copy_(k)), None)


# ---- eager: what model files do -------------------------------------------------------------------


def _angles(case: Case, ids: torch.Tensor) -> torch.Tensor:
    spec = spec_of(case)
    where = ids[..., None].double()
    if spec.axes is not None:
        where = torch.cat([where[axis] for axis, _, _ in spec.axes.pairs], -1)
    return where * spec.frequencies().inv_freq


def _tables(case: Case, ids: torch.Tensor, dtype: torch.dtype) -> Pair:
    angle = _angles(case, ids.unsqueeze(-2))
    if case.interleaved:
        angle = angle.repeat_interleave(2, -1)
    else:
        angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _turned_half(x: torch.Tensor) -> torch.Tensor:
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def _turned_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _eager_function(
    case: Case, ids: torch.Tensor, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    cos, sin = _tables(case, ids, dtype)
    turned = _turned_neighbours if case.interleaved else _turned_half
    width = spec_of(case).rotary_dim

    def one(x: torch.Tensor) -> torch.Tensor:
        head = x[..., :width]
        y = head * cos + turned(head) * sin
        return y if width == x.shape[-1] else torch.cat((y, x[..., width:]), -1)

    return lambda q, k: (one(q), one(k))


def _eager(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    return _functional(_eager_function(case, ids, q.dtype), case, q, k)


def _compiled(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    torch._dynamo.reset()
    compiled = torch.compile(_eager_function(case, ids, q.dtype), fullgraph=True)
    return _functional(compiled, case, q, k)


# ---- peers ----------------------------------------------------------------------------------------


def _missing(module: str) -> str | None:
    found = importlib.util.find_spec(module.partition(".")[0])
    return None if found else f"{module.partition('.')[0]} is not installed"


def _no_transformers(case: Case) -> str | None:
    if case.interleaved or case.rotary_dim is not None:
        return "its function rotates halves of the whole head"
    return _missing("transformers")


def _transformers(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, compiled: bool = False
) -> Made:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = (table[:, 0] for table in _tables(case, ids, q.dtype))
    rotate = apply_rotary_pos_emb
    if compiled:
        torch._dynamo.reset()
        rotate = torch.compile(rotate, fullgraph=True)
    return _functional(lambda q, k: rotate(q, k, cos, sin), case, q, k)


def _no_rotary_embedding_torch(case: Case) -> str | None:
    if not case.interleaved or case.positions != "0..n-1":
        return "it rotates neighbours, at 0..n-1"
    return _missing("rotary_embedding_torch")


def _rotary_embedding_torch(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor
) -> Made:
    from rotary_embedding_torch import RotaryEmbedding

    rope = RotaryEmbedding(spec_of(case).rotary_dim)
    rope.eval().requires_grad_(False)
    rotate = rope.rotate_queries_or_keys
    return _functional(lambda q, k: (rotate(q), rotate(k)), case, q, k)


# ---- other runtimes -------------------------------------------------------------------------------

# They take no strides, yet neither layout needs a copy: both can be told that the heads come after
# the tokens. So a strided case hands over the (batch, seq, heads, dim) that its views show, and they
# work on the very memory of q and k. Handing over is done once, before the call: in their favour.


def _laid_out(case: Case, x: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor that x is a view of, or that view of it."""
    return x.transpose(1, 2) if case.strided else x


def _no_onnxruntime(case: Case) -> str | None:
    if case.work == "training":
        return "it has no backward"
    if case.positions == "M-RoPE":
        return "a position is one row of its tables"
    if case.dtype not in ("float32", "float16"):
        # Nor does com.microsoft, which has the operator that came before the standard one.
        return f"its operator does not take {case.dtype} on the CPU"
    return _missing("onnxruntime") or _missing("onnx")


def _onnxruntime(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    import onnxruntime
    from onnx import TensorProto, helper

    def handed_over(x: torch.Tensor) -> torch.Tensor:
        # Where the heads come last, the operator wants them flat, and their number as an attribute.
        return _laid_out(case, x).flatten(2) if case.strided else x

    angle = _angles(case, torch.arange(int(ids.max()) + 1))
    inputs = {
        "q": handed_over(q),
        "k": handed_over(k),
        "cos": angle.cos().to(q.dtype),
        "sin": angle.sin().to(q.dtype),
        "ids": ids.contiguous(),
    }
    # Also where the work is in place: the operator does not say that it may write where it reads.
    y, z = torch.empty_like(q), torch.empty_like(k)
    outputs = {"y": handed_over(y), "z": handed_over(z)}
    types = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.int64: TensorProto.INT64,
    }
    declared = (
        [helper.make_tensor_value_info(name, types[x.dtype], x.shape) for name, x in part.items()]
        for part in (inputs, outputs)
    )
    nodes = [
        helper.make_node(
            "RotaryEmbedding",
            [x, "cos", "sin", "ids"],
            [rotated],
            num_heads=heads,
            interleaved=int(case.interleaved),
            rotary_embedding_dim=spec_of(case).rotary_dim,
        )
        for x, rotated, heads in (("q", "y", case.q_heads), ("k", "z", case.k_heads))
    ]
    model = helper.make_model_gen_version(
        helper.make_graph(nodes, "rotation", *declared),
        opset_imports=[helper.make_opsetid("", 23)],
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case.threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()

    def bind_outputs(outputs: dict[str, torch.Tensor]) -> None:
        for name, x in outputs.items():
            binding.bind_output(name, "cpu", 0, types[x.dtype], x.shape, x.data_ptr())

    for name, x in inputs.items():
        binding.bind_input(name, "cpu", 0, types[x.dtype], x.shape, x.data_ptr())
    bind_outputs(outputs)

    def call() -> object:
        session.run_with_iobinding(binding)
        return inputs, outputs  # the binding has their addresses only, so they are kept here

    def call_out_of_place() -> object:
        # The others take new memory for their results then, which can cost more than the rotation.
        new = {name: torch.empty_like(x) for name, x in outputs.items()}
        bind_outputs(new)
        session.run_with_iobinding(binding)
        return inputs, new

    call()
    return Made(call_out_of_place if case.work == "out of place" else call, (y, z))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _no_jax(case: Case) -> str | None:
    if case.threads != _cores():
        return f"the number of its threads is fixed when it starts: here {_cores()}"
    return _missing("jax")


def _jax(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    import jax
    import jax.numpy as jnp

    width = spec_of(case).rotary_dim

    def turned(x: Any) -> Any:
        if case.interleaved:
            return jnp.stack((-x[..., 1::2], x[..., 0::2]), -1).reshape(x.shape)
        u, v = jnp.split(x, 2, -1)
        return jnp.concatenate((-v, u), -1)

    def one(x: Any, cos: Any, sin: Any) -> Any:
        head = x[..., :width]
        y = head * cos + turned(head) * sin
        return y if width == x.shape[-1] else jnp.concatenate((y, x[..., width:]), -1)

    def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return one(q, cos, sin), one(k, cos, sin)

    def train(q: Any, k: Any, cos: Any, sin: Any, *grads: Any) -> Any:
        rotated, backward = jax.vjp(lambda q, k: rotate(q, k, cos, sin), q, k)
        # What is not returned is not computed, and a model needs the rotated q and k as well.
        return *rotated, *backward(grads)

    tensors = [q, k, *_tables(case, ids, q.dtype)]
    function = rotate
    if case.work == "training":
        tensors += [torch.randn_like(q), torch.randn_like(k)]
        function = train
    tensors = [_laid_out(case, x).contiguous() for x in tensors]

    # Compiled ahead, float64 need only be allowed here, and stays as it is for the process.
    with jax.enable_x64(True):
        arrays = [jax.dlpack.from_dlpack(x) for x in tensors]
        # Nothing is donated, whatever the work: a donated array is gone after one call, and a copy
        # for the next would cost more than the memory that is saved.
        compiled = jax.jit(function).lower(*arrays).compile()

    def call() -> Any:
        return jax.block_until_ready(compiled(*arrays))

    y, z = (_laid_out(case, torch.utils.dlpack.from_dlpack(x)) for x in call()[:2])
    return Made(call, (y, z))


CONTENDERS = (
    Contender("tightrope", _always, _tightrope),
    Contender("neg_", lambda case: None if case.work == "in place" else "not in place", _neg),
    Contender("clone", lambda case: "in place" if case.work == "in place" else None, _clone),
    Contender("copy_", lambda case: None if case.work == "out of place" else case.work, _copy),
    Contender("0..n-1", _no_plain, _plain),
    Contender("tightrope, compiled", _no_compiled, _ours_compiled),
    Contender(
        "definition, compiled",
        _no_compiled,
        lambda case, q, k, ids: _ours_compiled(case, q, k, ids, backend="reference"),
    ),
    Contender("eager", _always, _eager),
    Contender("compiled eager", _always, _compiled),
    Contender("transformers", _no_transformers, _transformers),
    Contender(
        "transformers, compiled",
        _no_transformers,
        lambda case, q, k, ids: _transformers(case, q, k, ids, compiled=True),
    ),
    Contender("rotary-embedding-torch", _no_rotary_embedding_torch, _rotary_embedding_torch),
    Contender("onnxruntime", _no_onnxruntime, _onnxruntime, own_threads=True),
    Contender("jax jit", _no_jax, _jax, own_threads=True),
)
