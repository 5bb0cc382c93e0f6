"""Fuzzes the readers of files: safetensors, GGUF, JSON configurations and indexes.

The first byte chooses the kind of file, the others are its bytes. A file must be read, or refused with an
error that the command line reports as one line; and nothing but the result may be written.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import random
import re
import resource
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ci.hardening import fuzzing

chosen = fuzzing.options()

with fuzzing.instrumented(chosen.guided, "tightrope.config", "tightrope_tools"):
    from tightrope_tools.convert import Stated, convert, detect
    from tightrope_tools.inspect import inspect

import torch  # noqa: E402
from safetensors.torch import save  # noqa: E402

from tests.support import gguf as gguf_writer  # noqa: E402
from tests.support.checkpoints import LLAMA, llama_tensors, write  # noqa: E402
from tests.support.model_configs import (  # noqa: E402
    MODELS,
    damaged,
)

# What the command line reports as one line (cli/_mistakes.py); of these, the library's own have one form.
REPORTED, OWN = (
    (OSError, ValueError, TypeError, NotImplementedError),
    re.compile(r"\[[\w.]+\] .*\."),
)
STATED = Stated(source="half", heads=4, kv_heads=2, head_dim=8, naming="llama")

home = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
source, out = home / "a", home / "b"


def files() -> set[Path]:
    return {path for path in home.rglob("*") if not path.is_relative_to(out)}


def checked(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Make the call, which may raise an error that is reported, and may write nothing but the result."""
    before = files()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(*arguments, **options)
    except REPORTED as error:
        if not isinstance(error, OSError) and not OWN.fullmatch(str(error)):
            raise
    if files() != before:
        raise AssertionError(f"files outside the result: {files() - before}")


def converted(path: Path, stated: Stated | None) -> None:
    checked(convert, path, out, to="interleaved", stated=stated, verify=True)
    checked(detect, path, stated=stated)


def safetensors(data: bytes) -> None:
    (source / "model.safetensors").write_bytes(data)
    converted(source / "model.safetensors", STATED)


def header(data: bytes) -> None:
    """Put the bytes into a file whose length of the header is right."""
    safetensors(struct.pack("<Q", len(data)) + data + bytes(WEIGHTS))


def gguf(data: bytes) -> None:
    (source / "model.gguf").write_bytes(data)
    checked(inspect, source / "model.gguf", strict=False)


def config(data: bytes) -> None:
    (source / "model.safetensors").write_bytes(PLAIN)
    (source / "config.json").write_bytes(data)
    checked(inspect, source, strict=False)
    converted(source, None)


def model(data: bytes) -> None:
    """Give a public model's configuration odd values."""
    draw = fuzzing.Bytes(data)
    config(json.dumps(damaged(draw.choice(MODELS).config, draw)).encode())


def index(data: bytes) -> None:
    shutil.copytree(home / "seed", source, dirs_exist_ok=True)
    (source / "model.safetensors.index.json").write_bytes(data)
    converted(source, None)


KINDS = (safetensors, header, gguf, config, index, model)

ONE = {**LLAMA, "num_hidden_layers": 1}
TENSORS = llama_tensors(ONE, dtype=torch.bfloat16, bias=False)
PLAIN = save(TENSORS, metadata={"format": "pt"})
WEIGHTS = len(PLAIN) - 8 - struct.unpack("<Q", PLAIN[:8])[0]


def seeds() -> list[bytes]:
    """Write small files of every kind with their usual writers."""
    gguf_writer.write(home / "seed.gguf", tokens=3, rope_freqs__weight=gguf_writer.DIVISORS)
    start = (home / "seed.gguf").read_bytes()[: 2**14]  # without most scores of tokens
    write(home / "seed", TENSORS, ONE, shards=2)
    sharded = (home / "seed" / "model.safetensors.index.json").read_bytes()
    head = PLAIN[8 : len(PLAIN) - WEIGHTS]
    found = [(0, PLAIN), (1, head), (2, start), (4, sharded)]
    found += [(3, json.dumps(each).encode()) for each in (ONE, *(each.config for each in MODELS))]
    found += [(5, random.Random(n).randbytes(40)) for n in range(40)]
    return [bytes([kind]) + data for kind, data in found]


calls = itertools.count()


def test(data: bytes) -> None:
    if next(calls) % 50 == 0:
        # Hundreds of specs stay cached, which damaged configurations make large.
        for each in gc.get_objects():
            if type(each) is type(KEPT) and each.__module__.startswith("tightrope"):
                each.cache_clear()
        gc.collect()
        # A file of 20 kB must not need more than 2 GB. The guided process itself grows, hence each time.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, resource.RLIM_INFINITY))
    for old in (source, out):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    source.mkdir()
    KINDS[data[0] % len(KINDS) if data else 0](data[1:])


KEPT = functools.lru_cache(len)

if __name__ == "__main__":
    start = seeds()
    try:
        fuzzing.fuzz(chosen, test, start)
    finally:
        shutil.rmtree(home, ignore_errors=True)
