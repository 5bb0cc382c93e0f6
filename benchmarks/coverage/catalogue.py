"""List the rotary functions and the model classes in the source of an installed library."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tightrope.integrations._find import INNER, Constants, constants_of
from tightrope.integrations._graft import Swap

from ..transformers_coverage.comparing import Place


@dataclass(frozen=True)
class Library:
    """A library and the places of its models.

    Attributes:
        name: the package.
        folder: the folder of its models, in the package.
        rotary: a regular expression for the names of rotary functions and methods. Not helpers like
            `rotate_half`, and not functions that make angles.
        base: the base of model classes.
        all_of: a folder in `folder` whose every model class is listed. Of other folders, those in
            files with rotary functions are.
        bodies: methods that rotate in their own body: (file, name).
    """

    name: str
    folder: str
    rotary: str
    base: str
    all_of: str
    bodies: tuple[tuple[str, str], ...] = ()

    @property
    def root(self) -> Path:
        """The folder of models."""
        spec = importlib.util.find_spec(self.name)
        if spec is None or spec.origin is None:
            raise ImportError(f"{self.name} is not installed: pip install {self.name}")
        return Path(spec.origin).parent / self.folder


LIBRARIES = {
    "diffusers": Library(
        name="diffusers",
        folder="models",
        rotary=r"apply(?!.*mrope).*(rot|rope)|^rope_apply$|^_rotate_axis$|^_apply_ucpe_transform$",
        base="ModelMixin",
        all_of="transformers",
        bodies=(
            ("autoencoders/autoencoder_kl_minimax_h3", "MiniMaxH3VideoAttnProcessor.__call__"),
            ("transformers/transformer_cosmos3", "Cosmos3AttnProcessor.__call__"),
            ("transformers/transformer_ideogram4", "Ideogram4AttnProcessor.__call__"),
        ),
    )
}


@dataclass(frozen=True)
class Rotary:
    """A rotary function in the source of a library.

    Attributes:
        file: the file, below the folder of models and without suffix.
        name: "Class.method", "function", or one of these, `.<locals>.` and the name of a function in
            its body.
        line: the first line, decorators included.
    """

    library: Library
    file: str
    name: str
    line: int

    @property
    def last(self) -> str:
        """The function's own name."""
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> Place:
        """The place of its code, and of all copies of the code."""
        return str(self.library.root / f"{self.file}.py"), self.line, self.last

    @property
    def module(self) -> ModuleType:
        """The module that defines it."""
        return _module(self.library, self.file)

    def found(self) -> tuple[Any, type | None]:
        """The function, and the class whose method it is."""
        value = Swap(self.module.__name__, self.name, ()).original()
        *owners, _last = self.name.split(".")
        if not owners or INNER in self.name or isinstance(value, staticmethod):
            return value, None
        owner: Any = self.module
        for each in owners:
            owner = vars(owner)[each]
        return value, owner

    def constants(self, value: Any) -> tuple[Constants, ...]:
        """The constants with which the files of the library that define or import it call it."""
        files = (f for f in sources(self.library) if f == self.file or self._imported_by(f))
        modules = (_module(self.library, file).__name__ for file in files)
        found = dict.fromkeys(c for m in modules for c in constants_of(self.last, value, m))
        return tuple(found) or ((),)

    def _imported_by(self, file: str) -> bool:
        home = self.file.rpartition("/")[2]
        return any(
            isinstance(node, ast.ImportFrom)
            and (node.module or "").rpartition(".")[2] == home
            and any(name.name == self.last for name in node.names)
            for node in ast.walk(sources(self.library)[file])
        )


@cache
def sources(library: Library) -> dict[str, ast.Module]:
    """The syntax tree of each file of models."""
    root = library.root
    return {
        path.relative_to(root).with_suffix("").as_posix(): ast.parse(path.read_text("utf-8"))
        for path in sorted(root.rglob("*.py"))
    }


def _module(library: Library, file: str) -> ModuleType:
    return importlib.import_module(f"{library.name}.{library.folder}.{file.replace('/', '.')}")


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield f"{prefix}{child.name}", child
            yield from _functions(child, f"{prefix}{child.name}{INNER}")
        else:
            yield from _functions(child, prefix)


@cache
def rotary(library: Library) -> tuple[Rotary, ...]:
    """Every rotary function of a library."""
    return tuple(
        Rotary(
            library, file, name, min([node.lineno, *(each.lineno for each in node.decorator_list)])
        )
        for file, tree in sources(library).items()
        for name, node in _functions(tree)
        if re.search(library.rotary, node.name) or (file, name) in library.bodies
    )


def model_classes(library: Library) -> dict[str, str]:
    """The file of each model class, by the name of the class."""
    rotating = {each.file for each in rotary(library)}
    return {
        node.name: file
        for file, tree in sources(library).items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(library.base in ast.unparse(base) for base in node.bases)
        and (file.startswith(f"{library.all_of}/") or file in rotating)
    }


def mentions(library: Library, file: str) -> bool:
    """Return whether a file mentions rotary embeddings at all."""
    return bool(re.search(r"rotary|rope", ast.unparse(sources(library)[file]), re.IGNORECASE))


def model_class(library: Library, name: str, file: str) -> type[Any]:
    """The model class with a name."""
    return vars(_module(library, file))[name]  # type: ignore[no-any-return]
