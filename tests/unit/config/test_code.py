"""Facts of the code of transformers, in families.json, are those of the installed version.

Rotary modules that are built from the configurations of models have the frequencies of the specs. tests/coverage/test_rows.py
has the pairing of its functions, and the layers, channels and angles of small models of all types; test_classes.py has the
facts that configuration classes give.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from tests.support.model_configs import MODELS, Model
from tests.support.reading import read, refused
from tightrope import RopeSpec
from tightrope.config import LayerSpecs, provenance
from tightrope.config.families import FAMILIES
from tightrope.frequencies import YaRN

PACKAGE = Path(transformers.__file__).parent / "models"
FILES = {path.parent.name: path.read_text("utf-8") for path in PACKAGE.glob("*/modeling_*.py")}
FOLDERS = {name: family.source.partition(": ")[0] for name, family in FAMILIES.items()}


def by_name(model: Model) -> str:
    return model.name


# --- configuration objects ------------------------------------------------------------------------

# DBRX's config class keeps the base in attn_config and adds rope_parameters with a default base.
CONTRADICTS_ITSELF = "databricks/dbrx-base"
OBJECTS = [
    model
    for model in MODELS
    if model.form in ("v4", "v5", "hub")
    and model.config.get("model_type") in transformers.CONFIG_MAPPING
]


@functools.cache
def config_of(name: str) -> Any:
    config = dict(next(model.config for model in OBJECTS if model.name == name))
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config)


def specs_of(specs: Any) -> set[RopeSpec | None]:
    """Return the specs as a set, without the layer types, whose names differ in config objects."""
    return set(specs.values()) if not isinstance(specs, RopeSpec) else {specs}


@pytest.mark.parametrize("model", OBJECTS, ids=by_name)
def test_an_object_of_transformers_reads_as_its_file(model: Model) -> None:
    config, options = config_of(model.name), dict(model.options)
    if model.origin == CONTRADICTS_ITSELF:
        refused(config, "base must have one value but got rope_parameters.rope_theta = 10000.0 and")
        return
    if hasattr(config, "text_config") and hasattr(config, "vision_config"):
        options.setdefault("section", "text_config")
    for form in (config, config.to_dict()):
        assert specs_of(read(form, **options)) == specs_of(model.wanted)


# --- frequencies ----------------------------------------------------------------------------------


def modeling(config: Any) -> tuple[ModuleType, str]:
    """The modeling file of a configuration and the stem of its classes, or those of another family's model."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    if find_spec(name) is not None:
        return importlib.import_module(name), type(config).__name__.removesuffix("Config")
    model: Any = transformers.MODEL_MAPPING[type(config)]
    return importlib.import_module(model.__module__), model.__name__.removesuffix("Model")


def rotary_module(config: Any) -> Any:
    """Build the rotary module of a configuration; None if its modeling file has none."""
    module, stem = modeling(config)
    for name in (stem, stem.removesuffix("Text")):
        kind = getattr(module, f"{name}RotaryEmbedding", None)
        if kind is not None:
            return kind(config)
    return None


def exact(spec: RopeSpec) -> torch.Tensor:
    return torch.tensor([float(omega) for omega in spec.frequencies().exact], dtype=torch.float64)


TEXT = [
    model
    for model in OBJECTS
    if not model.options
    and not {"vision_config", "text_config"} & {*model.config}
    and model.config["model_type"] not in ("gptj", "codegen", "roformer", "dinov3_vit", "dbrx")
]


@pytest.mark.parametrize("model", TEXT, ids=by_name)
def test_the_frequencies_are_those_of_the_published_module(model: Model) -> None:
    config, kind = config_of(model.name), model.config["model_type"]
    module, specs = rotary_module(config), read(config)
    for layer, spec in (dict(specs) if isinstance(specs, LayerSpecs) else {"": specs}).items():
        if spec is None:
            continue
        prefix = f"{layer}_" if hasattr(module, f"{layer}_inv_freq") else ""
        if not hasattr(module, f"{prefix}inv_freq"):
            prefix = "full_attention_"  # all layer types have one spec: take this type
        inv_freq = getattr(module, f"{prefix}inv_freq").double()
        if kind == "ernie4_5_vl_moe_text":
            # ERNIE's module stores frequencies of rows, then of columns; calls interleave them.
            inv_freq = torch.cat((inv_freq[:44].reshape(2, 22).T.reshape(-1), inv_freq[44:]))
        torch.testing.assert_close(inv_freq, exact(spec), rtol=1e-5, atol=1e-12)
        if kind != "phimoe":  # chooses its scaling in each call
            scaling = getattr(module, f"{prefix}attention_scaling")
            assert scaling == pytest.approx(spec.frequencies().attention_scaling, rel=1e-6)


