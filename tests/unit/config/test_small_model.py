"""Test `from_config` on configuration objects whose family is not in the table, by running a small model.

The table is the truth: with an entry hidden, the small model shows what the entry states, or nothing.
"""

import functools
import importlib
import io
import itertools
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tightrope import RopeSpec, patch, unpatch
from tightrope.config import LayerSpecs, _small_model, observed, provenance
from tightrope.config.families import FAMILIES

ASKED = "the table of families does not contain"


@pytest.fixture(autouse=True)
def _few_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all families but a few, as if transformers were newer than the table."""
    for name in [name for name in FAMILIES if name not in KNOWN]:
        monkeypatch.delitem(FAMILIES, name)


def config_of(name: str, **settings: Any) -> Any:
    return transformers.CONFIG_MAPPING[name](**settings)


def refused(config: object, **stated: Any) -> None:
    with pytest.raises(ValueError, match=ASKED):
        RopeSpec.from_config(config, **stated)


# --- the table is the truth -----------------------------------------------------------------------

FEW = {"num_hidden_layers": 4}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LATENT = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8, "n_group": 1}
IN_THE_TABLE: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "rope_theta": 1e6,
            "original_max_position_embeddings": 64,
        }
    },
    "gemma": {},
    "glm4": {},
    "gpt_neox": {},
    "cohere": {},
    "cohere2": SLIDING,
    "olmo3": SLIDING,
    "gemma3_text": SLIDING,
    "deepseek_v3": LATENT,
    "minicpm3": LATENT,
}
KNOWN = {*IN_THE_TABLE, "smollm3", "modernbert", "nanochat", "qwen2", "qwen2_vl_text"}


def by_layer(specs: Any) -> list[RopeSpec | None]:
    return [specs.of(n) if isinstance(specs, LayerSpecs) else specs for n in range(4)]


@pytest.mark.parametrize("name", IN_THE_TABLE)
def test_a_small_model_shows_what_the_table_states(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(name, **FEW, **IN_THE_TABLE[name])
    wanted = RopeSpec.from_config(config)
    monkeypatch.delitem(FAMILIES, name)
    assert by_layer(RopeSpec.from_config(config)) == by_layer(wanted)
    refused(config.to_dict())  # keys alone do not settle it


@pytest.mark.parametrize("name", ["qwen2_vl_text", "nanochat"])
def test_what_no_spec_of_one_coordinate_describes_is_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FAMILIES, name)
    refused(config_of(name, **FEW))


def test_layers_that_a_key_with_two_meanings_lists_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of("smollm3", **FEW)
    wanted = RopeSpec.from_config(config)
    monkeypatch.delitem(FAMILIES, "smollm3")
    refused(config)
    given = {"interleaved": False, "rotary_dim": 128, "rope_layers": ["no_rope_layers=1"]}
    assert by_layer(RopeSpec.from_config(config, **given)) == by_layer(wanted)


# --- families that are not in the table -----------------------------------------------------------

FOUND: dict[str, tuple[dict[str, Any], Any]] = {
    "gte": ({}, RopeSpec(64, base=160000.0)),
    "gpt_neox_japanese": ({}, RopeSpec(80)),
    "blt_patcher": ({}, RopeSpec(64, interleaved=True)),
    "axk2": (FEW, RopeSpec(96, start=64, interleaved=True)),
    "nemotron3_5_transcribe_asr_audio": (FEW, RopeSpec(128, rotary_dim=64)),
    "zaya": (  # a convolution precedes the rotation, and there are as many experts as layers
        FEW,
        {
            "hybrid": RopeSpec(128, base=5e6, rotary_dim=64),
            "hybrid_sliding": RopeSpec(128, base=1e4, rotary_dim=64),
        },
    ),
    "cohere2_moe": (
        {**FEW, **SLIDING},
        {"sliding_attention": RopeSpec(128, interleaved=True), "full_attention": None},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_question_is_answered(name: str) -> None:
    settings, wanted = FOUND[name]
    config = config_of(name, **settings)
    refused(config.to_dict())
    assert RopeSpec.from_config(config) == wanted


@pytest.mark.parametrize("name", ["paddleocr_vl_text", "internlm3"])
def test_what_no_model_settles_is_asked(name: str) -> None:
    refused(config_of(name))  # positions of three coordinates; no modeling file


def test_a_section_is_run_alone() -> None:
    config = config_of("granite_docling")
    assert RopeSpec.from_config(config) == RopeSpec(64)
    assert RopeSpec.from_config(config, section="text_config") == RopeSpec(64)


def test_a_layer_type_is_selected() -> None:
    config = config_of("cohere2_moe", **FEW, **SLIDING)
    assert RopeSpec.from_config(config, layer_type="full_attention") is None
    one = RopeSpec.from_config(config, layer_type="sliding_attention")
    assert one == RopeSpec(128, interleaved=True)


def test_the_source_is_the_model_that_was_run() -> None:
    config = config_of("cohere2_moe", **FEW, **SLIDING)
    sources = {row.field: row.source for row in provenance(config).rows}
    for field in ("interleaved", "rotary_dim", "start", "no RoPE"):
        assert sources[field] == "a small Cohere2MoeModel, which was run"
    assert sources["head_dim"] == "head_dim"
    stated = {row.field: row.source for row in provenance(config, interleaved=True).rows}
    assert stated["interleaved"] == "the argument interleaved"
    assert stated["rotary_dim"] == "a small Cohere2MoeModel, which was run"


def test_arguments_come_first() -> None:
    config = config_of("gte")
    assert RopeSpec.from_config(config, interleaved=True) == RopeSpec(
        64, base=160000.0, interleaved=True
    )
    refused(config, rotary_dim=32)  # it rotates all


def test_unknown_keys_are_refused_first_and_warned_of_once() -> None:
    config = config_of("gte", rope_flavour=3)
    with pytest.raises(ValueError, match="every key about RoPE must be known but got rope_flavour"):
        RopeSpec.from_config(config)
    with pytest.warns(UserWarning, match="got rope_flavour") as caught:
        assert RopeSpec.from_config(config, strict=False) == RopeSpec(64, base=160000.0)
    assert len(caught) == 1


# --- models that do not settle it ------------------------------------------------------------------


def failing(*_: Any) -> Any:
    raise ZeroDivisionError


def faster(old: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    angle = 1.001 * torch.atan2(sin, cos)
    return old(q, k, angle.cos(), angle.sin())


WRONG: dict[str, Callable[..., Any]] = {
    "negated": lambda old, q, k, cos, sin: old(q, k, cos, -sin),
    "only queries": lambda old, q, k, cos, sin: (old(q, k, cos, sin)[0], k),
    "nothing": lambda _old, q, k, *_: (q, k),
    "broken": lambda _old, q, k, *_: (q * torch.nan, k),
    "faster": faster,
    "failing": failing,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_model_that_rotates_otherwise_settles_nothing(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gte import modeling_gte

    old = modeling_gte.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_gte, "apply_rotary_pos_emb", functools.partial(wrong, old))
    refused(config_of("gte"))


def test_the_names_of_rotary_functions_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gte import modeling_gte

    old = modeling_gte.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_gte, "apply_rotary_pos_emb", lambda *args: tuple(x.clone() for x in old(*args))
    )
    assert RopeSpec.from_config(config_of("gte")) == RopeSpec(64, base=160000.0)


@pytest.mark.parametrize("name", ["qwen2", "modernbert"])
@pytest.mark.parametrize("factor", [0, 1])
def test_every_layer_counts(name: str, factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose queries are zero show nothing; others that do not rotate contradict a section of theirs."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    monkeypatch.delitem(FAMILIES, name)
    windows = {"use_sliding_window": True} if name == "qwen2" else {}
    config = config_of(name, **FEW, **SLIDING, **windows)
    right = RopeSpec.from_config(config)
    old, calls = module.apply_rotary_pos_emb, itertools.count()

    def second(q: Any, k: Any, *tables: Any, **more: Any) -> Any:
        return (q * factor, k * factor) if next(calls) % 2 else old(q, k, *tables, **more)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", second)
    if (name, factor) == ("qwen2", 1):  # its layers have no sections
        assert RopeSpec.from_config(config) == {
            "sliding_attention": right,
            "full_attention": None,
        }
    else:
        refused(config)


@pytest.mark.parametrize("limit", ["_MOST", "_SECONDS"])
def test_a_model_that_is_too_large_or_slow_settles_nothing(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_small_model, limit, 0)
    refused(config_of("gte"))


def test_code_from_elsewhere_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(_small_model, "find", lambda *given: ran.append(given))
    gte = type(config_of("gte"))
    for home in ("transformers_modules.someone.configuration_gte", "mine"):
        kind = type("GteConfig", (gte,), {})
        kind.__module__ = home
        refused(kind())
        nested = config_of("granite_docling")
        nested.text_config.__class__ = kind
        assert observed.object_of(nested, "text_config.") is None
    assert not ran
    refused(gte())
    assert len(ran) == 1


# --- the process ------------------------------------------------------------------------------------


def test_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gte import modeling_gte

    old, heard = modeling_gte.apply_rotary_pos_emb, logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("transformers")

    def noisy(*given: Any) -> Any:
        logger.error("logged")
        warnings.warn("warned", stacklevel=1)
        return old(*given)

    monkeypatch.setattr(modeling_gte, "apply_rotary_pos_emb", noisy)
    monkeypatch.setattr(logger, "handlers", [heard])
    level = logger.level
    config = config_of("gte")
    before = config.to_dict()
    torch.manual_seed(7)
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("error")
        assert RopeSpec.from_config(config) == RopeSpec(64, base=160000.0)
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype
    assert config.to_dict() == before
    assert (heard.stream.getvalue(), logger.level) == ("", level)


RUN = """
import sys
from transformers import CONFIG_MAPPING
from tightrope import RopeSpec
RopeSpec.from_config(CONFIG_MAPPING["llama"]())
assert "tightrope.config._small_model" not in sys.modules
from tightrope.config.families import FAMILIES
FAMILIES.pop("gte")
RopeSpec.from_config(CONFIG_MAPPING["gte"]())
assert "tightrope.config._small_model" in sys.modules
assert not [name for name in sys.modules if name.startswith(("tightrope.integrations", "tightrope.patching"))]
"""


def test_small_models_are_imported_only_for_a_question() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- models -----------------------------------------------------------------------------------------

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 16}


@pytest.mark.parametrize("name", ["llama", "gte"])
def test_a_model_is_read_by_its_configuration(name: str) -> None:
    config = config_of(name, num_hidden_layers=1, pad_token_id=0, **SMALL)
    model = transformers.AutoModel.from_config(config)
    wanted = RopeSpec.from_config(config)
    assert wanted.head_dim == 32
    assert RopeSpec.from_config(model) == wanted == provenance(model).spec
    patch(model)
    assert RopeSpec.from_config(model) == wanted
    unpatch(model)


def test_all_models_may_be_patched_at_that_time() -> None:
    patch(angles="exact")
    try:
        assert RopeSpec.from_config(config_of("gte")) == RopeSpec(64, base=160000.0)
    finally:
        unpatch()


def test_exact_angles_of_a_family_that_is_not_in_the_table() -> None:
    config = config_of("gte", num_hidden_layers=1, pad_token_id=0, **SMALL)
    assert patch(transformers.AutoModel.from_config(config), angles="exact").replaced


def test_a_module_without_a_configuration_is_an_error() -> None:
    text = (
        "[from_config] a model must have a config but Linear has none; pass the model of transformers or "
        "diffusers that it holds, or a config as a mapping, an object or a path."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        RopeSpec.from_config(torch.nn.Linear(2, 2))
