"""Fuzzes the readers of files: safetensors, torch zips, GGUF, JSON configurations and indexes.

The first byte chooses the kind of file, the others are its bytes. A file must be read, or refused with an
error that the command line reports as one line; and nothing but the result may be written.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import random
import re
import resource
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import fuzzing

chosen = fuzzing.options()

with fuzzing.instrumented(chosen.guided, "tightrope.config", "tightrope.workbench"):
    from tightrope.workbench.convert import Stated, convert, detect
    from tightrope.workbench.inspect import inspect

import torch  # noqa: E402
from convert_cases import LLAMA, llama_tensors, write  # noqa: E402
from safetensors.torch import save  # noqa: E402

import test_gguf_file  # noqa: E402
from model_configs import MODELS  # noqa: E402
from test_cli_inspect import damaged  # noqa: E402

# What the command line reports as one line (cli/_mistakes.py).
REPORTED = (OSError, ValueError, TypeError, NotImplementedError)
STATED = Stated(source="half", heads=4, kv_heads=2, head_dim=8, naming="llama")

home = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
source, out = home / "a", home / "b"


def looked_at(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inspect(path, strict=False)


def converted(path: Path, stated: Stated | None) -> None:
    try:
        convert(path, out, to="interleaved", stated=stated, force=True, verify=True)
    except MemoryError:
        raise
    except REPORTED:
        detect(path, stated=stated)


def safetensors(data: bytes) -> None:
    (source / "model.safetensors").write_bytes(data)
    converted(source / "model.safetensors", STATED)


def header(data: bytes) -> None:
    """Put the bytes into a file whose length of the header is right."""
    safetensors(struct.pack("<Q", len(data)) + data + bytes(WEIGHTS))


def archive(data: bytes) -> None:
    (source / "model.pt").write_bytes(data)
    converted(source / "model.pt", STATED)


def pickled(data: bytes) -> None:
    """Put the bytes into a zip as its pickle, with the right checksum."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ARCHIVE)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            new.writestr(
                info.filename, data if info.filename.endswith("data.pkl") else old.read(info)
            )
    archive(made.getvalue())


def gguf(data: bytes) -> None:
    (source / "model.gguf").write_bytes(data)
    looked_at(source / "model.gguf")


def config(data: bytes) -> None:
    (source / "config.json").write_bytes(data)
    try:
        looked_at(source)
    finally:
        converted(source, None)


def model(data: bytes) -> None:
    """Give a public model's configuration odd values."""
    draw = fuzzing.Bytes(data)
    config(json.dumps(damaged(draw.choice(MODELS).config, draw)).encode())


def index(data: bytes) -> None:
    (source / "model.safetensors.index.json").write_bytes(data)
    converted(source, None)


# The names under which the functions above write their bytes.
WRITTEN = {
    "model.safetensors",
    "model.pt",
    "model.gguf",
    "config.json",
    "model.safetensors.index.json",
}

KINDS: list[Callable[[bytes], None]] = [
    safetensors,
    header,
    archive,
    pickled,
    gguf,
    config,
    index,
    model,
]

ONE = {**LLAMA, "num_hidden_layers": 1}
TENSORS = llama_tensors(ONE, dtype=torch.bfloat16, bias=False)
PLAIN = save(TENSORS, metadata={"format": "pt"})
WEIGHTS = len(PLAIN) - 8 - struct.unpack("<Q", PLAIN[:8])[0]
buffer = io.BytesIO()
torch.save(
    {"model": TENSORS, "list": [torch.ones(3), (1, "a")], "view": torch.ones(4, 4).T}, buffer
)
ARCHIVE = buffer.getvalue()


def seeds() -> list[bytes]:
    """Write small files of every kind with their usual writers."""
    head = PLAIN[8 : len(PLAIN) - WEIGHTS]
    with zipfile.ZipFile(io.BytesIO(ARCHIVE)) as zipped:
        pickle = next(zipped.read(name) for name in zipped.namelist() if name.endswith("data.pkl"))
    test_gguf_file.write(home / "seed.gguf", tokens=3, rope_freqs__weight=test_gguf_file.DIVISORS)
    model = (home / "seed.gguf").read_bytes()
    write(home / "seed", TENSORS, ONE, shards=2)
    sharded = (home / "seed" / "model.safetensors.index.json").read_bytes()
    # The scores of 70,000 tokens are skipped unread.
    found = [(0, PLAIN), (1, head), (2, ARCHIVE), (3, pickle), (4, model[: 2**14]), (6, sharded)]
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for more in (
        {},
        {"rope_scaling": scaling},
        {"text_config": dict(LLAMA)},
        {"dim": 32, "n_heads": 4},
    ):
        found.append((5, json.dumps({**ONE, **more}).encode()))
    found += [(5, json.dumps(each.config).encode()) for each in MODELS]
    found += [(7, random.Random(n).randbytes(40)) for n in range(40)]
    return [bytes([kind]) + data for kind, data in found]


def files() -> set[Path]:
    return {path for path in home.rglob("*") if not path.is_relative_to(out)}


calls = itertools.count()


def test(data: bytes) -> None:
    if not data:
        return
    if next(calls) % 50 == 0:
        gc.collect()  # the errors of large configurations keep tensors alive until then
    for old in (source, out):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    kind = KINDS[data[0] % len(KINDS)]
    source.mkdir()
    if kind in (config, index, model):
        shutil.copytree(home / "seed", source, dirs_exist_ok=True)
        if kind is not index:
            (source / "model.safetensors.index.json").unlink()
            for shard in source.glob("model-*"):
                shard.unlink()
            (source / "model.safetensors").write_bytes(PLAIN)
    before = files()
    try:
        kind(data[1:])
    except OSError:
        pass
    except REPORTED as error:
        if not re.fullmatch(
            r"\[[\w.]+\] .*\.", str(error)
        ):  # the form of all errors of the library
            raise
    made = {path for path in files() - before if path.parent != source or path.name not in WRITTEN}
    if made:
        raise AssertionError(f"files outside the result: {made}")


if __name__ == "__main__":
    start = seeds()
    # A file of 20 kB must not need more than 2 GB.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, used + 2**31))
    try:
        fuzzing.fuzz(chosen, test, start)
    finally:
        shutil.rmtree(home, ignore_errors=True)
