"""Configurations of diffusers are read as diffusers itself rotates.

The published code rotates random heads, with the tables of its own module; `rotate` with the spec of the same configuration
must rotate them alike. rows/diffusers.json has a configuration of each class, and the code that applies its tables:
"file: function", or the processor that calls `embeddings.apply_rotary_emb`, if it is not in the file of the class.
rows/diffusers.jsonl has what is refused.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import version_of
from tests.support.reading import read, refused
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
CPU = torch.device("cpu")
CLASSES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "rows" / "diffusers.json").read_text("utf-8")
)
# Classes that diffusers has had since 0.42, which needs Python 3.11.
NEW = {"BriaFibo2Transformer2DModel", "Flux3Transformer2DModel"}
HERE = [name for name in CLASSES if name not in NEW or version_of("diffusers") >= (0, 42)]
REFUSED = [name for name, facts in TRANSFORMERS.items() if facts.refused is not None]


def config_of(name: str) -> dict[str, Any]:
    return {"_class_name": name, "_diffusers_version": "0.42.1", **CLASSES[name]["config"]}


def test_each_supported_class_has_a_case() -> None:
    assert {*CLASSES} == TRANSFORMERS.keys() - {*REFUSED}


@pytest.mark.parametrize("name", HERE)
def test_a_file_with_every_argument_of_its_class_is_read(name: str) -> None:
    made = provenance(config_of(name))
    assert made.name == f"_class_name {name!r}"
    assert all(row.source for row in made.rows)
    arguments = inspect.signature(getattr(diffusers, name)).parameters.values()
    assert read({each.name: each.default for each in arguments} | config_of(name)) == made.spec


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_without_a_spec_is_refused_by_name(name: str) -> None:
    assert hasattr(diffusers, name)
    refused({"_class_name": name, "attention_head_dim": 8}, f"_class_name {name!r} has no spec: ")


def test_a_model_reads_as_its_file() -> None:
    sizes = {"attention_head_dim": 16, "num_attention_heads": 1, "axes_dims_rope": [4, 6, 6]}
    sizes |= {"num_layers": 0, "num_single_layers": 0}
    sizes |= {"joint_attention_dim": 8, "pooled_projection_dim": 8}
    model = diffusers.FluxTransformer2DModel(**sizes)
    assert read(model) == RopeSpec(16, interleaved=True, axes=Axes.blocks((2, 3, 3)))


# --- the tables of the published code ---------------------------------------------------------------


def grid(count: int) -> torch.Tensor:
    """Return the coordinates of the tokens of a video, or of an image: (tokens, axes)."""
    sizes = (FRAMES, ROWS, COLUMNS) if count == 3 else (FRAMES * ROWS, COLUMNS)
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes], -1)


Made = tuple[Any, torch.Tensor]


def by_ids(make: Any, config: dict[str, Any], count: int = 3, kind: Any = torch.int64) -> Made:
    """Tables of a module that takes ids."""
    ids = torch.randint(0, 64, (TOKENS, count), generator=torch.Generator().manual_seed(1))
    names, of_prx = inspect.signature(make).parameters, make.__name__ == "PRXEmbedND"
    spelled = (config.get(key) for key in ("axes_dims_rope", "axes_dims", "axes_dim_rope"))
    widths = next(filter(None, spelled), [32, 32] if of_prx else [16, 56, 56])
    given = {
        "theta": config.get("rope_theta", config.get("theta", 10000)),
        "axes_dims": widths,
        "axes_dim": widths,
        "axes_lens": config.get("axes_lens"),
        "dim": 64,
    }
    # Chroma's class takes any arguments, for those of Flux.
    wanted = {*names, "theta", *(() if "axes_dims" in names else ("axes_dim",))}
    module = make(**{key: given[key] for key in given if key in wanted})
    if make.__name__ == "Lumina2RotaryPosEmbed":
        return module._get_freqs_cis(ids[None]), ids
    return module((ids[None] if kind is torch.float64 else ids).to(kind)), ids


def by_latents(make: Any, config: dict[str, Any], count: int = 3, **fixed: Any) -> Made:
    """Tables of a module that takes latents, for their grid."""
    ids, patch, width = grid(count), config.get("patch_size", 1), config.get("attention_head_dim")
    scale = patch if isinstance(patch, list) else [1, patch, patch][-count:]
    sizes = (ids.max(0).values + 1) * torch.tensor(scale)
    values = {
        **dict.fromkeys(("attention_head_dim", "dim", "hidden_size"), width),
        **dict.fromkeys(("rope_dim", "rope_axes_dim"), config.get("rope_axes_dim")),
        "patch_size": patch,
        "patch_size_t": 1,
        "max_seq_len": 64,
        "rope_scale": config.get("rope_scale"),
        "theta": config.get("rope_theta", 10000.0),
        **fixed,
    }
    names = inspect.signature(make).parameters
    module = make(**{key: value for key, value in values.items() if key in names})
    return module(torch.zeros(1, 1, *sizes.tolist())), ids


def cogview(make: Any, config: dict[str, Any]) -> Made:
    # It stretches the coordinates of the grid over the lengths of its tables.
    tables, ids = by_latents(make, config, 2)
    return tables, ids * torch.tensor(config["rope_axes_dim"]) // (ids.max(0).values + 1)


def easy(make: Any, config: dict[str, Any]) -> Made:
    made = make(1, config["attention_head_dim"])
    (top, left), (bottom, right) = made.get_resize_crop_region_for_grid((ROWS, COLUMNS), 90, 60)
    ids = grid(3).double()
    for axis, first, end, size in ((1, top, bottom, ROWS), (2, left, right, COLUMNS)):
        ids[:, axis] = torch.linspace(first, end * (size - 1) / size, size)[grid(3)[:, axis]]
    return made(torch.zeros(1, 1, FRAMES, ROWS, COLUMNS)), ids


def joy(make: Any, config: dict[str, Any]) -> Made:
    return make.get_rotary_pos_embed(type("Owner", (), config)(), [FRAMES, ROWS, COLUMNS])[0], grid(
        3
    )


def cropped(make: Any, config: dict[str, Any], count: int = 3) -> Made:
    # Crop coordinates of whole numbers per cell, so that ids are integers.
    rows = ROWS if count == 3 else FRAMES * ROWS
    more = (FRAMES,) if count == 3 else ()
    tables = make(config["attention_head_dim"], ((0, 0), (rows, COLUMNS)), (rows, COLUMNS), *more)
    return tables, grid(3) if count == 3 else grid(2).flip(-1)  # columns are first


def qwen(make: Any, config: dict[str, Any]) -> Made:
    made = make(theta=10000, axes_dim=config["axes_dims_rope"], scale_rope=False)
    return made([(FRAMES, ROWS, COLUMNS)], device=CPU, max_txt_seq_len=3)[0], grid(3)


def qwen21(make: Any, config: dict[str, Any]) -> Made:
    made = make(theta=10000, axes_dim=config["axes_dims_rope"])
    tables = made([(1, 3, 4)], torch.arange(TOKENS) // 12 == 0, CPU)
    frame = torch.cat((torch.zeros(12), 4 + torch.arange(TOKENS - 12)))
    rows, columns = frame.clone(), frame.clone()
    rows[:12] = torch.arange(-2, 1).repeat_interleave(4)
    columns[:12] = torch.arange(-2, 2).repeat(3)
    return tables, torch.stack((frame, rows, columns), -1).long()


def line(tables: Callable[[Any, dict[str, Any]], Any]) -> Callable[..., Made]:
    """Tables of consecutive positions."""
    return lambda make, config: (tables(make, config), torch.arange(TOKENS)[:, None])


def omnigen(make: Any, config: dict[str, Any]) -> Any:
    made = make(96, 131072, 4096, 10000, config["rope_scaling"])
    return made(torch.zeros(1), torch.arange(TOKENS)[None])


def of_floats(make: Any, config: dict[str, Any]) -> Made:
    return by_ids(make, config, 2, torch.float64)


def of_images(make: Any, config: dict[str, Any]) -> Made:
    return by_latents(make, config, 2)


# Class -> the tables of its code, and the coordinates they are for; by_ids for the others.
VIDEOS = (
    "HunyuanVideo15 HunyuanVideo MotifVideo SanaVideo SkyReelsV2 WanAnimate Wan WanVACE".split()
)
TABLES: dict[str, Any] = {
    **{f"{name}Transformer3DModel": by_latents for name in VIDEOS},
    "AceStepTransformer1DModel": line(
        lambda make, config: make(
            TOKENS, config["head_dim"], config["rope_theta"], CPU, torch.float32
        )
    ),
    "CogVideoXTransformer3DModel": cropped,
    "CogView4Transformer2DModel": cogview,
    "ConsisIDTransformer3DModel": cropped,
    "CosmosTransformer3DModel": lambda make, config: by_latents(make, config, patch_size=(1, 1, 1)),
    "EasyAnimateTransformer3DModel": easy,
    **{f"Flux{n}Transformer2DModel": lambda make, config: by_ids(make, config, 4) for n in (2, 3)},
    "GlmImageTransformer2DModel": of_images,
    "HiDreamImageTransformer2DModel": of_floats,
    "HunyuanDiT2DModel": lambda make, config: cropped(make, config, 2),
    "HunyuanImageTransformer2DModel": of_images,
    "JoyImageEditTransformer3DModel": joy,
    "MiniMaxMusic3Transformer1DModel": line(
        lambda make, config: make(config["rotary_dim"])(TOKENS, CPU)
    ),
    "NucleusMoEImageTransformer2DModel": qwen,
    "OmniGenTransformer2DModel": line(omnigen),
    "PRXTransformer2DModel": of_floats,
    "QwenImage21Transformer2DModel": qwen21,
    "QwenImageTransformer2DModel": qwen,
    "StableAudioDiTModel": line(
        lambda make, _: make(32, TOKENS, use_real=True, repeat_interleave_real=False)
    ),
}

# --- what applies them --------------------------------------------------------------------------------


def module_of(file: str) -> Any:
    of_transformers = file not in ("embeddings", "attention_processor")
    folder = "diffusers.models.transformers" if of_transformers else "diffusers.models"
    return importlib.import_module(f"{folder}.{file}")


def keywords_of(code: Any) -> dict[Any, Any]:
    """Return the constant arguments with which some code calls embeddings.apply_rotary_emb."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    calls = [
        {each.arg: ast.literal_eval(each.value) for each in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "apply_rotary_emb"
    ]
    assert calls
    assert all(call == calls[0] for call in calls), calls
    return calls[0]


