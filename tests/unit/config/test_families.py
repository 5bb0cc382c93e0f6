"""Check the facts of code in families.json and `from_config` against transformers itself.

The configuration objects of transformers give the same specs as dictionaries with the same keys. Its rotary
modules, built from these objects and from those of defaults, have the frequencies of the specs. Named functions
pair channels as the facts say, and sections that only modeling code states equal theirs.
tests/coverage/test_rows.py has the layers that small models rotate, and test_byclass.py the facts that
configuration classes give.
"""

import functools
import importlib
import inspect
import math
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from tests.support.model_configs import MODELS, Model
from tests.support.reading import refused, two
from tightrope import RopeSpec
from tightrope.config import LayerSpecs, sections, source_of
from tightrope.config.families import FAMILIES

PACKAGE = Path(transformers.__file__).parent / "models"

# model_type -> folder and function of transformers. Composites have no source, as their parts rotate.
PUBLISHED = {
    name: tuple(family.source.split(": "))
    for name, family in FAMILIES.items()
    if family.refused is None and family.source and "repository" not in family.source
}


# --- configuration objects ------------------------------------------------------------------------


def known(config: dict[str, Any]) -> bool:
    return config.get("model_type") in transformers.CONFIG_MAPPING


# DBRX's config class keeps the base in attn_config and adds rope_parameters with a default base.
CONTRADICTS_ITSELF = "databricks/dbrx-base"

OBJECTS = [
    model
    for model in MODELS
    if model.form in ("v4", "v5", "hub")
    and known(model.config)
    and model.origin != CONTRADICTS_ITSELF
]


def test_an_object_that_contradicts_itself_is_refused() -> None:
    config = dict(next(model.config for model in MODELS if model.origin == CONTRADICTS_ITSELF))
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    one, other = "rope_parameters.rope_theta = 10000.0", "attn_config.rope_theta = 500000"
    refused(made, two("base", one, other))


@functools.cache
def config_of(name: str) -> Any:
    config = dict(next(model.config for model in OBJECTS if model.name == name))
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config)


@pytest.mark.parametrize("model", OBJECTS, ids=lambda model: model.name)
def test_an_object_of_transformers_reads_as_its_file(model: Model) -> None:
    config = config_of(model.name)
    options = dict(model.options)
    nested = [key for key in ("text_config", "vision_config") if hasattr(config, key)]
    if len(nested) == 2:
        options.setdefault("section", "text_config")
    for form in (config, config.to_dict()):
        got = RopeSpec.from_config(form, **options)
        assert specs_of(got) == specs_of(model.wanted)


def specs_of(specs: Any) -> set[RopeSpec | None]:
    """Return the specs as a set, without the layer types, whose names differ in config objects."""
    return set(specs.values()) if not isinstance(specs, RopeSpec) else {specs}


# --- frequencies ----------------------------------------------------------------------------------


