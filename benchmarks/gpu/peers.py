"""Functions of other libraries, loaded from a few files of theirs, so that nothing need be installed.

A package's own `__init__` would import all of it. So a package out of these files is an empty module
that only knows where they are. A library whose files are not there is imported if it is installed.
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

#: The variable that names another folder of peers than this one.
VARIABLE = "TIGHTROPE_GPU_PEERS"
FOLDER = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Peer:
    """A function of another library.

    Attributes:
        module, name: what is imported, and what of it is called.
        packages: those that are made empty.
        given: names that such a package must have all the same, with the module of each.
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
        ("xopes", "xopes.ops", "xopes.ops.lrpe", "xopes.ops.lrpe.rotate", "xopes.ops.lrpe.rotate._1d",
         "xopes.ops.act", "xopes.utils"),
        {
            "xopes.ops.act": {"act_fn": ""},  # for a softmax over the sequence, which is no case
            "xopes.utils": dict.fromkeys(
                ("contiguous", "generate_configs", "next_power_of_two"), "xopes.utils.utils"
            ),
        },
    ),
}  # fmt: skip


def missing(name: str) -> str | None:
    """Why a peer's files are not to be found; None if they are there."""
    package = PEERS[name].packages[0]
    found = _root(PEERS[name]) or importlib.util.find_spec(package)
    return None if found else f"{package} is neither installed nor among the files of peers"


def function(name: str) -> Any:
    """What is called of a peer; an autograd function as the class.

    Whether it still takes the arguments that it took is found out by its results.

    Raises:
        ImportError: it cannot be imported.
    """
    peer = PEERS[name]
    if peer.module not in sys.modules:
        # transformers asks for some of these packages when it is imported: before they are empty.
        with contextlib.suppress(Exception):
            importlib.import_module("transformers.models.llama.modeling_llama")
        root = _root(peer)
        if root is not None:
            _load(peer, root)
    return getattr(importlib.import_module(peer.module), peer.name)


def _root(peer: Peer) -> Path | None:
    """The folder of peers, or the one within it, that has the file of a module."""
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
    raise ImportError("it called a function that was left out")