def function_of(file: str, name: str) -> Any:
    """Return a function of a module of diffusers, or one nested in a processor."""
    module = module_of(file)
    if hasattr(module, name):
        return getattr(module, name)
    every = ast.walk(ast.parse(inspect.getsource(module)))
    node = next(one for one in every if isinstance(one, ast.FunctionDef) and one.name == name)
    namespace = dict(vars(module))
    exec(compile(ast.Module([node], []), file, "exec"), namespace)
    return namespace[name]


def apply(name: str, x: torch.Tensor, tables: Any) -> Any:
    """Rotate (1, tokens, heads, dim) with the published code."""
    own = TRANSFORMERS[name].source.partition(": ")[0]
    file, _, code = CLASSES[name].get("applies", own).partition(": ")
    if code and "Processor" not in code:
        return apply_own(function_of(file, code), name, x, tables)
    module = module_of(file)
    options = keywords_of(getattr(module, code) if code else module)
    rotates = module_of("embeddings").apply_rotary_emb
    if name == "Lumina2Transformer2DModel":
        return rotates(x, tables, **options)
    width = tables[0].shape[-1]
    order = (0, 2, 1, 3) if options.get("sequence_dim", 2) == 2 else (0, 1, 2, 3)
    y = rotates(x[..., :width].permute(order), tables, **options).permute(order)
    return torch.cat((y, x[..., width:]), -1)


