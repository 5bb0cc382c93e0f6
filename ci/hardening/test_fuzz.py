"""Calls and files that no one would write on purpose: they are taken, or refused in one sentence.

`nox -s fuzz` runs many of them. Hypothesis makes an example that fails smaller, and keeps it for the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save

from tests.support import gguf, raw_calls
from tests.support.checkpoints import LLAMA, llama_tensors, write
from tests.support.helpers import ROOT
from tests.support.matrix import needs_kernel
from tests.support.model_configs import MODELS, damaged
from tightrope.backends import cpu
from tightrope_tools.convert import Stated, convert, detect
from tightrope_tools.inspect import inspect


@contextlib.contextmanager
def ending(name: str) -> Iterator[None]:
    """End the process if what is inside takes five minutes, and write its name to build/no-end.txt.

    No signal ends a loop of the kernel, and pytest keeps what a process prints that ends early.
    """

    def give_up() -> None:
        (ROOT / "build" / "no-end.txt").write_text(f"{name}\n", "utf-8")
        os._exit(1)

    watch = threading.Timer(300, give_up)
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


@needs_kernel
@pytest.mark.parametrize("make", raw_calls.MAKERS)
@given(seed=st.integers(0, 2**60))
def test_calls(make: Callable[[raw_calls.Draw], raw_calls.Call], seed: int) -> None:
    """A call fails before it writes, or has the result of the same call on contiguous copies; both end."""
    for number in range(20):
        draw = raw_calls.Draw(f"{seed} {number}")
        cpu.use_instruction_set(draw.choice(cpu.instruction_sets()))
        # Without a margin, a read just outside a tensor is one outside its memory.
        with patch.object(raw_calls, "MARGIN", draw.choice((0, 0, 64))):
            call = None
            with contextlib.suppress(RuntimeError):  # torch cannot make such a tensor
                call = make(draw)
            if call is not None:
                with ending(f"{make.__name__}, seed {seed}, number {number}"):
                    raw_calls.holds(call)


# The errors that the command line reports as one line; the library's own have one form.
REPORTED, OWN = (
    (OSError, ValueError, TypeError, NotImplementedError),
    re.compile(r"\[[\w.]+\] .*\."),
)
STATED = Stated(source="half", heads=4, kv_heads=2, head_dim=8, naming="llama")
ONE = {**LLAMA, "num_hidden_layers": 1}
TENSORS = llama_tensors(ONE, dtype=torch.bfloat16, bias=False)
WEIGHTS = save(TENSORS, metadata={"format": "pt"})
CONFIGS = [ONE, *(model.config for model in MODELS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a checkpoint of two shards and a GGUF file. Reading them takes at most 2 GB."""
    home = tmp_path_factory.mktemp("files")
    write(home / "sharded", TENSORS, ONE, shards=2)
    gguf.write(home / "model.gguf", tokens=3, rope_freqs__weight=gguf.DIVISORS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, before[1]))
    yield home
    resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[tuple[Path, Path]]:
    """An empty folder and a name for the result; nothing else may appear or vanish."""
    source, out = folder / "source", folder / "out"
    for old in (source, out):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    source.mkdir()
    there = set(folder.iterdir())
    yield source, out
    assert set(folder.iterdir()) - {out} == there


def refused_or_taken(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(*arguments, **options)
        except REPORTED as error:
            if not isinstance(error, OSError) and not OWN.fullmatch(str(error)):
                raise


def converted(path: Path, out: Path, stated: Stated | None) -> None:
    there = set(path.parent.rglob("*"))
    refused_or_taken(convert, path, out, to="interleaved", stated=stated, verify=True)
    refused_or_taken(detect, path, stated=stated)
    assert {one for one in path.parent.rglob("*") if not one.is_relative_to(out)} == there


def changed(data: st.DataObject, content: bytes) -> bytes:
    """Remove, double, replace or insert some parts of a file, half of them near its start."""
    for _ in range(data.draw(st.integers(1, 4))):
        near = min(len(content), data.draw(st.sampled_from((600, 2**20))))
        at, size = data.draw(st.integers(0, near)), data.draw(st.sampled_from((0, 1, 2, 4, 8, 64)))
        here = content[at : at + size]
        known = (2 * here, b"\xff" * size, b"\0" * size, b"[" * 50_000)
        part = data.draw(st.binary(max_size=9) | st.sampled_from(known))
        content = content[:at] + part + content[at + size :]
    return content


@given(data=st.data(), right_length=st.booleans())
def test_safetensors(folder: Path, data: st.DataObject, right_length: bool) -> None:
    size = int.from_bytes(WEIGHTS[:8], "little")
    content = changed(data, WEIGHTS[8 : 8 + size] if right_length else WEIGHTS)
    if right_length:
        content = len(content).to_bytes(8, "little") + content + WEIGHTS[8 + size :]
    with fresh(folder) as (source, out):
        (source / "model.safetensors").write_bytes(content)
        converted(source / "model.safetensors", out, STATED)


@given(data=st.data())
def test_gguf(folder: Path, data: st.DataObject) -> None:
    content = changed(data, (folder / "model.gguf").read_bytes()[: 2**14])
    with fresh(folder) as (source, _):
        (source / "model.gguf").write_bytes(content)
        refused_or_taken(inspect, source / "model.gguf", strict=False)


@given(data=st.data(), draw=st.randoms(use_true_random=False))
def test_configurations(folder: Path, data: st.DataObject, draw: random.Random) -> None:
    config = draw.choice(CONFIGS)
    content = json.dumps(damaged(config, draw)).encode()
    if draw.random() < 0.5:
        content = changed(data, content)
    with fresh(folder) as (source, out):
        (source / "model.safetensors").write_bytes(WEIGHTS)
        (source / "config.json").write_bytes(content)
        refused_or_taken(inspect, source, strict=False)
        converted(source, out, None)


@given(data=st.data(), draw=st.randoms(use_true_random=False))
def test_indexes(folder: Path, data: st.DataObject, draw: random.Random) -> None:
    name = "model.safetensors.index.json"
    content = (folder / "sharded" / name).read_bytes()
    content = json.dumps(damaged(json.loads(content), draw)).encode()
    if draw.random() < 0.5:
        content = changed(data, content)
    with fresh(folder) as (source, out):
        shutil.copytree(folder / "sharded", source, dirs_exist_ok=True)
        (source / name).write_bytes(content)
        converted(source, out, None)
