"""Read configurations of timm's vision transformers.

Such a configuration names an ``architecture``, and only timm's code gives the rotation of each. They are in
timm.json, as timm 1.0.31 has them: the rotations, and architecture -> (rotation, head_dim). ``model_args`` that
change a rotation are an error. `tests/unit/config/test_timm.py` compares the table with timm where it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .families import Family
from .keys import table
from .source import Found, Source, fail, items

_TABLE = table("timm")
_ROTATIONS = {name: Family(**facts) for name, facts in _TABLE["rotations"].items()}
ARCHITECTURES: dict[str, tuple[Family, int]] = {
    name: (_ROTATIONS[rotation], head_dim)
    for name, (rotation, head_dim) in _TABLE["architectures"].items()
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
    arguments = items(Found(values.get("model_args") or None, "model_args"))
    changed = [key for key in arguments if key in _CHANGES or "rope" in str(key)]
    if changed:
        fail(
            f"{name} must have the rotation that timm's code gives it, but model_args has "
            f"{', '.join(sorted(map(str, changed)))}"
        )
    origin = f"{name} ({family.source})"
    unread = {key: value for key, value in values.items() if key != "architecture"}
    return Source(
        {"head_dim": head_dim}, family, name, {"head_dim": origin}, "", tuple(values), unread
    )
