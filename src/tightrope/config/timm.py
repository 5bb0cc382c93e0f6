"""Read configurations of timm's vision transformers.

Such a configuration names an ``architecture``, and only timm's code gives the rotation of each. A
table, architecture -> facts; ``model_args`` that change one of them are an error.
`tests/unit/config/test_timm.py` compares the table with timm where it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._errors import bad_type
from .families import Family
from .source import Source, fail

_AXIAL = "timm eva.py: RotaryEmbeddingCat"
_EVA = Family(True, _AXIAL, base=10000.0, axes="blocks")
_ROPE_VIT = Family(True, _AXIAL, base=100.0, axes="blocks")
_DINO = Family(
    False, "timm eva.py: RotaryEmbeddingDinoV3", base=100.0, axes="blocks", scaling="turns"
)
_MIXED = Family(True, "", refused="its frequencies are learned: they are in the weights")

# Facts and head_dim -> the architectures of timm 1.0.31 that have them.
_GROUPS: tuple[tuple[Family, int, str], ...] = (
    (
        _EVA,
        64,
        """eva02_tiny_patch14_224 eva02_small_patch14_224 eva02_base_patch14_224
        eva02_large_patch14_224 eva02_tiny_patch14_336 eva02_small_patch14_336
        eva02_base_patch14_448 eva02_large_patch14_448 eva02_base_patch16_clip_224
        eva02_large_patch14_clip_224 eva02_large_patch14_clip_336
        vit_medium_patch16_rope_reg1_gap_256 vit_mediumd_patch16_rope_reg1_gap_256
        vit_betwixt_patch16_rope_reg4_gap_256 vit_base_patch16_rope_reg1_gap_256
        vit_pe_core_tiny_patch16_384 vit_pe_core_small_patch16_384 vit_pe_core_base_patch16_224
        vit_pe_core_large_patch14_336 vit_pe_lang_large_patch14_448
        vit_pe_spatial_tiny_patch16_512 vit_pe_spatial_small_patch16_512
        vit_pe_spatial_base_patch16_512 vit_pe_spatial_large_patch14_448""",
    ),
    (
        _EVA,
        96,
        """vit_pe_core_gigantic_patch14_448 vit_pe_lang_gigantic_patch14_448
        vit_pe_spatial_gigantic_patch14_448""",
    ),
    (
        _ROPE_VIT,
        64,
        """vit_small_patch16_rope_224 vit_base_patch16_rope_224 vit_large_patch16_rope_224
        vit_small_patch16_rope_ape_224 vit_base_patch16_rope_ape_224
        vit_large_patch16_rope_ape_224""",
    ),
    (
        _DINO,
        64,
        """vit_tiny_patch16_dinov3_qkvb vit_small_patch16_dinov3 vit_small_patch16_dinov3_qkvb
        vit_small_plus_patch16_dinov3 vit_small_plus_patch16_dinov3_qkvb vit_base_patch16_dinov3
        vit_base_patch16_dinov3_qkvb vit_large_patch16_dinov3 vit_large_patch16_dinov3_qkvb
        vit_huge_plus_patch16_dinov3 vit_huge_plus_patch16_dinov3_qkvb vit_small_patch16_lingbot
        vit_base_patch16_lingbot vit_large_patch16_lingbot vit_giant_patch16_lingbot""",
    ),
    (_DINO, 128, "vit_7b_patch16_dinov3"),
    (
        _MIXED,
        64,
        """vit_small_patch16_rope_mixed_224 vit_base_patch16_rope_mixed_224
        vit_large_patch16_rope_mixed_224 vit_small_patch16_rope_mixed_ape_224
        vit_base_patch16_rope_mixed_ape_224 vit_large_patch16_rope_mixed_ape_224""",
    ),
)
ARCHITECTURES: dict[str, tuple[Family, int]] = {
    name: (family, head_dim) for family, head_dim, names in _GROUPS for name in names.split()
}
_UNKNOWN = Family(
    True, "", refused="the table of timm's architectures with RoPE does not contain it"
)

# The keys of timm's own configurations. With others too, the name of an architecture may be another program's.
_KEYS = frozenset({"architecture", "num_classes", "num_features", "global_pool", "model_args"})

# Arguments of timm's models that change the rotation; so does each whose name has "rope".
_CHANGES = frozenset({"embed_dim", "num_heads", "use_rot_pos_emb"})


def recognised(values: Mapping[str, Any]) -> bool:
    """Return True if a mapping is the configuration of a model of timm."""
    given = values.get("architecture")
    if not isinstance(given, str) or "model_type" in values:
        return False
    return given in ARCHITECTURES or "pretrained_cfg" in values or values.keys() <= _KEYS


def translated(values: Mapping[str, Any]) -> Source:
    """Read the configuration of a model of timm, by the table of architectures."""
    given = values["architecture"]
    name = f"architecture {given!r}"
    # A tag of pretrained weights may follow the name: eva02_base_patch14_448.mim_in22k
    family, head_dim = ARCHITECTURES.get(given.partition(".")[0], (_UNKNOWN, 0))
    arguments = values.get("model_args") or {}
    if not isinstance(arguments, Mapping):
        raise bad_type(f"model_args must be a mapping but got {arguments!r}")
    changed = [key for key in arguments if key in _CHANGES or "rope" in str(key)]
    if changed:
        fail(
            f"{name} must have the rotation that timm's code gives it, but model_args has "
            f"{', '.join(sorted(changed))}"
        )
    origin = f"{name} ({family.source})"
    unread = {key: value for key, value in values.items() if key != "architecture"}
    return Source(
        {"head_dim": head_dim}, family, name, {"head_dim": origin}, "", tuple(values), unread
    )