# --- a part of the channels -----------------------------------------------------------------------

# Heads of 128 channels: the sections of each family fit them, or half of them where a part rotates.
SIZES = {
    **dict.fromkeys(("hidden_size", "max_position_embeddings"), 256),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2),
    "vocab_size": 9,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "head_dim": 128,
}
OWN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "esm": {"position_embedding_type": "rotary"},
    "gemma4_text": {"global_head_dim": 128},
    "embedding_gemma2_text": {"global_head_dim": 128},
    "gemma4_unified_text": {"global_head_dim": 128},
}
LAYERED = {name for name, family in FAMILIES.items() if family.nested and "main" not in family.rope}
# All but latent attention and MiniMax's images, whose slice no key for a part gives, and those that need rotary_dim or a
# section.
NOT_BUILT = ("qwen2_vl", "qwen2_5_vl", "glm4v", "gptj", "codegen", "diffusion_gemma_text")
BUILT = [
    name
    for name, family in FAMILIES.items()
    if family.refused is None
    and FOLDERS[name]
    and "repository" not in family.source
    and name in transformers.CONFIG_MAPPING
    and family.start == "first"
    and family.part != "sixths"
    and name not in NOT_BUILT
]


def tables_of(
    name: str, sizes: dict[str, Any], section: dict[str, Any]
) -> tuple[list[Any], set[int]]:
    """Return a configuration as an object and as its keys, and the numbers of channels of its module's tables."""
    try:
        config = transformers.AutoConfig.for_model(name, **sizes, rope_parameters=section)
        module = rotary_module(config)
    except (StrictDataclassError, ValueError, AttributeError, KeyError):
        return (
            [],
            set(),
        )  # the family does not have this kind of scaling, or its sizes have other names
    buffers = dict(module.named_buffers()) if module is not None else {}
    channels = {2 * x.numel() for key, x in buffers.items() if "inv_freq" in key}
    return [config, config.to_dict()], channels


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_a_part_rotates_only_where_the_code_rotates_a_part(kind: str) -> None:
    compared = 0
    for name in BUILT:
        family, sizes = FAMILIES[name], SIZES | OWN.get(name, {})
        if name == "falcon":  # its class computes it
            del sizes["head_dim"]
        rule: dict[str, Any] = {"rope_type": kind}
        if kind != "default":
            rule |= {"factor": 2.0, "original_max_position_embeddings": 64}
        flat = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
        section: dict[str, Any] = flat | rule
        if name in LAYERED:
            section = {"full_attention": section, "sliding_attention": section}
        objects, own = tables_of(name, sizes, section)
        files = ({"rope_parameters": section}, flat | {"rope_scaling": rule})
        found = set()
        for form in [*objects, *({"model_type": name, **sizes, **one} for one in files)]:
            try:
                found |= {spec.rotary_dim for spec in specs_of(read(form)) if spec is not None}
            except ValueError:
                continue
        compared += bool(own)
        if family.part != "none":
            assert found | own <= {64}, name
        else:
            # With scaling, the code makes tables of a part that its rotary function cannot apply.
            assert not found, name
            assert kind != "default" or family.axes is not None or own <= {128}, name
    assert compared > 100


# --- facts that only code states --------------------------------------------------------------------


SECTIONED = [name for name in FOLDERS if FAMILIES[name].sections and FOLDERS[name] in FILES]