def apply_own(function: Any, name: str, x: torch.Tensor, tables: Any) -> Any:
    """Rotate with a function of one model, as its processor calls it."""
    if "HiDream" in name:  # its tables have half the width
        first, second = x.chunk(2, -1)
        return torch.cat((function(first, first, tables)[0], second), -1)
    if "Joy" in name:
        return function(x, x, tables)[0]
    if "PRX" in name:
        return function(x.transpose(1, 2), tables).transpose(1, 2)
    if "Qwen" in name or "Nucleus" in name:
        return function(x, tables, use_real=False)
    if name.startswith(("MiniMaxMusic3", "ZImage", "BriaFibo2")):
        return function(x, tables if isinstance(tables, tuple) else tables[None])
    return function(x, *tables)


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # Chroma's own import
@pytest.mark.parametrize("name", HERE)
def test_the_published_code_rotates_as_the_spec(name: str) -> None:
    config = CLASSES[name]["config"]
    spec = read(config_of(name))
    file, source = TRANSFORMERS[name].source.split(": ")
    tables, ids = TABLES.get(name, by_ids)(getattr(module_of(file), source.split(".")[0]), config)
    x = torch.randn(1, TOKENS, HEADS, spec.head_dim, generator=torch.Generator().manual_seed(2))
    where = positions.multi_axis(ids.T.contiguous()) if spec.axes is not None else ids[:, 0]
    got = rotate(x.transpose(1, 2), spec, where).transpose(1, 2)
    assert_near(got, apply(name, x, tables).contiguous(), "published image angles")
