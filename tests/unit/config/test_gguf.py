"""GGUF: headers by the format's own package, or broken and written byte by byte; the keys of every architecture; factors.

What the metadata of each architecture gives is in rows/gguf.jsonl.
"""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
from gguf import constants

from tests.support.gguf import DIVISORS, entry, head, listing, text, write
from tests.support.reading import gguf, outcome, read, refused
from tightrope import RopeSpec
from tightrope.config import gguf_file
from tightrope.config.gguf import ARCHITECTURES as ROWS
from tightrope.frequencies import Given, LongRoPE, default

# --- files ----------------------------------------------------------------------------------------


def test_metadata_is_read_and_long_lists_are_not(tmp_path: Path) -> None:
    values = gguf_file.read(write(tmp_path / "model.gguf", tokens=70_000))
    wanted = {
        "general.architecture": "llama",
        "llama.rope.freq_base": 500000.0,
        "llama.context_length": 131072,
        "some.lists": ["one", "two"],
        "a.switch": True,
    }
    assert {key: values.get(key) for key in wanted} == wanted
    assert not {"tokenizer.ggml.tokens", "tokenizer.ggml.scores"} & values.keys()
    bare = write(tmp_path / "no.suffix")
    assert read(tmp_path / "model.gguf") == read(bare) == RopeSpec(128, base=5e5, interleaved=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("order", [package.GGUFEndian.LITTLE, package.GGUFEndian.BIG])
def test_divisors_are_in_a_tensor(tmp_path: Path, dtype: type, order: Any) -> None:
    divisors: Any = DIVISORS.astype(dtype)
    spec = read(write(tmp_path / "model.gguf", rope_freqs__weight=divisors, order=order))
    plain = RopeSpec(128, base=5e5).frequencies().exact
    wanted = tuple(float(omega) / float(d) for omega, d in zip(plain, divisors, strict=True))
    assert spec.scaling == Given(wanted)


def test_two_sets_of_divisors(tmp_path: Path) -> None:
    tensors = {"rope_factors_short__weight": DIVISORS, "rope_factors_long__weight": 2 * DIVISORS}
    scaling = read(write(tmp_path / "phi.gguf", "phi3", **tensors)).scaling
    assert isinstance(scaling, LongRoPE)
    assert scaling.short_factor == tuple(map(float, DIVISORS))
    assert scaling.long_factor == tuple(map(float, 2 * DIVISORS))


ENDS = "ends within its metadata or factor tensors"
ONE, TENSOR = head(entries=1), head(tensors=1) + text("rope_freqs.weight")
BROKEN = [
    (b"GGUF", ENDS),
    (ONE, ENDS),
    (head(entries=2**63), ENDS),
    (head(tensors=2**63), ENDS),
    (ONE + struct.pack("<Q", 2**63), ENDS),
    (ONE + entry("a", 9, listing(8, 2**62)), ENDS),
    (ONE + entry("a", 9, listing(0, 2**62)), ENDS),
    (TENSOR + struct.pack("<IQIQ", 1, 8, 0, 2**63), ENDS),
    (head(version=1), "must be GGUF version 2 or 3 but is version 1"),
    (head(version=77), "must be GGUF version 2 or 3 but is version 77"),
    (ONE + entry("a", 13, b""), "must hold values of GGUF's types but has one of type 13"),
    (ONE + entry("a", 9, listing(9, 1)), "must hold lists of numbers or strings but has one of"),
    (head(entries=2) + 2 * entry("a", 7, b"\1"), "must have each key once but has a twice"),
    (ONE + entry("general.alignment", 4, struct.pack("<I", 0)), "general.alignment of"),
    (
        TENSOR + struct.pack("<IQQIQ", 2, 8, 8, 0, 0),
        "in float32 (type 0) or float16 (type 1) but has shape [8, 8] and type 0",
    ),
    (TENSOR + struct.pack("<IQIQ", 1, 2**40, 0, 0), "must be a row of at most 65,536 numbers"),
]


@pytest.mark.parametrize("data, about", BROKEN)
def test_a_broken_file_is_one_sentence(tmp_path: Path, data: bytes, about: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    refused(path, about)


def test_files_cut_off_and_damaged_anywhere(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", rope_freqs__weight=DIVISORS).read_bytes()
    start = whole.index(b"tokenizer.ggml.scores")
    path, rng, broken = tmp_path / "damaged.gguf", random.Random(0), 0
    for _ in range(300):
        data = bytearray(whole)
        at = rng.randrange(start) if rng.random() < 0.8 else rng.randrange(len(whole))
        if rng.random() < 0.5:
            del data[at:]
        else:
            data[at] = rng.randrange(256)
        path.write_bytes(data)
        broken += isinstance(outcome(path), Exception)
    assert broken > 150


# --- every architecture -----------------------------------------------------------------------------

# Keys that are read, after the architecture; those that begin with rope are all about the rotation.
ABOUT = re.compile(
    r"rope\.|attention\.(key_length|compress|max_alibi|rope|head_count$|sliding_window$)"
    r"|(context_length|embedding_length|block_count)$"
)
# Those that read key_length_swa.
OWN_WIDTHS = "dots3note gemma4 gemma4-assistant gemma-embedding2 laguna spark2_5 step35".split()
# What a file of an architecture has besides.
KNOWN: dict[str, dict[str, Any]] = {
    **{arch: {"rope_freqs.weight": [1.0] * 32} for arch in ("gemma4", "gemma4-assistant")},
    "deepseek4": {
        "deepseek4.attention.compress_ratios": [0] * 32,
        "deepseek4.attention.compress_rope_freq_base": 160000.0,
    },
    "cohere2moe": {"cohere2moe.leading_dense_block_count": 1},
    **{arch: {f"{arch}.rope.freq_base": 1e4} for arch in ("cogvlm", "deepseek2-ocr")},
}


def test_the_pairing_of_an_architecture_is_that_of_llama_cpp() -> None:
    stated = json.loads((Path(__file__).parent / "rows/pairings_of_gguf.json").read_text("utf-8"))
    for pairing in ("adjacent", "halves"):
        for arch in stated[pairing].split():
            assert ROWS[arch].interleaved == (pairing == "adjacent"), arch


@pytest.mark.parametrize("arch", [name for name in ROWS if name != "dflash of deepseek4"])
def test_keys_of_any_architecture_are_read_without_its_name(arch: str) -> None:
    """The name of an architecture, such as gptneox, is in each of its keys, and says nothing about them."""
    groups = [vars(group) for group in vars(constants.Keys).values() if isinstance(group, type)]
    names = {name for group in groups for name in group.values() if "{arch}." in str(name)}
    others = {f"{arch}.{name[7:]}": 3 for name in names if not ABOUT.match(name[7:])}
    assert len(others) > 80
    known: dict[str, Any] = {
        "attention.key_length": 128,
        "attention.sliding_window": 64,
        "rope.dimension_count": 64,
        "context_length": 4096,
    }
    if ROWS[arch].axes in ("sections", "interleaved sections"):
        known["rope.dimension_sections"] = [11, 11, 10, 0]
    config = gguf(arch, 32) | {f"{arch}.{key}": value for key, value in known.items()}
    config |= KNOWN.get(arch, {})
    if ROWS[arch].refused is not None and not ROWS[arch].only_layers:
        refused(config, f"GGUF architecture {arch!r} has no spec: ")
        return
    wanted = read(config)
    assert read({**config, **others}) == wanted
    unknown = ["swa_rope_theta", "rope.tehta", "attention.key_length_swa"]
    for key in unknown[: 2 if arch in OWN_WIDTHS else 3]:
        refused({**config, **others, f"{arch}.{key}": 3}, f"must be known but got {arch}.{key}")


# --- tensors of factors -----------------------------------------------------------------------------


GEMMA = {
    "attention.key_length": 512,
    "attention.key_length_swa": 256,
    "attention.sliding_window": 1024,
    "rope.dimension_count": 512,
    "rope.dimension_count_swa": 256,
}
STEP = {
    "attention.key_length": 128,
    "attention.sliding_window": 128,
    "attention.sliding_window_pattern": [True, False] * 4,
    "rope.dimension_count": 128,
}
ENDING = [1.0] * 64 + [1e30] * 192


@pytest.mark.parametrize(
    "arch, keys, factors, width",
    [
        ("qwen2", {}, [1.0] * 32 + [8.0] * 32, 128),
        # Their layers with a window have none.
        ("gemma4", GEMMA, ENDING, 512),
        ("gemma4-assistant", GEMMA, ENDING, 512),
        # It rotates half of the channels.
        ("step35", STEP, [2.0] * 64, 64),
    ],
)
def test_factors_divide_the_frequencies(
    arch: str, keys: dict[str, Any], factors: list[float], width: int
) -> None:
    config = gguf(arch) | {f"{arch}.{key}": value for key, value in keys.items()}
    config["rope_freqs.weight"] = factors
    if keys:
        config[f"{arch}.rope.freq_base_swa"] = 1e4
        assert read(config, layer_type="sliding_attention").scaling is None
    spec = read(config, layer_type="full_attention" if keys else None)
    wanted = [float(omega) / each for omega, each in zip(default(width, 1e6).exact, factors)]
    found = [float(omega) for omega in spec.frequencies().exact]
    assert found == pytest.approx(wanted, rel=1e-15, abs=1e-30)
