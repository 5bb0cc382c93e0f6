"""Public functions: all rotations call the same operator, and none keeps state."""

from __future__ import annotations

from ._cos_sin import build_freqs_cis as build_freqs_cis
from ._rerotate import rerotate as rerotate, rerotate_ as rerotate_
from ._rotate import (
    GateLike as GateLike,
    rotary_pos_embedding as rotary_pos_embedding,
    rotate as rotate,
    rotate_ as rotate_,
    rotate_qk as rotate_qk,
    rotate_qk_ as rotate_qk_,
    rotate_with as rotate_with,
    with_rounding as with_rounding,
)
from ._write import write_kv as write_kv
from .lrpe import lrpe_rotate_1d as lrpe_rotate_1d
from .scan import PolarState as PolarState, polar_scan as polar_scan
from .tables import (
    apply_rotary_pos_emb as apply_rotary_pos_emb,
    apply_rotary_pos_emb_ as apply_rotary_pos_emb_,
    rotary_apply as rotary_apply,
)

__all__ = [
    "GateLike",
    "PolarState",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_",
    "build_freqs_cis",
    "lrpe_rotate_1d",
    "polar_scan",
    "rerotate",
    "rerotate_",
    "rotary_apply",
    "rotary_pos_embedding",
    "rotate",
    "rotate_",
    "rotate_qk",
    "rotate_qk_",
    "write_kv",
]
