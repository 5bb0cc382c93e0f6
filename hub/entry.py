"""Rotary position embedding: exact at any position, fused forward and backward by one Triton kernel.

hub/build.py copies this file to the ``__init__.py`` of the kernel.
"""

from . import ops as _ops
from .backends import reference as _reference, triton as _triton
from .ops.registry import add as _add

_ops.register()
_add("triton", _triton)
_add("reference", _reference)

from . import frequencies, layers, positions  # noqa: E402
from .functional import (  # noqa: E402
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
    write_kv,
)
from .spec import RopeSpec  # noqa: E402

__all__ = [
    "RopeSpec",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_",
    "frequencies",
    "layers",
    "positions",
    "rotate",
    "rotate_",
    "rotate_qk",
    "rotate_qk_",
    "write_kv",
]
