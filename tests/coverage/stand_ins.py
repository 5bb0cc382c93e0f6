"""Stand-ins for packages that a library imports but does not rotate with, so that they need not be installed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class Base:
    """The base of classes that inherit from a class of a stand-in."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class Anything:
    """A class, a value, a function whose result is not used, or a decorator that changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, Anything())

    def __call__(self, first: Any = None, *_: Any, **__: Any) -> Any:
        """Return the first argument if it is a function, as a decorator does."""
        return first if callable(first) else self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (Base,)

    def __instancecheck__(self, _: Any) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __getitem__ = __or__


class _Module(ModuleType):
    __getattr__ = Anything.__getattr__  # type: ignore[assignment]


def _linear(inputs: int, outputs: int, bias: bool = True, **_: Any) -> torch.nn.Module:
    return torch.nn.Linear(inputs, outputs, bias)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
    """Attend in the layout (batch, seq, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


# The names in stand-ins that compute something: the parts of fairscale on one device, and attention of xformers.
REAL: dict[str, dict[str, Any]] = {
    "fairscale.nn.model_parallel.initialize": {"get_model_parallel_world_size": lambda: 1},
    "fairscale.nn.model_parallel.layers": {
        "ColumnParallelLinear": _linear,
        "RowParallelLinear": _linear,
        "VocabParallelEmbedding": lambda n, width, **_: torch.nn.Embedding(n, width),
    },
    "xformers.ops.fmha": {"memory_efficient_attention": _attention},
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a stand-in for each of these modules, and for their submodules."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Return the place of a stand-in; None for other modules."""
        if any(f"{fullname}.".startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the stand-in."""
        made = _Module(spec.name)
        vars(made).update(REAL.get(spec.name, {}))
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


@contextmanager
def installed(names: Sequence[str]) -> Iterator[None]:
    """Import stand-ins for those of these packages that are not installed.

    "package.module" is replaced by a stand-in even if it exists.
    """
    finder = Finder([n for n in names if "." in n or importlib.util.find_spec(n) is None])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            del sys.modules[name]