def modeling(config: Any) -> tuple[ModuleType, str]:
    """The modeling file of a configuration and the stem of its classes, or those of another family's model."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    if find_spec(name) is not None:
        return importlib.import_module(name), type(config).__name__.removesuffix("Config")
    model = transformers.MODEL_MAPPING[type(config)]
    return importlib.import_module(model.__module__), model.__name__.removesuffix("Model")


def rotary_module(config: Any) -> torch.nn.Module | None:
    """Build the rotary module of a configuration; None if its modeling file has none."""
    module, stem = modeling(config)
    for name in (stem, stem.removesuffix("Text")):
        kind = getattr(module, f"{name}RotaryEmbedding", None)
        if kind is not None:
            return kind(config)  # type: ignore[no-any-return]
    return None


TEXT = [
    model
    for model in OBJECTS
    if not model.options
    and not {"vision_config", "text_config"} & {*model.config}
    and model.config["model_type"] not in ("gptj", "codegen", "roformer", "dinov3_vit")
]


@pytest.mark.parametrize("model", TEXT, ids=lambda model: model.name)
def test_the_frequencies_are_those_of_the_published_module(model: Model) -> None:
    config = config_of(model.name)
    module = rotary_module(config)
    assert module is not None, type(config)
    specs = RopeSpec.from_config(config)
    named = dict(specs) if isinstance(specs, LayerSpecs) else {"": specs}
    for layer, spec in named.items():
        if spec is None:
            continue
        prefix = f"{layer}_" if hasattr(module, f"{layer}_inv_freq") else ""
        if not hasattr(module, f"{prefix}inv_freq"):
            prefix = "full_attention_"  # all layer types have one spec: take this type
        inv_freq = getattr(module, f"{prefix}inv_freq").double()
        made = spec.frequencies()
        wanted = torch.tensor([float(omega) for omega in made.exact], dtype=torch.float64)
        if model.config["model_type"] == "ernie4_5_vl_moe_text":
            # ERNIE's module stores frequencies of rows, then of columns; calls interleave them.
            inv_freq = torch.cat((inv_freq[:44].reshape(2, 22).T.reshape(-1), inv_freq[44:]))
        torch.testing.assert_close(inv_freq, wanted, rtol=1e-5, atol=1e-12)
        if model.config["model_type"] != "phimoe":  # chooses its scaling in each call
            scaling = getattr(module, f"{prefix}attention_scaling")
            assert scaling == pytest.approx(made.attention_scaling, rel=1e-6)


# --- facts that only the modeling code has -----------------------------------------------------

SECTIONED = [name for name in PUBLISHED if FAMILIES[name].sections is not None]


@pytest.mark.parametrize("name", SECTIONED)
def test_sections_that_no_key_states_are_those_of_the_code(name: str) -> None:
    folder = PUBLISHED[name][0]
    code = (PACKAGE / folder / f"modeling_{folder}.py").read_text(encoding="utf-8")
    found = re.findall(r'\.get\("mrope_section", \[([\d, ]+)\]\)', code)
    assert {tuple(map(int, sizes.split(","))) for sizes in found} == {FAMILIES[name].sections}


def test_the_defaults_of_a_class_with_axes_do_not_give_the_part() -> None:
    """Its default sections fit half the channels, but by default its module rotates them all."""
    with pytest.raises(ValueError, match="64 pairs that rotate"):
        RopeSpec.from_config(transformers.CONFIG_MAPPING["glm4v_text"]())


# --- configurations of defaults --------------------------------------------------------------------

# Their modules have no frequencies, or compute them in each call.
WITHOUT_INV_FREQ = {"codegen", "gptj", "roformer"}


def rotary_modules(config: Any) -> list[torch.nn.Module]:
    """Return the rotary modules of the configuration's modeling file that have frequencies of it."""
    made = []
    try:
        module, _ = modeling(config)
    except (ImportError, KeyError):
        return []
    for name, kind in vars(module).items():
        if (
            inspect.isclass(kind)
            and "RotaryEmbedding" in name
            and kind.__module__ == module.__name__
        ):
            try:
                made.append(kind(config))
            except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError):
                continue  # of another part of the model
    return [one for one in made if any("inv_freq" in name for name, _ in one.named_buffers())]


