"""Contenders of other libraries: transformers, ONNX Runtime, jax, and Triton kernels for GPUs.

The kernels are loaded from a few source files, without installing their libraries. A package's own
`__init__` would import the whole package, so an empty module with the path of the files replaces each
package. A library whose files are absent is imported if it is installed.

ONNX Runtime and jax take only contiguous tensors, but no case needs a copy, as both accept heads before
or after the tokens. A case of views passes the underlying (batch, seq, heads, dim) tensor, so both work
on the memory of q and k. Tensors are passed once, outside the timed call, which favours these contenders.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tightrope.environment import cores

from .cases import Case
from .contenders import Contender, Made, Rotate, Rotation

# ---- files of other libraries ---------------------------------------------------------------------

#: Environment variable that names the folder of peers, instead of `FOLDER`.
VARIABLE = "TIGHTROPE_GPU_PEERS"
FOLDER = Path(__file__).parent / "gpu-peers"


@dataclass(frozen=True)
class Peer:
    """A function of another library.

    Attributes:
        module, name: the module to import, and the name of the function in it.
        packages: packages to replace by empty modules.
        given: replaced package -> name that it must define -> module to take it from; "" for a function
            that raises an error when called.
    """

    module: str
    name: str
    packages: tuple[str, ...]
    given: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


# The files that suffice, at their paths in the folder of a library.
PEERS = {
    # Liger-Kernel: src/liger_kernel/ops/rope.py
    "Liger": Peer(
        "liger_kernel.ops.rope", "LigerRopeFunction", ("liger_kernel", "liger_kernel.ops")
    ),
    # flash_attn/layers/rotary.py, flash_attn/ops/triton/rotary.py
    "flash-attention": Peer(
        "flash_attn.layers.rotary",
        "apply_rotary_emb",
        ("flash_attn", "flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"),
    ),
    # fla/modules/rotary.py, __init__.py of fla/modules/backends, fla/modules/backends/triton_ascend and fla/ops/backends,
    # fla/ops/utils/index.py, and in fla/utils: __init__.py, _compat.py, _config.py, _decorators.py, _device.py, _testing.py
    "FLA": Peer(
        "fla.modules.rotary",
        "rotary_embedding",
        ("fla", "fla.modules", "fla.ops", "fla.ops.utils"),
        {"fla.ops.utils": {"prepare_chunk_indices": "fla.ops.utils.index"}},
    ),
    # xopes/ops/lrpe/rotate/_1d/lrpe_rotate_1d_sp_triton.py, xopes/utils/utils.py, xopes/utils/constant.py
    "xopes": Peer(
        "xopes.ops.lrpe.rotate._1d.lrpe_rotate_1d_sp_triton",
        "lrpe_rotate_1d_sp_triton",
        (
            "xopes",
            "xopes.ops",
            "xopes.ops.lrpe",
            "xopes.ops.lrpe.rotate",
            "xopes.ops.lrpe.rotate._1d",
            "xopes.ops.act",
            "xopes.utils",
        ),
        {
            "xopes.ops.act": {
                "act_fn": ""
            },  # only for a softmax over the sequence, which no case has
            "xopes.utils": dict.fromkeys(
                ("contiguous", "generate_configs", "next_power_of_two"), "xopes.utils.utils"
            ),
        },
    ),
}


def _not_there(name: str) -> str | None:
    """Return why a peer cannot be loaded; None if its files or its package exist."""
    package = PEERS[name].packages[0]
    found = _root(PEERS[name]) or importlib.util.find_spec(package)
    return None if found else f"{package} is neither installed nor in the folder of peers"


def function_of(name: str) -> Any:
    """Return the function of a peer, or its `torch.autograd.Function` class.

    Its signature is not checked: if it has changed, the call fails or its results are wrong.

    Raises:
        ImportError: its module cannot be imported.
    """
    peer = PEERS[name]
    if peer.module not in sys.modules:
        # transformers imports some of these packages itself: import it before they are replaced.
        with contextlib.suppress(Exception):
            importlib.import_module("transformers.models.llama.modeling_llama")
        root = _root(peer)
        if root is not None:
            _load(peer, root)
    return getattr(importlib.import_module(peer.module), peer.name)


def _root(peer: Peer) -> Path | None:
    """Return the folder to import a peer from, or None if no folder has its file.

    The folder is that of all peers, a folder in it, or the `src` of such a folder.
    """
    folder = Path(os.environ.get(VARIABLE, FOLDER))
    inner = sorted(path for path in folder.glob("*") if path.is_dir())
    file = f"{peer.module.replace('.', '/')}.py"
    every = (folder, *inner, *(path / "src" for path in inner))
    return next((root for root in every if (root / file).is_file()), None)


def _load(peer: Peer, root: Path) -> None:
    before = set(sys.modules)
    try:
        for package in peer.packages:
            _install(package, root / package.replace(".", "/"))
        for package, names in peer.given.items():
            for name, module in names.items():
                found = getattr(importlib.import_module(module), name) if module else _never
                setattr(sys.modules[package], name, found)
        importlib.import_module(peer.module)
    except Exception as error:
        for module in set(sys.modules) - before:
            if module.split(".")[0] == peer.packages[0]:
                del sys.modules[module]
        raise ImportError(f"{peer.module}: {type(error).__name__}: {error}") from error


def _install(name: str, folder: Path) -> None:
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    module.__dict__["__version__"] = "unknown"
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, module)


def _never(*_: Any, **__: Any) -> Any:
    raise ImportError("a function that was not loaded was called")


# ---- what a contender lacks -----------------------------------------------------------------------


def _missing(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def _alone(case: Case) -> str | None:
    """Return why a contender that only rotates cannot take part in a case; None if it can."""
    if case.work == "backward":
        return "it is measured only in forward and in training cases"
    if case.neighbours:
        return "it is measured only without neighbouring operations"
    if case.phases is not None:
        return "it takes no phases"
    if case.memory in ("bshd", "qkv", "apart"):
        return "it is measured only with heads before the tokens"
    return None if case.plain else "it has neither f nor P"


# ---- torch code -----------------------------------------------------------------------------------


def _no_transformers(case: Case) -> str | None:
    if case.interleaved or case.rotary_dim is not None:
        return "its function rotates only whole heads, in the half pairing"
    if case.positions == "ids per head":
        return "its positions are those of all heads"
    if not case.k_heads:
        return "its function rotates q and k"
    return _alone(case) or _missing("transformers")


def _transformers(rotation: Rotation, compiles: bool = False) -> Rotate:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate

    return Rotate(torch.compile(rotate, fullgraph=True) if compiles else rotate, rotation.tables())


def _no_rotary_embedding_torch(case: Case) -> str | None:
    if not case.interleaved or case.positions != "0..n-1":
        return "it rotates only interleaved pairs at 0..n-1"
    return _alone(case) or _missing("rotary_embedding_torch")


def _rotary_embedding_torch(rotation: Rotation) -> Rotate:
    from rotary_embedding_torch import RotaryEmbedding

    rope = RotaryEmbedding(rotation.case.width).to(rotation.case.device)
    rope.eval().requires_grad_(False)
    rotate = rope.rotate_queries_or_keys
    return Rotate(lambda *xs: [rotate(x) for x in xs])


# ---- other runtimes -------------------------------------------------------------------------------


def _laid_out(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Return the contiguous tensor under a transposed view x, or the view of such a tensor."""
    return x.transpose(1, 2) if case.memory == "view" else x