@pytest.mark.parametrize("name", SECTIONED)
def test_sections_that_no_key_states_are_those_of_the_code(name: str) -> None:
    found = re.findall(r'\.get\("mrope_section", \[([\d, ]+)\]\)', FILES[FOLDERS[name]])
    assert {tuple(map(int, sizes.split(","))) for sizes in found} == {FAMILIES[name].sections}


# The call in an attention whose softmax scale depends on YaRN's mscale_all_dim.
APPLIES = re.compile(r"self\.scaling = (\w+)\(config\.rope_parameters, ")
APPLYING = {folder: found[1] for folder, code in FILES.items() if (found := APPLIES.search(code))}


def test_the_families_whose_attention_scales_its_softmax_by_mscale_all_dim() -> None:
    """All model files of transformers are searched, also those of families that the table lacks."""
    stated = {FOLDERS[name] for name, family in FAMILIES.items() if family.scales_softmax}
    assert len(APPLYING) == 14
    assert stated & FILES.keys() == APPLYING.keys()
    # Other spellings of the same would be missed above; PhiMoE's mscales are LongRoPE's.
    assert {folder for folder, text in FILES.items() if "mscale" in text} == {*APPLYING, "phimoe"}


@pytest.mark.parametrize("folder", APPLYING)
def test_the_factor_on_the_softmax_scale_is_that_of_the_familys_own_code(folder: str) -> None:
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    section = {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.75}
    wanted = getattr(module, APPLYING[folder])(section, 1.0)
    assert wanted > 1.4
    rule = YaRN(16.0, 16384, mscale=1.0, mscale_all_dim=0.75)
    assert rule.softmax_scaling == pytest.approx(wanted, rel=1e-14)


def norms_after(code: str) -> set[str]:
    """Return the classes of the norms that an attention of a model file applies to its queries after their rotation."""
    found = set()
    for block in re.split(r"\n(?=class )", code):
        rotation = re.search(r"= \w*apply_rotary\w*\(", block)
        for name in re.findall(r"\bquery\w* = self\.(\w*norm\w*)\(query", block):
            used = block.index(f"self.{name}(query")
            if rotation and used > rotation.start():
                found |= {*re.findall(rf"self\.{name} = (\w+)\(", block)}
    return found


def test_norms_after_the_rotation_are_those_of_the_code() -> None:
    """All model files of transformers are searched."""
    stated: dict[str, set[str]] = {}
    for name, family in FAMILIES.items():
        if family.norm:
            stated.setdefault(FOLDERS[name], set()).add(family.norm)
    every = {folder: norms for folder, code in FILES.items() if (norms := norms_after(code))}
    # Two have no spec, and only attention to images, which does not rotate, has that of Idefics.
    others = {"nanochat", "hunyuan_vl", "idefics"}
    assert FAMILIES["nanochat"].refused
    assert FAMILIES["hunyuan_vl_text"].refused
    assert every.keys() - stated.keys() == others
    assert stated == {folder: norms for folder, norms in every.items() if folder not in others}


def test_a_key_switches_the_norm_after_the_rotation_off() -> None:
    config = {"model_type": "llama4_text", "head_dim": 128}
    assert provenance(config).norm == "Llama4TextL2Norm"
    assert provenance(config | {"use_qk_norm": False}).norm is None
    assert provenance(config | {"model_type": "llama"}).norm is None


def test_every_tensor_of_a_rotary_module_that_weights_fill_is_known() -> None:
    found = set()
    for folder, code in FILES.items():
        for block in re.split(r"\n(?=\S)", code):
            if not re.match(r"class \w*Rotary", block):
                continue
            for line in ast.walk(ast.parse(block)):
                text = ast.unparse(line) if isinstance(line, ast.Assign) else ""
                made = "nn.Buffer(" in text or "nn.Parameter(" in text
                if made and "persistent=False" not in text:
                    found.add((folder, text.partition(" = ")[0].removeprefix("self.")))
    known = {(FOLDERS[name], family.learned) for name, family in FAMILIES.items()}
    known = {
        (folder, learned)
        for folder, learned in known
        if learned not in (None, "embed_positions.weight")
    }
    # No configuration of these is read: CLVP has no key for its base, the proteins of Evolla have no model type.
    assert found - {("clvp", "inv_freq"), ("evolla", "inv_freq")} == known
