"""Fixtures, and the mark `one_in`, for all test files. Helpers to import are in other files."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.support.command import python
from tests.support.helpers import ROOT, Output
from tightrope.backends import cpu

# Inductor would compile and run a program to see that the compiler knows the processor's instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture(autouse=True)
def _process_settings() -> Iterator[None]:
    """Restore threads, instruction set and torch's defaults (dtype, device) after each test; end its process group."""
    threads, instruction_set = torch.get_num_threads(), cpu.instruction_set()
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if instruction_set is not None:
        cpu.use_instruction_set(instruction_set)
    torch.set_default_dtype(dtype)
    if torch.get_default_device() != device:
        torch.set_default_device(None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _nothing_stays_patched() -> Iterator[None]:
    """Fail a test that leaves a model patched: its file's functions would be replaced in later tests."""
    yield
    patching = sys.modules.get("tightrope.patching._patch")
    if patching is not None and patching._slots:
        from tests.support.verified import undo_all

        gc.collect()  # a model that is gone leaves nothing
        left = undo_all()
        assert not left, f"the test leaves {', '.join(left)} replaced; call unpatch(model)"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector the modules and tests, which live until the end.

    Their million objects would otherwise be visited again and again, during collection and tests.
    `pytest_unconfigure` returns them to it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Clear the caches of torch.compile before and after a test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def output_of(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """Return a function that runs a module, and returns the JSON that it prints last.

    Each module runs once with the same arguments, also if the tests run in several processes. It runs
    without the interpreter.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers of this run

    def run(name: str, *arguments: str) -> dict[str, Any]:
        printed = folder / "-".join((name, *arguments))
        with FileLock(f"{printed}.lock"):
            if not printed.exists():
                done = python("-m", name, *arguments, cwd=ROOT, TRITON_INTERPRET="0")
                assert done.returncode == 0, done.stderr
                printed.write_text(done.stdout.splitlines()[-1], encoding="utf-8")
        result: dict[str, Any] = json.loads(printed.read_text(encoding="utf-8"))
        return result

    return run


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a path to leave out that does not exist: pytest would run the tests that have moved from it."""
    for path in config.getoption("ignore") or []:
        if not (config.invocation_params.dir / path).exists():
            raise pytest.UsageError(f"--ignore={path}: there is no such file or folder")
    for test in config.getoption("deselect") or []:
        if not (config.rootpath / test.partition("::")[0]).exists():
            raise pytest.UsageError(f"--deselect={test}: there is no such file")


def pytest_unconfigure() -> None:
    """Let the garbage collector free the modules when Python exits: Triton prints each that is left."""
    gc.unfreeze()


# The packages without which tests are skipped.
LIBRARIES = """accelerate comfy_kitchen diffusers einops gguf kernels liger_kernel matplotlib onnxruntime onnxscript
    playwright rotary_embedding_torch safetensors timm torchtitan transformers triton x_transformers""".split()
INSTRUCTION_SETS = {
    "avx512bf16": "AVX-512 with bfloat16",
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "neon": "NEON",
}
PROGRAMS = {
    "a C++ compiler": ("c++", "g++", "clang++"),
    "Chromium": ("chromium", "chromium-browser", "google-chrome"),
}


def missing() -> dict[str, list[str]]:
    """Return what this machine lacks, by kind; the tests that need it did not run, or ran without it."""
    sets = cpu.instruction_sets()
    lacking = [name for key, name in INSTRUCTION_SETS.items() if key not in sets]
    return {
        "instruction sets": lacking,
        "libraries": [name for name in LIBRARIES if find_spec(name) is None],
        "programs": [name for name, files in PROGRAMS.items() if not any(map(shutil.which, files))],
        "devices": [] if torch.cuda.is_available() else ["a GPU"],
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what this machine lacks, so that a reader knows what was not tested."""
    found = [f"{kind}: {', '.join(names)}" for kind, names in missing().items() if names]
    terminalreporter.write_line(
        f"Missing here, so tested with stand-ins or not at all: {'; '.join(found) or 'nothing'}"
    )


TOOLS = tuple(f"tests/{name}/" for name in ("tools", "benchmarks", "coverage", "repository"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in folders of tools; and for `@pytest.mark.one_in(n)`, all but one in n cases of a test as slow.

    The kept cases are drawn with the name of the test, without its file, as seed: they are always the
    same, also after a file has moved.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(TOOLS):
            item.add_marker("tools")
        if item.get_closest_marker("one_in"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, found in cases.items():
        (n,) = found[0].get_closest_marker("one_in").args
        found.sort(key=lambda item: item.nodeid)
        seed = test.partition("::")[2]
        drawn = random.Random(seed).sample(range(len(found)), math.ceil(len(found) / n))
        for index in set(range(len(found))) - set(drawn):
            found[index].add_marker("slow")


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
