"""The table of timm's architectures rotates as timm's own models, where timm is installed; rows/timm.jsonl has files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.tolerances import assert_near
from tightrope import RopeSpec, positions
from tightrope.config.timm import ARCHITECTURES
from tightrope.functional import rotate

READ = [name for name, (family, _) in ARCHITECTURES.items() if family.refused is None]
ROWS, COLUMNS = 4, 6


@pytest.mark.slow
def test_models_of_timm_rotate_as_the_specs() -> None:
    """All architectures; the import of timm needs torchvision, which has no CPU build."""
    timm = pytest.importorskip("timm")
    layers = pytest.importorskip("timm.layers.pos_embed_sincos")
    for name in READ:
        compare(name, timm, layers)


def compare(name: str, timm: Any, layers: Any) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    module, attention = model.rope, model.blocks[0].attn
    spec = RopeSpec.from_config({"architecture": name})
    assert isinstance(spec, RopeSpec)
    head_dim, dino = model.embed_dim // attention.num_heads, "Dino" in type(module).__name__
    assert (spec.head_dim, spec.interleaved) == (head_dim, not attention.rotate_half)
    options = {"temperature": module.temperature, "rotate_half": module.rotate_half}
    made = type(module)(head_dim, **options, **({} if dino else {"in_pixels": module.in_pixels}))
    tables = made.get_embed(shape=(ROWS, COLUMNS))
    x = torch.randn(1, 2, ROWS * COLUMNS, head_dim, generator=torch.Generator().manual_seed(1))
    wanted = layers.apply_rot_embed_cat(x, tables, half=attention.rotate_half)
    span: Any = {"span": (-1, 1)} if dino else {}
    where = positions.grid(ROWS, COLUMNS, **span)
    assert_near(rotate(x, spec, where), wanted, "published image angles")
