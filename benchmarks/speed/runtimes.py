"""Contenders from other runtimes: ONNX Runtime's operator, and jax.

Both take only contiguous tensors, but no case needs a copy, as both accept heads before or after the
tokens. A strided case passes the underlying (batch, seq, heads, dim) tensor, so both work on the
memory of q and k. Tensors are passed once, outside the timed call, which favours these contenders.
"""

from __future__ import annotations

from typing import Any

import torch

from tightrope.environment import cores

from .case import Case
from .contender import Made, angles_of, cotangents, missing, spec_of, tables_of
from .factors import alone


def _laid_out(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Return the contiguous tensor under a transposed view x, or the view of such a tensor."""
    return x.transpose(1, 2) if case.strided else x


def no_onnxruntime(case: Case) -> str | None:
    """Return why ONNX Runtime cannot take part in a case; None if it can."""
    if case.device != "cpu":
        return "it is measured only on the CPU"
    if case.work in ("training", "backward"):
        return "it has no backward"
    if case.positions in ("M-RoPE", "ids per head"):
        return "its operator takes only one position for each token"
    if case.dtype not in ("float32", "float16"):
        # The older operator in the domain com.microsoft does not take this dtype either.
        return f"its operator does not take {case.dtype} on the CPU"
    return alone(case) or missing("onnxruntime") or missing("onnx")


def onnxruntime(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """Prepare the ONNX operator, with tensors bound to its inputs and outputs."""
    import onnxruntime
    from onnx import TensorProto, helper

    def as_passed(x: torch.Tensor) -> torch.Tensor:
        # With the heads after the tokens, the operator takes them flattened, and their number as an attribute.
        return _laid_out(case, x).flatten(2) if case.strided else x

    # It refuses tables with fewer rows than tokens.
    angle = angles_of(case, torch.arange(max(int(ids.max()) + 1, ids.shape[-1])))
    inputs = {
        "q": as_passed(q),
        "k": as_passed(k),
        "cos": angle.cos().to(q.dtype),
        "sin": angle.sin().to(q.dtype),
        "ids": ids.contiguous(),
    }
    # New tensors even for work in place, which the operator is not documented to support.
    y, z = torch.empty_like(q), torch.empty_like(k)
    outputs = {"y": as_passed(y), "z": as_passed(z)}
    types = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.int64: TensorProto.INT64,
    }
    given, returned = (
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
        helper.make_graph(nodes, "rotation", given, returned),
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
        return inputs, outputs  # keeps them alive: the binding has only their addresses

    def call_out_of_place() -> object:
        # Other contenders allocate their results in the timed call, which can cost more than the rotation.
        new = {name: torch.empty_like(x) for name, x in outputs.items()}
        bind_outputs(new)
        session.run_with_iobinding(binding)
        return inputs, new

    call()
    return Made(call_out_of_place if case.work == "out of place" else call, (y, z))


def no_jax(case: Case) -> str | None:
    """Return why jax cannot take part in a case; None if it can."""
    if case.device != "cpu" or case.work == "backward":
        return "it is measured only on the CPU, in forward and in training cases"
    if case.phases is not None:
        return "it takes no phases"
    if case.positions == "ids per head":
        return "its positions are those of all heads"
    if case.threads not in (0, cores()):
        fixed = f"its number of threads is fixed when it starts: here {cores()}"
        return missing("jax") or fixed
    return missing("jax")


def jax_jit(case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> Made:
    """Prepare the usual expression in jax, compiled ahead of time."""
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
        # jax drops results that are not returned, and a model needs the rotated q and k as well.
        return *rotated, *backward(grads)

    tensors = [q, k, *tables_of(case, ids, q.dtype)]
    function = rotate
    if case.work == "training":
        tensors += cotangents(q, k)
        function = train
    tensors = [_laid_out(case, x).contiguous() for x in tensors]

    # Compiling ahead of time enables float64 only here, not for the whole process.
    with jax.enable_x64(True):
        arrays = [jax.dlpack.from_dlpack(x) for x in tensors]
        # Inputs are not donated: a donated array is invalid after one call, and a copy for the next
        # would cost more than the memory that is saved.
        compiled = jax.jit(function).lower(*arrays).compile()

    def call() -> Any:
        return jax.block_until_ready(compiled(*arrays))

    found = tuple(_laid_out(case, torch.utils.dlpack.from_dlpack(x)) for x in call())
    return Made(call, found)