def has_frequencies(module: torch.nn.Module, layer: str | None, spec: RopeSpec) -> bool:
    """Return True if a module has the frequencies of a spec, for one coordinate or for each of two."""
    wanted = torch.tensor([float(omega) for omega in spec.frequencies().exact], dtype=torch.float64)
    turns = (
        math.tau if "Dinov3" in type(module).__name__ or "DINO" in type(module).__name__ else 1.0
    )
    buffers = {name: x for name, x in module.named_buffers() if name.endswith("inv_freq")}
    own = [
        x for name, x in buffers.items() if layer is not None and name.startswith(f"{layer}_inv")
    ]
    for found in own or buffers.values():
        omega = (found.double().flatten() * turns).sort().values
        if spec.axes is not None and omega.numel() in (wanted.numel() // 2, wanted.numel() // 3):
            omega = omega.repeat_interleave(
                wanted.numel() // omega.numel()
            )  # shared by coordinates
        if omega.shape == wanted.shape and torch.allclose(
            omega, wanted.sort().values, rtol=1e-5, atol=0
        ):
            return True
    return False


def every_default() -> Iterator[tuple[str, Any, str | None, Any]]:
    """Yield name, configuration of defaults, section to choose and the configuration of that section."""
    for name in transformers.CONFIG_MAPPING:
        try:
            config = transformers.CONFIG_MAPPING[name]()
        except (ValueError, StrictDataclassError):
            continue  # the few that have no defaults
        parts = sections(config)
        for section in parts:
            chosen = section if section or len(parts) > 1 else None
            inner = config
            for key in source_of(config, chosen).prefix.split("."):
                inner = getattr(inner, key) if key else inner
            yield name, config, chosen, inner


@pytest.mark.slow
def test_the_frequencies_of_all_defaults_are_those_of_the_published_modules() -> None:
    compared = 0
    for name, config, section, inner in every_default():
        if name in WITHOUT_INV_FREQ:
            continue
        try:
            specs = RopeSpec.from_config(config, section=section)
        except (ValueError, TypeError):
            continue
        modules = rotary_modules(inner)
        layers = set(getattr(inner, "layer_types", None) or ())
        for layer, spec in dict(specs if isinstance(specs, LayerSpecs) else {None: specs}).items():
            used = not layers or layer not in FULL_OR_SLIDING or layer in layers
            if spec is not None and modules and used:
                own = SECTION_OF.get(layer, layer)
                assert any(has_frequencies(each, own, spec) for each in modules), (name, layer)
                compared += 1
    assert compared > 150


FULL_OR_SLIDING = ("full_attention", "sliding_attention", "hybrid_sliding")
# DeepSeek V4's modules have buffers by section.
SECTION_OF = {"compressed_sparse_attention": "compress", "heavily_compressed_attention": "compress"}

# --- a part of the channels -----------------------------------------------------------------------

# Heads of 128 channels: the sections of each family fit them, or half of them where a part rotates.
SIZES = {
    **dict.fromkeys(("hidden_size", "max_position_embeddings"), 256),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2),
    "vocab_size": 9,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "esm": {"position_embedding_type": "rotary"},
    "gemma4_text": {"global_head_dim": 128},
    "embedding_gemma2_text": {"global_head_dim": 128},
    "gemma4_unified_text": {"global_head_dim": 128},
}
LAYERED = set(
    """beam cohere_compass_text embedding_gemma2_text gemma3_text gemma3n_text gemma4_text gemma4_unified_text laguna lfm3
    mellum mimo_v2_flash modernbert modernbert-decoder olmo3 step3p5 t5gemma2_decoder t5gemma2_text ultrabert
    zaya""".split()
)
# Of these the test cannot make the module that has the tables: they have other names or other sizes.
WITHOUT_TABLES = set(
    """blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher cosmos3_edge_text csm_depth_decoder_model
    deepseek_ocr2_encoder dia_decoder dia_encoder dinov3_vit dots3_note_audio_encoder dots3_note_vision_encoder
    edgetam_video eomt_dinov3 glmasr_encoder gradium_phonon_tts lfm3 llama4_vision_model mimi_decoder mimi_encoder mlcd
    mlcd_vision_model nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp
    nemotron3_diarization_audio pocket_tts pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder
    qwen2_5_omni_talker qwen2_5_omni_vision_encoder qwen2_vl_vision qwen3_omni_moe_talker_code_predictor
    qwen3_omni_moe_vision_encoder roformer sam2_video sapiens2 seamless_m4t t5_gemma_module t5gemma2_decoder
    voxtral_realtime_encoder wav2vec2-bert wav2vec2-conformer zamba2 zaya""".split()
)
# All but latent attention and MiniMax's images, whose slice no key for a part gives, and those that need rotary_dim or a
# section.
BUILT = [
    name
    for name in PUBLISHED
    if name in transformers.CONFIG_MAPPING
    and FAMILIES[name].start == "first"
    and FAMILIES[name].part != "sixths"
    and name not in ("qwen2_vl", "qwen2_5_vl", "glm4v", "gptj", "codegen", "diffusion_gemma_text")
]


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
@pytest.mark.parametrize("name", BUILT)
def test_a_part_rotates_only_where_the_code_rotates_a_part(name: str, kind: str) -> None:
    sizes = {**SIZES, **OWN.get(name, {})}
    if name != "falcon":  # its class computes it
        sizes["head_dim"] = 128
    rule: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        rule |= {"factor": 2.0, "original_max_position_embeddings": 64}
    section: dict[str, Any] = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, **rule}
    if name in LAYERED:
        section = {"full_attention": section, "sliding_attention": section}
    flat = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": rule}
    forms: list[Any] = [
        {"model_type": name, **sizes, **one} for one in ({"rope_parameters": section}, flat)
    ]
    own: set[int] = set()
    try:
        config = transformers.AutoConfig.for_model(name, **sizes, rope_parameters=section)
        module = rotary_module(config)
        forms += [config, config.to_dict()]
        buffers = dict(module.named_buffers()) if module is not None else {}
        own = {2 * x.numel() for key, x in buffers.items() if "inv_freq" in key}
    except (StrictDataclassError, ValueError, AttributeError, KeyError):
        pass  # the family does not have this kind of scaling, or its sizes have other names
    found = set()
    for form in forms:
        try:
            specs = specs_of(RopeSpec.from_config(form))
        except ValueError:
            continue
        found |= {spec.rotary_dim for spec in specs if spec is not None}
    assert own or kind != "default" or name in WITHOUT_TABLES
    if FAMILIES[name].part != "none":
        assert found <= {64}
        assert own <= {64}
    else:
        # With scaling, the code makes tables of a part that its rotary function cannot apply.
        assert not found
        assert kind != "default" or FAMILIES[name].axes is not None or own <= {128}