def _no_onnxruntime(case: Case) -> str | None:
    if case.device != "cpu":
        return "it is measured only on the CPU"
    if case.work in ("training", "backward"):
        return "it has no backward"
    if case.positions in ("M-RoPE", "ids per head") or not case.k_heads:
        return "it is measured with q and k and one position for each token"
    if case.dtype not in ("float32", "float16"):
        # The older operator in the domain com.microsoft does not take this dtype either.
        return f"its operator does not take {case.dtype} on the CPU"
    return _alone(case) or _missing("onnxruntime") or _missing("onnx")


def _onnxruntime(rotation: Rotation) -> Made:
    """Prepare the ONNX operator, with tensors bound to its inputs and outputs."""
    import onnxruntime
    from onnx import TensorProto, helper

    case, (q, k) = rotation.case, rotation.xs
    view = case.memory == "view"

    def as_passed(x: torch.Tensor) -> torch.Tensor:
        # With the heads after the tokens, the operator takes them flattened, and their number as an attribute.
        return _laid_out(case, x).flatten(2) if view else x

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


def _no_jax(case: Case) -> str | None:
    if case.device != "cpu":
        return "it is measured only on the CPU"
    if case.positions == "ids per head":
        return "its positions are those of all heads"
    reason = _alone(case) or _missing("jax")
    if reason is None and case.threads not in (0, cores()):
        return f"its number of threads is fixed when it starts: here {cores()}"
    return reason


