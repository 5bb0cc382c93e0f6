"""Functions of other libraries, out of loose files: a few of each suffice, and nothing is installed.

A package's own `__init__` would import all of it, so packages here are bare: they only say where their
modules are. A module is looked for in the folder of peers and in the folders within it, then where its
package is installed. A function that is called otherwise than it was when this was written is absent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from . import stages
from .voice import MissingError

#: Where peers are looked for, unless this names another folder.
VARIABLE = stages.PEERS
FOLDER = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Peer:
    """A module of another library.

    Attributes:
        repository: at GitHub.
        module: what is imported.
        name: what is called of it.
        signature: of that, or of its `forward` if it is a class; without annotations.
        files: what must be there, by path within the repository.
        bare: packages that are not run.
        given: names that a bare package has all the same, and the module that each is from.
    """

    repository: str
    module: str
    name: str
    signature: str
    files: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    given: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)


_ROTATE = "xopes/ops/lrpe/rotate/_1d/lrpe_rotate_1d_sp_triton.py"

PEERS = {
    "Liger": Peer(
        "linkedin/Liger-Kernel",
        "liger_kernel.ops.rope",
        "LigerRopeFunction",
        "(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1)",
        ("src/liger_kernel/ops/rope.py",),
        ("liger_kernel", "liger_kernel.ops"),
    ),
    "flash-attention": Peer(
        "Dao-AILab/flash-attention",
        "flash_attn.layers.rotary",
        "apply_rotary_emb",
        "(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None)",
        ("flash_attn/layers/rotary.py", "flash_attn/ops/triton/rotary.py"),
        ("flash_attn", "flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"),
    ),
    "FLA": Peer(
        "fla-org/flash-linear-attention",
        "fla.modules.rotary",
        "rotary_embedding",
        "(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "chunk_indices=None)",
        (
            "fla/modules/rotary.py",
            "fla/modules/backends/__init__.py",
            "fla/modules/backends/triton_ascend/__init__.py",
            "fla/ops/backends/__init__.py",
            "fla/ops/utils/index.py",
            *(
                f"fla/utils/{name}.py"
                for name in ("__init__", "_compat", "_config", "_decorators", "_device", "_testing")
            ),
        ),
        ("fla", "fla.modules", "fla.ops", "fla.ops.utils"),
        {"fla.ops.utils": {"fla.ops.utils.index": ("prepare_chunk_indices",)}},
    ),
    "xopes": Peer(
        "Doraemonzzz/xopes",
        "xopes.ops.lrpe.rotate._1d.lrpe_rotate_1d_sp_triton",
        "lrpe_rotate_1d_sp_triton",
        "(x, theta, offset=0, act='none', dim=None, **kwargs)",
        (_ROTATE, "xopes/utils/utils.py", "xopes/utils/constant.py"),
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
            # For a softmax over the sequence alone, which is no case here.
            "xopes.ops.act": {"": ("act_fn",)},
            "xopes.utils": {
                "xopes.utils.utils": ("contiguous", "generate_configs", "next_power_of_two")
            },
        },
    ),
    "transformers": Peer(
        "huggingface/transformers",
        "transformers.models.llama.modeling_llama",
        "apply_rotary_pos_emb",
        "(q, k, cos, sin, unsqueeze_dim=1)",
    ),
}

#: Names that modules import of einops, and call in functions that are not called here.
_OF_EINOPS = ("rearrange", "repeat", "pack", "unpack")


def _root(module: str) -> Path:
    """The folder that the package of a module is in."""
    package = module.split(".")[0]
    folder = Path(os.environ.get(VARIABLE, FOLDER))
    if folder.is_dir():
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
        for root in (folder, *inner, *(path / "src" for path in inner)):
            if (root / f"{module.replace('.', '/')}.py").is_file():
                return root
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise MissingError(f"{package} is neither installed nor in {folder.name}/")
    return Path(next(iter(found.submodule_search_locations))).parent


def _bare(name: str, root: Path) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(root / name.replace(".", "/"))]
    module.__dict__["__version__"] = "unknown"
    _install(name, module)
    return module


def _install(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    if above in sys.modules:
        setattr(sys.modules[above], last, module)


def _never(*_: Any, **__: Any) -> Any:
    raise MissingError("it called a function that was left out")


def signature_of(function: Any) -> str:
    """How a function is called, or the `forward` of a class, without annotations."""
    found = inspect.signature(getattr(function, "forward", function))
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def function(name: str) -> Any:
    """What is called of a peer; the class, of an autograd function.

    Raises:
        MissingError: it is not there, cannot be imported, or is called otherwise.
    """
    peer = PEERS[name]
    found = getattr(load(name), peer.name, None)
    if found is None:
        raise MissingError(f"{peer.module} has no {peer.name} any more")
    signature = signature_of(found)
    if signature != peer.signature:
        raise MissingError(f"it is called otherwise: {peer.name}{signature}, not {peer.signature}")
    return found


def load(name: str) -> ModuleType:
    """A peer's module.

    Raises:
        MissingError: it is not there, or cannot be imported.
    """
    peer = PEERS[name]
    if peer.module in sys.modules:
        return sys.modules[peer.module]
    root = _root(peer.module) if peer.bare else None
    # transformers looks for some of these packages when it is imported: before they are here bare.
    with contextlib.suppress(Exception):
        importlib.import_module("transformers.models.llama.modeling_llama")
    with _einops():
        return _imported(peer, root)


@contextlib.contextmanager
def _einops() -> Iterator[None]:
    """A stand-in for einops where there is none, for as long as others import it."""
    if importlib.util.find_spec("einops") is not None:
        yield
        return
    _install("einops", ModuleType("einops"))
    sys.modules["einops"].__dict__.update(dict.fromkeys(_OF_EINOPS, _never))
    try:
        yield
    finally:
        del sys.modules["einops"]


def _imported(peer: Peer, root: Path | None) -> ModuleType:
    before = set(sys.modules)
    try:
        for package in peer.bare:
            _bare(package, cast(Path, root))
        for package, sources in peer.given.items():
            for source, names in sources.items():
                found = importlib.import_module(source) if source else None
                for each in names:
                    setattr(sys.modules[package], each, getattr(found, each) if found else _never)
        return importlib.import_module(peer.module)
    except Exception as reason:
        for module in set(sys.modules) - before:
            if module.split(".")[0] in peer.bare:
                del sys.modules[module]
        raise MissingError(f"{peer.module}: {type(reason).__name__}: {reason}") from reason
