"""Rotary position embedding (RoPE): exact at any position, fused forward and backward."""

from __future__ import annotations

import typing as _typing
from importlib.metadata import PackageNotFoundError as _NotFound, version as _version

from . import _mkl, backends as backends, ops as _ops

_mkl.choose_code()
_ops.register()
backends.register()

from . import (  # noqa: E402
    frequencies as frequencies,
    functional as functional,
    gates as gates,
    nn as nn,
    phases as phases,
    positions as positions,
    stacks as stacks,
)
from .axes import Axes as Axes  # noqa: E402
from .backends import which as which  # noqa: E402
from .functional import (  # noqa: E402
    apply_rotary_pos_emb as apply_rotary_pos_emb,
    rerotate as rerotate,
    rerotate_ as rerotate_,
    rotate as rotate,
    rotate_ as rotate_,
    rotate_qk as rotate_qk,
    rotate_qk_ as rotate_qk_,
    write_kv as write_kv,
)
from .spec import RopeSpec as RopeSpec  # noqa: E402

if _typing.TYPE_CHECKING:
    from .patching import patch as patch, unpatch as unpatch

try:
    __version__ = _version("tightrope")
except _NotFound:
    # Imported from a checkout that is on the path but not installed.
    __version__ = "0+uninstalled"

__all__ = [
    "Axes",
    "RopeSpec",
    "__version__",
    "apply_rotary_pos_emb",
    "backends",
    "frequencies",
    "functional",
    "gates",
    "nn",
    "patch",
    "phases",
    "positions",
    "rerotate",
    "rerotate_",
    "rotate",
    "rotate_",
    "rotate_qk",
    "rotate_qk_",
    "stacks",
    "unpatch",
    "which",
    "write_kv",
]


def __getattr__(name: str) -> _typing.Any:
    # Few programs need the functions that patch models, so they are imported on first use.
    if name in ("patch", "unpatch"):
        from . import patching

        return getattr(patching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
