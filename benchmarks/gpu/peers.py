"""Functions of other libraries, loaded from a few of their source files without installing them.

A package's own `__init__` would import the whole package, so an empty module with the path of the files
replaces each package. A library whose files are absent is imported if it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

#: Environment variable that names the folder of peers, instead of `FOLDER`.
VARIABLE = "TIGHTROPE_GPU_PEERS"
FOLDER = Path(__file__).parent / "peers"


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


PEERS = {
    "Liger": Peer(
        "liger_kernel.ops.rope", "LigerRopeFunction", ("liger_kernel", "liger_kernel.ops")
    ),
    "flash-attention": Peer(
        "flash_attn.layers.rotary",
        "apply_rotary_emb",
        ("flash_attn", "flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"),
    ),
    "FLA": Peer(
        "fla.modules.rotary",
        "rotary_embedding",
        ("fla", "fla.modules", "fla.ops", "fla.ops.utils"),
        {"fla.ops.utils": {"prepare_chunk_indices": "fla.ops.utils.index"}},
    ),
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


def missing(name: str) -> str | None:
    """Return why a peer cannot be loaded; None if its files or its package exist."""
    package = PEERS[name].packages[0]
    found = _root(PEERS[name]) or importlib.util.find_spec(package)
    return None if found else f"{package} is neither installed nor in the folder of peers"


def function(name: str) -> Any:
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
