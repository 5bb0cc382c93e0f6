"""Check the readings of configurations of timm; with timm installed, also against its models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reading import llama, read
from tests.support.tolerances import assert_near
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.config import provenance
from tightrope.config.timm import ARCHITECTURES
from tightrope.functional import rotate

READ = [name for name, (family, _) in ARCHITECTURES.items() if family.refused is None]
TWO = Axes.blocks((16, 16))
ROWS, COLUMNS = 4, 6
EVA = "eva02_tiny_patch14_224"


def config_of(name: str, **more: Any) -> dict[str, Any]:
    return {"architecture": name, "num_classes": 0, "pretrained_cfg": {"tag": "one"}, **more}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("eva02_base_patch14_448", RopeSpec(64, interleaved=True, axes=TWO)),
        ("vit_base_patch16_rope_224", RopeSpec(64, base=100.0, interleaved=True, axes=TWO)),
        (
            "vit_pe_core_gigantic_patch14_448",
            RopeSpec(96, interleaved=True, axes=Axes.blocks((24, 24))),
        ),
        (
            "vit_base_patch16_dinov3",
            read(
                llama(
                    model_type="dinov3_vit",
                    hidden_size=768,
                    num_attention_heads=12,
                    rope_theta=100.0,
                )
            ),
        ),
    ],
)
def test_an_architecture_gives_its_spec(name: str, wanted: RopeSpec, tmp_path: Path) -> None:
    made = provenance(config_of(name))
    assert made.spec == wanted
    assert made.name == f"architecture {name!r}"
    assert all(row.source for row in made.rows)
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)), encoding="utf-8")
    assert RopeSpec.from_config(tmp_path) == wanted
    assert RopeSpec.from_config({"architecture": name}) == wanted
    assert RopeSpec.from_config({"architecture": f"{name}.of_some_weights"}) == wanted


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (config_of("resnet50"), "architecture 'resnet50' has no spec: the table of timm's"),
        ({"architecture": "vit_base_patch16_224"}, "has no spec: the table of timm's"),
        ({"architecture": "resnet50", "num_classes": 9}, "has no spec: the table of timm's"),
        (config_of("vit_base_patch16_rope_mixed_224"), "has no spec: its frequencies are learned"),
        (
            config_of(EVA, model_args={"rope_temperature": 5, "num_heads": 2}),
            "must have the rotation that timm's code gives it, but model_args has num_heads, rope_t",
        ),
        (config_of(EVA, model_args=3), "model_args must be a mapping but got 3"),
        (config_of(EVA, rope_type="dinov3"), "known but got rope_type"),
    ],
)
def test_anything_else_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^\[from_config\] .*{re.escape(text)}"):
        RopeSpec.from_config(config)


def test_arguments_that_do_not_change_the_rotation_are_ignored() -> None:
    config = config_of(EVA, model_args={"img_size": 448})
    assert RopeSpec.from_config(config) == RopeSpec(64, interleaved=True, axes=TWO)


def test_a_config_of_another_program_is_not_taken_for_one_of_timm() -> None:
    config = {"architecture": "mine", "head_dim": 64, "rope_theta": 500.0}
    config |= {"rotary_dim": 64, "is_neox_style": True}
    assert RopeSpec.from_config(config) == RopeSpec(64, base=500.0)


@pytest.mark.slow
def test_models_of_timm_rotate_as_the_specs() -> None:
    """All architectures, where timm is installed: its import needs torchvision, which has no CPU build."""
    timm = pytest.importorskip("timm")
    layers = pytest.importorskip("timm.layers.pos_embed_sincos")
    for name in READ:
        compare(name, timm, layers)


def compare(name: str, timm: Any, layers: Any) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    module, attention = model.rope, model.blocks[0].attn
    spec = RopeSpec.from_config(config_of(name))
    assert isinstance(spec, RopeSpec)
    head_dim = model.embed_dim // attention.num_heads
    assert (spec.head_dim, spec.interleaved) == (head_dim, not attention.rotate_half)
    made = type(module)(
        head_dim,
        temperature=module.temperature,
        rotate_half=module.rotate_half,
        **({} if "Dino" in type(module).__name__ else {"in_pixels": module.in_pixels}),
    )
    tables = made.get_embed(shape=(ROWS, COLUMNS))
    x = torch.randn(1, 2, ROWS * COLUMNS, head_dim, generator=torch.Generator().manual_seed(1))
    wanted = layers.apply_rot_embed_cat(x, tables, half=attention.rotate_half)
    where = positions.grid(ROWS, COLUMNS)
    if "Dino" in type(module).__name__:
        where = positions.grid(ROWS, COLUMNS, span=(-1, 1))
    assert_near(rotate(x, spec, where), wanted, "published image angles")