def _jax(rotation: Rotation) -> Made:
    """Prepare the usual expression in jax, compiled ahead of time."""
    import jax
    import jax.numpy as jnp

    case, width, count = rotation.case, rotation.case.width, len(rotation.xs)

    def turned(x: Any) -> Any:
        if case.interleaved:
            return jnp.stack((-x[..., 1::2], x[..., 0::2]), -1).reshape(x.shape)
        u, v = jnp.split(x, 2, -1)
        return jnp.concatenate((-v, u), -1)

    def one(x: Any, cos: Any, sin: Any) -> Any:
        head = x[..., :width]
        y = head * cos + turned(head) * sin
        return y if width == x.shape[-1] else jnp.concatenate((y, x[..., width:]), -1)

    def rotate(*given: Any) -> Any:
        *xs, cos, sin = given
        return tuple(one(x, cos, sin) for x in xs)

    def train(*given: Any) -> Any:
        xs, (cos, sin, *grads) = given[:count], given[count:]
        rotated, backward = jax.vjp(lambda *xs: rotate(*xs, cos, sin), *xs)
        # jax drops results that are not returned, and a model needs the rotated q and k as well.
        return *rotated, *backward(tuple(grads))

    tensors = [*rotation.xs, *rotation.beside_heads(rotation.tables())]
    function = rotate
    if case.work == "training":
        tensors += rotation.cotangents
        function = train
    tensors = [_laid_out(case, x.detach()).contiguous() for x in tensors]

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


# ---- kernels for GPUs -----------------------------------------------------------------------------

#: The only cases that run autotuned kernels, because autotuning takes dozens of compilations.
_TUNED_IN = ("12 x 32768, 12 heads", "prefill 32k")


def _no_kernel(case: Case, name: str) -> str | None:
    """Return why a Triton kernel cannot take part in a case that its arguments fit; None if it can."""
    if case.device == "cpu" and "TRITON_INTERPRET" not in os.environ:
        return "it runs on GPUs alone"
    return _alone(case) or _not_there(name)


def _no_liger(case: Case) -> str | None:
    if case.work == "out of place":
        return "it writes into q and k"
    if case.interleaved or case.positions == "M-RoPE":
        return "it takes only the half pairing and positions of one axis"
    return _no_kernel(case, "Liger")


def _liger(rotation: Rotation) -> Rotate:
    return Rotate(function_of("Liger").apply, rotation.tables())


def _no_rotary(case: Case, name: str) -> str | None:
    if case.positions == "M-RoPE":
        return "it takes only positions of one axis"
    if name == "FLA" and case.name not in _TUNED_IN:
        return "its autotuning takes long"
    return _no_kernel(case, name)


def _rotary(rotation: Rotation, name: str) -> Rotate:
    """Prepare flash-attention's kernel, or FLA's, which derives from it."""
    kernel, case, ids = function_of(name), rotation.case, rotation.ids
    reach = int(ids.max()) + 1
    angle = rotation.angles(torch.arange(reach, device=case.device))
    dtype = getattr(torch, case.dtype)
    given = angle.cos().to(dtype), angle.sin().to(dtype)
    named: dict[str, Any] = {"interleaved": case.interleaved, "inplace": case.work == "in place"}
    if case.positions == "ids per row":
        named["seqlen_offsets"] = ids[:, 0].contiguous()
    elif case.positions == "packed":
        ends = [*range(0, case.tokens, reach), case.tokens]
        named["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=case.device)
    # flash-attention takes packed sequences without a batch dimension.
    flat = name == "flash-attention" and "cu_seqlens" in named
    if flat:
        named["max_seqlen"] = reach

    def one(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        y: torch.Tensor = kernel(x[0] if flat else x, *given, **named)
        return (y[None] if flat else y).transpose(1, 2)

    return Rotate(lambda *xs: [one(x) for x in xs])


def _no_xopes(case: Case) -> str | None:
    if case.name not in _TUNED_IN:
        return "its autotuning takes long"
    return _no_kernel(case, "xopes")


def _xopes(rotation: Rotation) -> Rotate:
    kernel = function_of("xopes")
    theta = rotation.spec.frequencies().inv_freq.float().to(rotation.case.device)[None]
    return Rotate(
        lambda *xs: [kernel(x.transpose(1, 2), theta, 0, "none", None).transpose(1, 2) for x in xs]
    )


CONTENDERS = (
    Contender("transformers", _no_transformers, _transformers),
    Contender("transformers, compiled", _no_transformers, partial(_transformers, compiles=True)),
    Contender("rotary-embedding-torch", _no_rotary_embedding_torch, _rotary_embedding_torch),
    Contender("onnxruntime", _no_onnxruntime, _onnxruntime, own_threads=True),
    Contender("jax jit", _no_jax, _jax, own_threads=True),
    Contender("Liger", _no_liger, _liger),
    *(
        Contender(name, partial(_no_rotary, name=name), partial(_rotary, name=name))
        for name in ("flash-attention", "FLA")
    ),
    Contender("xopes", _no_xopes, _xopes),
)
