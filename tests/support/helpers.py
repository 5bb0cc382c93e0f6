"""Helpers for many test files: random tensors, exact matching of error messages, and a type."""

from __future__ import annotations

import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightrope.backends import cpu, use

#: The instruction sets of this machine; a compiled call of `on` cannot ask the library for them.
SETS = cpu.instruction_sets()

#: The folder of the checkout.
ROOT = Path(__file__).resolve().parents[2]

#: The fixture `output_of`, which runs a module, given its name and arguments.
Output: TypeAlias = Callable[..., dict[str, Any]]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return normal random numbers; equal shapes and seeds give equal numbers in each dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def refused(kind: type[Exception], text: str) -> AbstractContextManager[object]:
    """Expect an error of this type with exactly this text."""
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


Call: TypeAlias = Callable[[], object]


#: The form of every error about bad input: ``[rotate] x must … (x: float32[2, 8]).``
SENTENCE = re.compile(r"\[\w[\w.]*\] \S.*[^.…]\.")


def assert_form(error: Exception, kind: type[Exception], of: str = "") -> None:
    """Assert that an error about bad input is plain and one sentence, and names its operation.

    Args:
        kind: its exact type; a derived one would show a name of this library's own.
        of: the operation that it must name; "" for any.
    """
    text = str(error)
    assert type(error) is kind, repr(error)
    assert SENTENCE.fullmatch(text), text
    assert text.startswith(f"[{of}] ") or not of, text
    assert error.__suppress_context__ or error.__context__ is None, text


def assert_refused(kind: type[Exception], of: str, phrase: str, call: Call) -> None:
    """Assert that a call is refused by a sentence with this phrase, found anywhere in it.

    The phrase carries the rule; an "…" at either end is left out. What all texts have in common is checked by
    :func:`assert_form`.
    """
    with pytest.raises(kind, match=re.escape(phrase.strip("…"))) as caught:
        call()
    assert_form(caught.value, kind, of)


def on(backend: str | None, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function with a backend that is forced, by the CPU kernel for an instruction set, or with none."""
    if backend in SETS:
        cpu.use_instruction_set(backend)  # until the end of the test: see conftest.py
        backend = "cpu"
    with nullcontext() if backend is None else use(backend):
        return call(*arguments, **named)


def in_threads(*jobs: Callable[[], object]) -> None:
    """Call functions in a thread each, at the same time, and raise the first error of any of them."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> None:
        start.wait()
        job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(run, job) for job in jobs]:
            done.result()


def version_of(package: str) -> tuple[int, ...]:
    """Return the major and minor version of an installed package; (0, 0) without it."""
    try:
        parts = metadata.version(package).split(".")
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(parts[0]), int(parts[1])


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of files to `size` bytes, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python would cut the byte code of a module that is imported now, and other processes would read it.
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


def left_as_it_was(folder: Path, name: str, older: bool) -> None:
    """Assert that a folder is empty, or holds the older file alone."""
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == (
        {name: "older"} if older else {}
    )


class Watcher(TorchDispatchMode):
    """A dispatch mode that lists the operators that it sees, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Scaled(torch.autograd.Function):
    """Returns x unchanged, with its gradient times a factor: a fault that only gradients show."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.factor * gradient, None


class Copies(TorchFunctionMode):
    """Lists each torch function that copies data between the host and a device, for which meta tensors stand.

    It is a torch function mode, because dispatch modes do not see what is cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {x.device.type for x in tree_leaves(each) if isinstance(x, torch.Tensor)}
            for each in ((args, kwargs), result)
        )
        name = getattr(func, "__name__", str(func))
        made_here = name in ("tensor", "as_tensor", "from_numpy") and "meta" in made
        if made_here or (made and given and made != given):
            self.found.append(name)
        return result
