"""Check the readings of configurations of diffusers against diffusers itself.

The published code rotates random heads, with the tables of its own module; `rotate` with the spec of
the same configuration must rotate them alike. A class without a spec is refused by name.
"""

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import version_of
from tests.support.tolerances import assert_near
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.config import provenance
from tightrope.config.diffusers import TRANSFORMERS
from tightrope.functional import rotate

diffusers = pytest.importorskip("diffusers")
FRAMES, ROWS, COLUMNS = 3, 4, 5
TOKENS = FRAMES * ROWS * COLUMNS
HEADS = 2

# --- the configurations ---------------------------------------------------------------------------

HEAD = {"attention_head_dim": 128, "num_attention_heads": 24}
DIMS = {**HEAD, "axes_dims_rope": [16, 56, 56]}
AXES = {**HEAD, "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0, "patch_size": 1}
JOY = {"hidden_size": 3072, "num_attention_heads": 24, "rope_dim_list": [16, 56, 56], "theta": 256}
LUMINA = {"axes_dims": [32, 48, 48], "axes_lens": [1024, 512, 512], "rope_theta": 256.0}
WAN = {**HEAD, "rope_max_seq_len": 64, "patch_size": [1, 2, 2]}
COGVIDEO = {"attention_head_dim": 64, "use_rotary_positional_embeddings": True}
SU = {
    "type": "su",
    "short_factor": [1.0 + i / 64 for i in range(48)],
    "long_factor": [2.0] * 48,
}
OMNIGEN = {
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "rope_base": 10000,
    "rope_scaling": SU,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
}


def transformers(kind: str, names: str, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a configuration by the name of each class that has it."""
    return {f"{name}Transformer{kind}Model": config for name in names.split()}


# Class -> its configuration.
CONFIGS: dict[str, dict[str, Any]] = {
    **transformers("3D", "SkyReelsV2 WanAnimate Wan WanVACE", WAN),
    **transformers("2D", "Chroma LongCatImage NucleusMoEImage OvisImage QwenImage21", DIMS),
    **transformers("3D", "HunyuanVideo15 HunyuanVideo MotifVideo", AXES),
    **transformers("3D", "CogVideoX ConsisID", COGVIDEO),
    "AceStepTransformer1DModel": {"head_dim": 128, "rope_theta": 1e6},
    "BriaFibo2Transformer2DModel": {**LUMINA, "dim": 3584, "n_heads": 28},
    "BriaFiboTransformer2DModel": {**DIMS, "rope_theta": 10000, "time_theta": 10000},
    "BriaTransformer2DModel": {**DIMS, "rope_theta": 500},
    "CogView4Transformer2DModel": {**HEAD, "rope_axes_dim": [256, 256], "patch_size": 2},
    "CosmosTransformer3DModel": {**HEAD, "rope_scale": [2.0, 1.0, 3.0]},
    "EasyAnimateTransformer3DModel": {"attention_head_dim": 64, "patch_size": 1},
    "Flux2Transformer2DModel": {**HEAD, "axes_dims_rope": [32] * 4, "rope_theta": 2000},
    "Flux3Transformer2DModel": {**HEAD, "axes_dims_rope": [32] * 4, "rope_theta": 10000},
    "FluxTransformer2DModel": HEAD,
    "GlmImageTransformer2DModel": {**HEAD, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {**HEAD, "axes_dims_rope": [32, 32]},
    "HunyuanDiT2DModel": {"attention_head_dim": 88},
    "HunyuanImageTransformer2DModel": {**AXES, "rope_axes_dim": [64, 64], "patch_size": [1, 1]},
    "JoyImageEditTransformer3DModel": {**JOY, "rope_type": "rope"},
    "Krea2Transformer2DModel": {**DIMS, "rope_theta": 1e3},
    "Lumina2Transformer2DModel": {
        "hidden_size": 2304,
        "num_attention_heads": 24,
        "axes_dim_rope": [32, 32, 32],
        "axes_lens": [300, 512, 512],
    },
    "MiniMaxMusic3Transformer1DModel": {"attention_head_dim": 64, "rotary_dim": 32},
    "OmniGenTransformer2DModel": OMNIGEN,
    "PRXTransformer2DModel": {
        "hidden_size": 1792,
        "num_heads": 28,
        "theta": 10000,
        "axes_dim": None,
    },
    "QwenImageTransformer2DModel": {**DIMS, "use_layer3d_rope": False},
    "SanaVideoTransformer3DModel": {**WAN, "attention_head_dim": 112},
    "StableAudioDiTModel": {"attention_head_dim": 64},
    "ZImageTransformer2DModel": {**LUMINA, "dim": 3840, "n_heads": 30},
}

SUPPORTED = [name for name, facts in TRANSFORMERS.items() if facts.refused is None]
REFUSED = [name for name, facts in TRANSFORMERS.items() if facts.refused is not None]
# Classes that diffusers has had since 0.42, which needs Python 3.11.
NEW = {"BriaFibo2Transformer2DModel", "Flux3Transformer2DModel"}
if version_of("diffusers") < (0, 42):
    SUPPORTED_HERE = [name for name in SUPPORTED if name not in NEW]
else:
    SUPPORTED_HERE = SUPPORTED


def config_of(name: str) -> dict[str, Any]:
    return {"_class_name": name, "_diffusers_version": "0.42.1", **CONFIGS[name]}


def test_each_supported_class_has_a_case() -> None:
    assert sorted(CONFIGS) == sorted(SUPPORTED)


@pytest.mark.parametrize("name", SUPPORTED)
def test_each_field_has_its_source(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    made = provenance(config)
    assert made.name == f"_class_name {name!r}"
    assert all(row.source for row in made.rows)
    assert isinstance(made.spec, RopeSpec)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert RopeSpec.from_config(tmp_path) == made.spec


@pytest.mark.parametrize("name", SUPPORTED_HERE)
def test_a_file_with_every_argument_of_its_class_is_read(name: str) -> None:
    arguments = inspect.signature(getattr(diffusers, name)).parameters.values()
    config = {each.name: each.default for each in arguments}
    assert RopeSpec.from_config({**config, **config_of(name)}) == RopeSpec.from_config(
        config_of(name)
    )


# --- the published code ---------------------------------------------------------------------------


def module_of(name: str) -> Any:
    file = TRANSFORMERS[name].source.split(": ")[0]
    folder = "diffusers.models" if file == "embeddings" else "diffusers.models.transformers"
    return importlib.import_module(f"{folder}.{file}")


def grid(count: int) -> torch.Tensor:
    """Return the coordinates of the tokens of a video, or of an image: (tokens, axes)."""
    sizes = (FRAMES, ROWS, COLUMNS) if count == 3 else (FRAMES * ROWS, COLUMNS)
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes], -1)


def by_ids(count: int, *, batched: bool = False, dtype: torch.dtype = torch.int64) -> Any:
    """Tables of a module that takes ids."""

    def made(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        ids = torch.randint(0, 64, (TOKENS, count), generator=torch.Generator().manual_seed(1))
        theta = config.get("rope_theta", config.get("theta", 10000))
        spelled = (config.get(key) for key in ("axes_dims_rope", "axes_dims", "axes_dim_rope"))
        widths = next(filter(None, spelled), None)
        options: dict[str, Any] = {"theta": theta}
        names = inspect.signature(make).parameters
        default = {"PRXEmbedND": [32, 32]}.get(make.__name__, [16, 56, 56])
        options["axes_dims" if "axes_dims" in names else "axes_dim"] = widths or default
        if "axes_lens" in names:
            options["axes_lens"] = config["axes_lens"]
        if "dim" in names:
            options["dim"] = 64
        if make.__name__ == "Lumina2RotaryPosEmbed":
            return make(**options)._get_freqs_cis(ids[None]), ids
        given = (ids[None] if batched else ids).to(dtype)
        return make(**options)(given), ids

    return made


def by_latents(count: int = 3, **fixed: Any) -> Any:
    """Tables of a module that takes latents, for their grid."""

    def made(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        ids = grid(count)
        patch = config.get("patch_size", 1)
        sizes = (ids.max(0).values + 1).tolist()
        scale = patch if isinstance(patch, list) else [1, patch, patch][-count:]
        latents = torch.zeros(1, 1, *(size * each for size, each in zip(sizes, scale, strict=True)))
        values = {
            **dict.fromkeys(
                ("attention_head_dim", "dim", "hidden_size"), config.get("attention_head_dim")
            ),
            **dict.fromkeys(("rope_dim", "rope_axes_dim"), config.get("rope_axes_dim")),
            "patch_size": patch,
            "patch_size_t": 1,
            "max_seq_len": 64,
            "rope_scale": config.get("rope_scale"),
            "theta": config.get("rope_theta", 10000.0),
            **fixed,
        }
        names = inspect.signature(make).parameters
        tables = make(**{key: value for key, value in values.items() if key in names})(latents)
        return tables, ids

    return made


def cogview(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    # It stretches the coordinates of the grid over the lengths of its tables.
    tables, ids = by_latents(2)(module, make, config)
    return tables, ids * torch.tensor(config["rope_axes_dim"]) // (ids.max(0).values + 1)


def easy(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    made = make(1, config["attention_head_dim"])
    (top, left), (bottom, right) = made.get_resize_crop_region_for_grid((ROWS, COLUMNS), 90, 60)
    tables = made(torch.zeros(1, 1, FRAMES, ROWS, COLUMNS))
    ids = grid(3).double()
    for axis, first, end, size in ((1, top, bottom, ROWS), (2, left, right, COLUMNS)):
        ids[:, axis] = torch.linspace(first, end * (size - 1) / size, size)[grid(3)[:, axis]]
    return tables, ids


def joy(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    owner = type("Owner", (), {key: config[key] for key in JOY})()
    tables, _ = module.JoyImageEditTransformer3DModel.get_rotary_pos_embed(
        owner, [FRAMES, ROWS, COLUMNS]
    )
    return tables, grid(3)


def video(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    # Crop coordinates of whole numbers per cell, so that ids are integers.
    tables = make(config["attention_head_dim"], ((0, 0), (ROWS, COLUMNS)), (ROWS, COLUMNS), FRAMES)
    return tables, grid(3)


def columns_first(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    height = FRAMES * ROWS
    tables = make(config["attention_head_dim"], ((0, 0), (height, COLUMNS)), (height, COLUMNS))
    return tables, grid(2).flip(-1)


def qwen(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    made = make(theta=10000, axes_dim=config["axes_dims_rope"], scale_rope=False)
    tables = made([(FRAMES, ROWS, COLUMNS)], device=torch.device("cpu"), max_txt_seq_len=3)[0]
    return tables, grid(3)


def qwen21(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    made = make(theta=10000, axes_dim=config["axes_dims_rope"])
    tables = made([(1, 3, 4)], torch.arange(TOKENS) // 12 == 0, torch.device("cpu"))
    frame = torch.cat((torch.zeros(12), 4 + torch.arange(TOKENS - 12)))
    rows, columns = frame.clone(), frame.clone()
    rows[:12] = torch.arange(-2, 1).repeat_interleave(4)
    columns[:12] = torch.arange(-2, 2).repeat(3)
    return tables, torch.stack((frame, rows, columns), -1).long()


def line(*arguments: Any, module_first: bool = False, **options: Any) -> Any:
    """Tables of consecutive positions."""

    def made(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        given = [config.get(one, one) if isinstance(one, str) else one for one in arguments]
        tables = (
            make(*given)(TOKENS, torch.device("cpu")) if module_first else make(*given, **options)
        )
        return tables, torch.arange(TOKENS)[:, None]

    return made


def omnigen(module: Any, make: Any, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    made = make(96, 131072, 4096, 10000, config["rope_scaling"])
    return made(torch.zeros(1), torch.arange(TOKENS)[None]), torch.arange(TOKENS)[:, None]


CPU = torch.device("cpu")
# Class -> the tables of its code, and the coordinates they are for.
GRIDS = "HunyuanVideo15 HunyuanVideo MotifVideo SanaVideo SkyReelsV2 WanAnimate Wan WanVACE".split()
TABLES: dict[str, Callable[[Any, Any, dict[str, Any]], tuple[Any, torch.Tensor]]] = {
    **{f"{name}Transformer3DModel": by_latents() for name in GRIDS},
    "AceStepTransformer1DModel": line(TOKENS, "head_dim", "rope_theta", CPU, torch.float32),
    "CogVideoXTransformer3DModel": video,
    "CogView4Transformer2DModel": cogview,
    "ConsisIDTransformer3DModel": video,
    "CosmosTransformer3DModel": by_latents(patch_size=(1, 1, 1)),
    "EasyAnimateTransformer3DModel": easy,
    "Flux2Transformer2DModel": by_ids(4),
    "Flux3Transformer2DModel": by_ids(4),
    "GlmImageTransformer2DModel": by_latents(2),
    "HiDreamImageTransformer2DModel": by_ids(2, batched=True, dtype=torch.float64),
    "HunyuanDiT2DModel": columns_first,
    "HunyuanImageTransformer2DModel": by_latents(2),
    "JoyImageEditTransformer3DModel": joy,
    "MiniMaxMusic3Transformer1DModel": line("rotary_dim", module_first=True),
    "NucleusMoEImageTransformer2DModel": qwen,
    "OmniGenTransformer2DModel": omnigen,
    "PRXTransformer2DModel": by_ids(2, batched=True, dtype=torch.float64),
    "QwenImage21Transformer2DModel": qwen21,
    "QwenImageTransformer2DModel": qwen,
    "StableAudioDiTModel": line(32, TOKENS, use_real=True, repeat_interleave_real=False),
}

# Class -> the code that applies the tables, if not embeddings: apply_rotary_emb as its file calls it.
# "file: function" of the functions nested in a processor, and of those of a module.
APPLIES = {
    "BriaFibo2Transformer2DModel": "transformer_bria_fibo2: apply_rotary_emb",
    "HiDreamImageTransformer2DModel": "transformer_hidream_image: apply_rope",
    "JoyImageEditTransformer3DModel": "transformer_joyimage: _apply_rotary_emb",
    "MiniMaxMusic3Transformer1DModel": "transformer_minimax_music3: _apply_partial_rotary_emb",
    "NucleusMoEImageTransformer2DModel": "transformer_nucleusmoe_image: _apply_rotary_emb_nucleus",
    "PRXTransformer2DModel": "transformer_prx: apply_rope",
    "QwenImage21Transformer2DModel": "transformer_qwenimage21: apply_rotary_emb_qwen",
    "QwenImageTransformer2DModel": "transformer_qwenimage: apply_rotary_emb_qwen",
    "SanaVideoTransformer3DModel": "transformer_sana_video: apply_rotary_emb",
    "SkyReelsV2Transformer3DModel": "transformer_skyreels_v2: apply_rotary_emb",
    "WanAnimateTransformer3DModel": "transformer_wan_animate: apply_rotary_emb",
    "WanTransformer3DModel": "transformer_wan: apply_rotary_emb",
    "WanVACETransformer3DModel": "transformer_wan: apply_rotary_emb",
    "ZImageTransformer2DModel": "transformer_z_image: apply_rotary_emb",
}
# Classes whose processors are in attention_processor.py.
PROCESSORS = {
    "CogVideoXTransformer3DModel": "CogVideoXAttnProcessor2_0",
    "ConsisIDTransformer3DModel": "CogVideoXAttnProcessor2_0",
    "HunyuanDiT2DModel": "HunyuanAttnProcessor2_0",
    "StableAudioDiTModel": "StableAudioAttnProcessor2_0",
}


def keywords_of(name: str) -> dict[str, Any]:
    """Return the constant arguments with which a file calls embeddings.apply_rotary_emb."""
    code = module_of(name.replace("ChromaT", "FluxT"))  # Chroma uses the attention of Flux
    if name in PROCESSORS:
        processors = importlib.import_module("diffusers.models.attention_processor")
        code = getattr(processors, PROCESSORS[name])
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    calls = [
        {each.arg: ast.literal_eval(each.value) for each in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "apply_rotary_emb"
    ]
    assert calls, name
    assert all(call == calls[0] for call in calls), (name, calls)
    return calls[0]


def function_of(file: str, name: str) -> Callable[..., Any]:
    """Return a function of a module of diffusers, or one nested in a processor."""
    module = importlib.import_module(f"diffusers.models.transformers.{file}")
    if hasattr(module, name):
        return getattr(module, name)  # type: ignore[no-any-return]
    every = ast.walk(ast.parse(inspect.getsource(module)))
    node = next(one for one in every if isinstance(one, ast.FunctionDef) and one.name == name)
    namespace = dict(vars(module))
    exec(compile(ast.Module([node], []), file, "exec"), namespace)
    return namespace[name]  # type: ignore[no-any-return]


def apply(name: str, x: torch.Tensor, tables: Any) -> torch.Tensor:
    """Rotate (1, tokens, heads, dim) with the published code."""
    code = APPLIES.get(name)
    if code is None:
        embeddings = importlib.import_module("diffusers.models.embeddings")
        options = keywords_of(name)
        if name == "Lumina2Transformer2DModel":
            return embeddings.apply_rotary_emb(x, tables, **options)  # type: ignore[no-any-return]
        still = x[..., tables[0].shape[-1] :]
        x = x[..., : tables[0].shape[-1]]
        order = (0, 2, 1, 3) if options.get("sequence_dim", 2) == 2 else (0, 1, 2, 3)
        y = embeddings.apply_rotary_emb(x.permute(order), tables, **options).permute(order)
        return torch.cat((y, still), -1)
    function = function_of(*code.split(": "))
    if name == "HiDreamImageTransformer2DModel":
        first, second = x.chunk(2, -1)  # as its processor does, for tables of half the width
        return torch.cat((function(first, first, tables)[0], second), -1)
    if name == "JoyImageEditTransformer3DModel":
        return function(x, x, tables)[0]  # type: ignore[no-any-return]
    if name == "PRXTransformer2DModel":
        return function(x.transpose(1, 2), tables).transpose(1, 2)  # type: ignore[no-any-return]
    if "qwen" in code or "nucleus" in code:
        return function(x, tables, use_real=False)  # type: ignore[no-any-return]
    if name == "MiniMaxMusic3Transformer1DModel" or "z_image" in code or "fibo2" in code:
        return function(x, tables if isinstance(tables, tuple) else tables[None])  # type: ignore[no-any-return]
    return function(x, *tables)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # Chroma's own import
@pytest.mark.parametrize("name", SUPPORTED_HERE)
def test_the_published_code_rotates_as_the_spec(name: str) -> None:
    config = config_of(name)
    spec = RopeSpec.from_config(config)
    assert isinstance(spec, RopeSpec)
    module = module_of(name)
    source = TRANSFORMERS[name].source.split(": ")[1]
    make = getattr(module, source.split(".")[0])
    tables, ids = TABLES.get(name, by_ids(3))(module, make, config)
    x = torch.randn(1, TOKENS, HEADS, spec.head_dim, generator=torch.Generator().manual_seed(2))
    where = positions.multi_axis(ids.T.contiguous()) if spec.axes is not None else ids[:, 0]
    got = rotate(x.transpose(1, 2), spec, where).transpose(1, 2)
    assert_near(got, apply(name, x, tables).contiguous(), "published image angles")


def test_a_model_reads_as_its_file() -> None:
    sizes = {"attention_head_dim": 16, "num_attention_heads": 1, "axes_dims_rope": [4, 6, 6]}
    sizes |= {"num_layers": 0, "num_single_layers": 0}
    sizes |= {"joint_attention_dim": 8, "pooled_projection_dim": 8}
    model = diffusers.FluxTransformer2DModel(**sizes)
    assert RopeSpec.from_config(model) == RopeSpec(
        16, interleaved=True, axes=Axes.blocks((2, 3, 3))
    )


# --- refused --------------------------------------------------------------------------------------


def refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^\[\w+\] .*{re.escape(text)}"):
        RopeSpec.from_config(config)


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_without_a_spec_is_refused_by_name(name: str) -> None:
    assert hasattr(diffusers, name)
    refused({"_class_name": name, **DIMS}, f"_class_name {name!r} has no spec: ")


FLUX, HIDREAM = "FluxTransformer2DModel", "HiDreamImageTransformer2DModel"
COSMOS = "CosmosTransformer3DModel"
ROPE, NUMBERS = "axes_dims_rope", "rope_scale must be a list of numbers"


@pytest.mark.parametrize(
    ("name", "changed", "text"),
    [
        ("UNet2DConditionModel", {}, "'UNet2DConditionModel' has no spec: the table"),
        (None, {}, "_class_name None has no spec: the table"),
        ("Flux2Transformer2DModel", {"rope_theta": None}, "must come with rope_theta but has"),
        ("ChromaTransformer2DModel", {ROPE: None}, "must come with axes_dims_rope"),
        (FLUX, {"rope_theta": 500}, "must be known but got rope_theta"),
        (FLUX, {"axes_dim_rope": [2]}, "must be known but got axes_dim_rope"),
        (FLUX, {"rope_scaling": {}}, "must be known but got rope_scaling"),
        (FLUX, {ROPE: 8}, "axes_dims_rope must be a list but"),
        (FLUX, {ROPE: []}, "the sum of axes_dims_rope must be at le"),
        (HIDREAM, {ROPE: [2 * 10**9]}, "the sum of axes_dims_rope must be at most 65536"),
        (HIDREAM, {ROPE: [128, 128]}, "rotary_dim"),
        (FLUX, {ROPE: [3]}, "axes_dims_rope must hold even numbers"),
        (FLUX, {ROPE: ["8"]}, "axes_dims_rope must be an int but"),
        (FLUX, {ROPE: [16, 56]}, "must sum to 64 pairs, half"),
        ("WanTransformer3DModel", {"attention_head_dim": "128"}, "must be an int but got '128'"),
        (
            "CogVideoXTransformer3DModel",
            {"use_rotary_positional_embeddings": False},
            "has no RoPE: use_rotary_positional_embeddings is False",
        ),
        (COSMOS, {"rope_scale": [1.0]}, NUMBERS),
        (COSMOS, {"rope_scale": [1, 0, 1]}, NUMBERS),
        (COSMOS, {"attention_head_dim": 6}, "at least two pairs but got [1, 1"),
        (COSMOS, {"attention_head_dim": 10**9}, "must be at most 65536 but got"),
    ],
)
def test_a_gap_or_a_wrong_key_is_refused(
    name: str | None, changed: dict[str, Any], text: str
) -> None:
    given = CONFIGS.get(str(name), DIMS)
    refused({"_class_name": name, **given, **changed}, text)


def test_a_section_is_refused() -> None:
    with pytest.raises(ValueError, match="section must be None for _class_name 'WanTransformer3D"):
        RopeSpec.from_config(config_of("WanTransformer3DModel"), section="text_config")
