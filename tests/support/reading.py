"""How the tests call `from_config`, what they expect of its errors, and configurations to change."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from tests.support.advice import calls_in, made_by
from tightrope import RopeSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
#: Values that no key may have, or few.
JUNK = ["x", "", [], [1], [[]], {}, {"a": 1}, -1, 0, 1.5, True, float("nan"), float("inf")]


def llama(**more: Any) -> dict[str, Any]:
    """Return Llama's configuration with these keys besides."""
    return {**LLAMA, **more}


def gguf(arch: str, layers: int = 8) -> dict[str, Any]:
    """Return metadata of GGUF for an architecture, without what only some files have."""
    return {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.embedding_length": 2048,
        f"{arch}.attention.head_count": 16,
        f"{arch}.rope.freq_base": 1e6,
    }


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
    assert re.match(r"\[\w+\] .*\.$", said), said
    assert text in said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strict=False
        for call in calls_in(said) if "config, " in said else []:
            assert made_by(call, config) is not None
