"""Helpers for the tests of `from_config`: how to call it, its sentences, and configurations to change."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.advice import calls_in, made_by
from tightrope import RopeSpec
from tightrope.frequencies import default

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
#: The widths of latent attention.
LATENT = {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32}


def llama(**more: Any) -> dict[str, Any]:
    """Return Llama's configuration with these keys besides."""
    return {**LLAMA, **more}


def gguf(arch: str, layers: int = 8, **more: Any) -> dict[str, Any]:
    """Return metadata of GGUF for an architecture; in further keys, a double underscore is a dot."""
    made: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.embedding_length": 2048,
        f"{arch}.attention.head_count": 16,
        f"{arch}.rope.freq_base": 1e6,
    }
    return made | {f"{arch}.{key.replace('__', '.')}": value for key, value in more.items()}


def assert_divided(spec: Any, width: int, base: float, divisors: Sequence[float]) -> None:
    """Check that the frequencies are those of the paper, each divided by its number."""
    row = zip(default(width, base).exact, divisors, strict=True)
    wanted = [float(omega) / divisor for omega, divisor in row]
    found = [float(omega) for omega in spec.frequencies().exact]
    assert found == pytest.approx(wanted, rel=1e-15, abs=1e-30)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a configuration without some of its keys."""
    return {key: value for key, value in config.items() if key not in names}


def read(config: object, **stated: Any) -> Any:
    """Call `from_config`, for tests that know whether it gives one spec or one for each type of layer."""
    return RopeSpec.from_config(config, **stated)


def outcome(config: object, **stated: Any) -> Any:
    """Return what `from_config` gives, or its error if that is one of the library's own sentences."""
    try:
        return read(config, **stated)
    except (ValueError, TypeError) as error:
        if not str(error).startswith("["):
            raise
        return error


def refused(config: object, text: str, kind: type[Exception] = ValueError, **stated: Any) -> None:
    """Check that `from_config` raises an error with this phrase, and that each call that it advises works."""
    with pytest.raises(kind) as caught:
        read(config, **stated)
    said = str(caught.value)
    assert said.startswith("[from_config] ")
    assert text.removesuffix(".") in said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strict=False
        for call in calls_in(said) if "config, " in said else []:
            assert made_by(call, config) is not None


def unknown(*names: str) -> str:
    """Return the sentence about keys that are not known."""
    return f"every key about RoPE must be known but got {', '.join(names)}; strict=False ignores them with a warning."


def axial(path: str, name: str) -> str:
    """Return the sentence about a rotation of images in a family that is not known to rotate them."""
    return f"{path} is 'axial', but model_type {name!r} is not known to have several axes."


def two(what: str, one: str, other: str) -> str:
    """Return the sentence about two keys that contradict each other."""
    return f"{what} must have one value but got {one} and {other}."


def whole_head(family: str, got: str) -> str:
    """Return the sentence about a part of the channels, for a family that rotates all 128."""
    return (
        f"rotary_dim must be 128, as the code of model_type {family!r} rotates all channels of a head, but got {got}; "
        "for other code, which rotates a part, make a RopeSpec by hand."
    )


#: How the two missing facts that are asked for most are asked for.
PAIRING = (
    "interleaved=False if channel i is paired with i + rotary_dim / 2, as in Llama, or interleaved=True if adjacent "
    "channels are paired, as in GPT-J"
)
LAYERS = "rope_layers='all' if all layers with attention rotate"


def asked(facts: str, name: str, *ways: str, example: str) -> str:
    """Return the sentence that asks for facts about a family that is not in the table."""
    return (
        f"the config must give {facts}, as the table of families does not contain {name}; pass {'; '.join(ways)}; "
        f"for code like Llama's: RopeSpec.from_config(config, {example})."
    )


#: Values that no key may have, or few.
JUNK = ["x", "", [], [1], [[]], {}, {"a": 1}, -1, 0, 1.5, True, float("nan"), float("inf")]


def try_everywhere(junk: object, config: dict[str, Any], **stated: Any) -> None:
    """Put junk in place of each value, also in sections: it gives a spec or one of the library's errors."""
    for key, value in config.items():
        inner = [{**value, name: junk} for name in value] if isinstance(value, dict) else []
        for changed in (junk, *inner):
            outcome({**config, key: changed}, **stated)
