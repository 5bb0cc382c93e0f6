"""GGUF headers: written by the format's own package, or broken and written byte by byte."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.support.gguf import DIVISORS, entry, head, listing, text, write
from tests.support.reading import outcome
from tightrope import RopeSpec
from tightrope.config import gguf_file
from tightrope.frequencies import Given, LongRoPE


def test_metadata_is_read_and_long_lists_are_not(tmp_path: Path) -> None:
    values = gguf_file.read(write(tmp_path / "model.gguf"))
    wanted = {
        "general.architecture": "llama",
        "llama.rope.freq_base": 500000.0,
        "llama.context_length": 131072,
        "some.lists": ["one", "two"],
        "a.switch": True,
    }
    assert {key: values.get(key) for key in wanted} == wanted
    assert not {"tokenizer.ggml.tokens", "tokenizer.ggml.scores"} & values.keys()


@pytest.mark.parametrize("name", ["model.gguf", "no.suffix"])
def test_a_spec_from_a_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert RopeSpec.from_config(path) == RopeSpec(128, base=5e5, interleaved=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("order", [gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
def test_divisors_are_in_a_tensor(tmp_path: Path, dtype: type, order: Any) -> None:
    divisors = DIVISORS.astype(dtype)
    path = write(tmp_path / "model.gguf", rope_freqs__weight=divisors, order=order)
    spec = RopeSpec.from_config(path)
    plain = RopeSpec(128, base=5e5).frequencies().exact
    wanted = tuple(float(omega) / float(d) for omega, d in zip(plain, divisors, strict=True))
    assert spec.scaling == Given(wanted)


def test_two_sets_of_divisors(tmp_path: Path) -> None:
    tensors = {"rope_factors_short__weight": DIVISORS, "rope_factors_long__weight": 2 * DIVISORS}
    scaling = RopeSpec.from_config(write(tmp_path / "phi.gguf", "phi3", **tensors)).scaling
    assert isinstance(scaling, LongRoPE)
    assert scaling.short_factor == tuple(map(float, DIVISORS))
    assert scaling.long_factor == tuple(map(float, 2 * DIVISORS))


# --- invalid files --------------------------------------------------------------------------------


ENDS = "ends within its metadata or factor tensors"
ONE, TENSOR = head(entries=1), head(tensors=1) + text("rope_freqs.weight")


@pytest.mark.parametrize(
    "data, about",
    [
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
        (
            ONE + entry("a", 9, listing(9, 1)),
            "must hold lists of numbers or strings but has one of",
        ),
        (head(entries=2) + 2 * entry("a", 7, b"\1"), "must have each key once but has a twice"),
        (ONE + entry("general.alignment", 4, struct.pack("<I", 0)), "general.alignment of"),
        (
            TENSOR + struct.pack("<IQQIQ", 2, 8, 8, 0, 0),
            r"in float32 \(type 0\) or float16 \(type 1\) but has shape \[8, 8\] and type 0",
        ),
        (TENSOR + struct.pack("<IQIQ", 1, 2**40, 0, 0), "must be a row of at most 65,536 numbers"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, data: bytes, about: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"^\[from_config\] .*{about}[^\n]*\.$"):
        RopeSpec.from_config(path)


def test_files_cut_off_and_damaged_anywhere(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", tokens=3, rope_freqs__weight=DIVISORS).read_bytes()
    # Most damage is before the token scores, which are not read.
    start = whole.index(b"tokenizer.ggml.scores")
    path = tmp_path / "damaged.gguf"
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        at = rng.randrange(start) if rng.random() < 0.8 else rng.randrange(len(whole))
        if rng.random() < 0.5:
            del data[at:]
        else:
            data[at] = rng.randrange(256)
        path.write_bytes(data)
        refused += isinstance(outcome(path), Exception)
    assert refused > 150
