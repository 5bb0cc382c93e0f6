"""Contenders of other libraries: transformers, rotary-embedding-torch, ONNX Runtime, and Triton kernels for GPUs.

The kernels need a few source files of their libraries, at their paths below `FOLDER`; a library that is
installed needs none. Without `__init__.py`, Python imports a file alone and not the whole library:

* Liger-Kernel: liger_kernel/ops/rope.py and what it imports;
* flash-attention: flash_attn/layers/rotary.py, flash_attn/ops/triton/rotary.py;
* xopes: xopes/ops/lrpe/rotate/_1d/lrpe_rotate_1d_sp_triton.py, xopes/utils/utils.py, xopes/utils/constant.py;
  here an xopes/utils/__init__.py that imports contiguous, generate_configs and next_power_of_two from utils,
  and an xopes/ops/act/__init__.py that defines any act_fn, which no case calls.

ONNX Runtime takes only contiguous tensors, but no case needs a copy, as it accepts heads before or after
the tokens. A case of views passes the underlying (batch, seq, heads, dim) tensor, so it works on the memory
of q and k. Tensors are passed once, outside the timed call, which favours it.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .cases import Case
from .contenders import Contender, Made, Rotate, Rotation

FOLDER = Path(__file__).parent / "gpu-peers"


def _only_rotates(case: Case) -> bool:
    """Return whether contenders that only rotate, with heads before the tokens, take part in a case."""
    plain = case.plain and case.phases is None and not case.neighbours
    return plain and case.work != "backward" and case.memory in ("view", "bhsd")


# ---- torch code -----------------------------------------------------------------------------------


def _is_llama(case: Case) -> bool:
    """Return whether a case rotates q and k as Llama does: whole heads, in the half pairing."""
    whole = not case.interleaved and case.rotary_dim is None and case.k_heads > 0
    return _only_rotates(case) and whole and case.positions != "ids per head"


def _transformers(rotation: Rotation, compiles: bool = False) -> Rotate:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate

    return Rotate(torch.compile(rotate, fullgraph=True) if compiles else rotate, rotation.tables())


def _rotary_embedding_torch(rotation: Rotation) -> Rotate:
    from rotary_embedding_torch import RotaryEmbedding

    rope = RotaryEmbedding(rotation.case.width).to(rotation.case.device)
    rope.eval().requires_grad_(False)
    rotate = rope.rotate_queries_or_keys
    return Rotate(lambda *xs: [rotate(x) for x in xs])


# ---- ONNX Runtime ---------------------------------------------------------------------------------


def _has_operator(case: Case) -> bool:
    """Return whether ONNX's operator can make a case on the CPU."""
    if case.positions in ("M-RoPE", "ids per head") or not case.k_heads:
        return False
    forward = case.work in ("in place", "out of place") and case.dtype in ("float32", "float16")
    return forward and case.device == "cpu" and _only_rotates(case)


def _onnxruntime(rotation: Rotation) -> Made:
    """Prepare the ONNX operator, with tensors bound to its inputs and outputs."""
    import onnxruntime
    from onnx import TensorProto, helper

    case, (q, k) = rotation.case, rotation.xs
    view = case.memory == "view"

    def as_passed(x: torch.Tensor) -> torch.Tensor:
        # With the heads after the tokens, the operator takes them flattened, and their number as an attribute.
        return x.transpose(1, 2).flatten(2) if view else x

    # It refuses tables with fewer rows than tokens.
    reach = max(int(rotation.ids.max()) + 1, case.tokens)
    angle = rotation.angles(torch.arange(reach))
    inputs = {
        "q": as_passed(q),
        "k": as_passed(k),
        "cos": angle.cos().to(q.dtype),
        "sin": angle.sin().to(q.dtype),
        "ids": rotation.ids.expand(case.rows, -1).contiguous(),
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
            rotary_embedding_dim=case.width,
        )
        for x, rotated, heads in (("q", "y", case.q_heads), ("k", "z", case.k_heads))
    ]
    model = helper.make_model_gen_version(
        helper.make_graph(nodes, "rotation", given, returned),
        opset_imports=[helper.make_opsetid("", 23)],
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
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
    results = y.clone(), z.clone()
    return Made(call_out_of_place if case.work == "out of place" else call, results)


# ---- kernels for GPUs -----------------------------------------------------------------------------

#: The only cases that run autotuned kernels, because autotuning takes dozens of compilations.
_TUNED_IN = ("12 x 32768, 12 heads", "prefill 32k")


def _kernel(module: str, name: str) -> Any:
    """Return a function of a library, or its `torch.autograd.Function` class."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return getattr(importlib.import_module(module), name)


def _has_kernel(case: Case) -> bool:
    on_gpu = case.device != "cpu" or "TRITON_INTERPRET" in os.environ
    return on_gpu and _only_rotates(case) and case.positions != "M-RoPE"


def _liger(rotation: Rotation) -> Rotate:
    return Rotate(_kernel("liger_kernel.ops.rope", "LigerRopeFunction").apply, rotation.tables())


def _flash_attention(rotation: Rotation) -> Rotate:
    kernel = _kernel("flash_attn.layers.rotary", "apply_rotary_emb")
    case, ids = rotation.case, rotation.ids
    reach = int(ids.max()) + 1
    angle = rotation.angles(torch.arange(reach, device=case.device))
    dtype = getattr(torch, case.dtype)
    given = angle.cos().to(dtype), angle.sin().to(dtype)
    named: dict[str, Any] = {"interleaved": case.interleaved, "inplace": case.work == "in place"}
    packed = case.positions == "packed"
    if case.positions == "ids per row":
        named["seqlen_offsets"] = ids[:, 0].contiguous()
    elif packed:
        ends = [*range(0, case.tokens, reach), case.tokens]
        named["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=case.device)
        named["max_seqlen"] = reach

    def one(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        # It takes packed sequences without a batch dimension.
        y: torch.Tensor = kernel(x[0] if packed else x, *given, **named)
        return (y[None] if packed else y).transpose(1, 2)

    return Rotate(lambda *xs: [one(x) for x in xs])


def _xopes(rotation: Rotation) -> Rotate:
    module = "xopes.ops.lrpe.rotate._1d.lrpe_rotate_1d_sp_triton"
    kernel = _kernel(module, "lrpe_rotate_1d_sp_triton")
    theta = rotation.spec.frequencies().inv_freq.float().to(rotation.case.device)[None]
    return Rotate(
        lambda *xs: [kernel(x.transpose(1, 2), theta, 0, "none", None).transpose(1, 2) for x in xs]
    )


CONTENDERS = (
    Contender("transformers", _is_llama, _transformers),
    Contender("transformers, compiled", _is_llama, partial(_transformers, compiles=True)),
    Contender(
        "rotary-embedding-torch",
        lambda case: _only_rotates(case) and case.interleaved and case.positions == "0..n-1",
        _rotary_embedding_torch,
    ),
    Contender("onnxruntime", _has_operator, _onnxruntime, own_threads=True),
    Contender(
        "Liger",
        # It writes into q and k.
        lambda case: _has_kernel(case) and case.work != "out of place" and not case.interleaved,
        _liger,
    ),
    Contender("flash-attention", _has_kernel, _flash_attention),
    Contender("xopes", lambda case: _has_kernel(case) and case.name in _TUNED_IN, _xopes),
)
