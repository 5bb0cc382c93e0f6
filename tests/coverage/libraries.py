"""The libraries, and the rotary functions and models in the source of each."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tightrope.patching import _find
from tightrope.patching._find import Member

FOLDER = Path(__file__).parent
# The separator of a function and one in its body, in qualified names.
INNER = ".<locals>."


@dataclass(frozen=True, eq=False)
class Library:
    """A library and the places of its models, as `libraries.json` says.

    Attributes:
        name: the name under which it is installed.
        folder: the folder of its models, in the package.
        rotary: a regular expression for the names of rotary functions and methods, "Class.method" for a method. Not
            helpers like `rotate_half`, and not functions that make angles.
        package: the package, if its name differs from that of the library.
        files: a pattern for the files in the folder that are read.
        base: the base of model classes. If empty, the table of small models lists the models.
        all_of: a folder in `folder` whose every model class is listed. Of other folders, those in files with rotary
            functions are.
        bodies: methods that rotate in their own body: [file, name].
        stand_ins: packages that its files import and that need not be installed.
    """

    name: str
    folder: str = ""
    rotary: str = r"apply(?!.*mrope)[^.]*(rot|rope)[^.]*$"
    package: str = ""
    files: str = "**/*.py"
    base: str = ""
    all_of: str = ""
    bodies: Sequence[Sequence[str]] = ()
    stand_ins: Sequence[str] = ()

    def module_name(self, file: str = "") -> str:
        """The module of a file of models; the package of all files."""
        parts = self.package or self.name.replace("-", "_"), self.folder, file
        return ".".join(filter(None, parts)).replace("/", ".")

    @cached_property
    def sources(self) -> dict[str, ast.Module]:
        """The syntax tree of each file of models; an empty one if the file cannot mention rotary embeddings."""
        package, *folders = self.module_name().split(".")
        spec: Any = importlib.util.find_spec(package)
        root, found = Path(spec.submodule_search_locations[0], *folders), {}
        for path in sorted(root.glob(self.files)):
            text = path.read_text("utf-8")
            rotates = re.search("rotary|rope|rotate_|rot_", text, re.IGNORECASE)
            name = path.relative_to(root).with_suffix("").as_posix()
            found[name] = ast.parse(text if rotates or self.base else "")
        return found

    @cached_property
    def functions(self) -> list[Rotary]:
        """Every rotary function."""
        return [
            Rotary(self, file, name)
            for file, tree in self.sources.items()
            for name in _functions(tree)
            if re.search(self.rotary, name) or [file, name] in self.bodies
        ]

    @cached_property
    def small(self) -> dict[str, dict[str, Any]]:
        """The table of small models; see `building`."""
        path = FOLDER / "models" / f"{self.name}.json"
        found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return found

    @cached_property
    def models(self) -> dict[str, str]:
        """The file of each model: by its type for transformers, by the name of its class for other libraries."""
        if not self.base and self is not TRANSFORMERS:
            return {name: self.small[name]["file"] for name in sorted(self.small)}
        files = {each.file for each in self.functions}
        if self is TRANSFORMERS:
            from transformers.models.auto import configuration_auto as auto

            # Of several files of a folder, the last.
            rotating = {file.rpartition("/")[0]: file for file in sorted(files)}
            folders = {
                name: auto.model_type_to_module_name(name).replace(".", "/")
                for name in auto.CONFIG_MAPPING_NAMES
            }
            return {name: rotating[f] for name, f in sorted(folders.items()) if f in rotating}
        found = {
            node.name: file
            for file, tree in self.sources.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and self.base in " ".join(map(ast.unparse, node.bases))
            if file.startswith(f"{self.all_of}/") or file in files
        }
        return dict(sorted(found.items()))

    def mentions(self, file: str) -> bool:
        """Return whether a file mentions rotary embeddings at all."""
        return bool(re.search(r"rotary|rope", ast.unparse(self.sources[file]), re.IGNORECASE))

    def places(self) -> dict[Place, str]:
        """The place of each rotary function in the files that are imported, with the label of the function."""
        found = {}
        for each in self.functions:
            if self.module_name(each.file) in sys.modules:
                # An import that failed leaves no function.
                with contextlib.suppress(AttributeError, KeyError, ImportError):
                    found[each.place] = each.label
        return found


# The place of a function: file, first line, name. Copies of the function have the same place.
Place = tuple[str, int, str]


@dataclass(frozen=True)
class Rotary:
    """A rotary function in the source of a library.

    Attributes:
        file: the file, below the folder of models and without suffix.
        name: "Class.method", "function", or one of these, `.<locals>.` and the name of a function in its body.
    """

    library: Library
    file: str
    name: str

    @property
    def label(self) -> str:
        """The name under which its calls are counted."""
        return label(self.library.module_name(self.file), self.name)

    def found(self) -> Member:
        """The function in its place; the module is imported.

        Raises:
            KeyError: it is not there, or reads variables of the function around it.
        """
        owner: Any = importlib.import_module(self.library.module_name(self.file))
        outer, _, name = self.name.replace(INNER, ".").rpartition(".")
        for part in filter(None, outer.split(".")):
            owner = vars(owner)[part]
        if INNER in self.name:
            owner = inspect.unwrap(getattr(owner, "__func__", owner))
            return Member(owner, name, _find.inner_functions(owner)[name])
        return Member(owner, name, vars(owner)[name])

    @cached_property
    def code(self) -> CodeType:
        """Its code, without decorators; it stays that of the original after `patch`."""
        return _code(self.found().function())

    @property
    def place(self) -> Place:
        """The place of its code, and of all copies of the code."""
        return self.code.co_filename, self.code.co_firstlineno, self.code.co_name

    def called(self) -> Iterator[CodeType]:
        """Yield the code of the functions that it calls by name or defines in its body."""
        function = inspect.unwrap(self.found().function())
        yield from _find.inner_functions(function).values()
        values = (function.__globals__.get(name) for name in _find.names_in(function))
        yield from (_code(value) for value in values if isinstance(value, FunctionType))


def label(module: str, name: str) -> str:
    """`file.function`, the name under which calls are counted; without the "modeling_" of transformers' files.

    >>> label("transformers.models.llama.modeling_llama", "apply_rotary_pos_emb")
    'llama.apply_rotary_pos_emb'
    """
    return f"{module.rpartition('.')[2].removeprefix('modeling_')}.{name}"


def _code(function: Any) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


def _functions(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the functions of a syntax tree: "Class.method", "f.<locals>.g" for one in a body."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield f"{prefix}{child.name}"
            yield from _functions(child, f"{prefix}{child.name}{INNER}")
        else:
            yield from _functions(child, prefix)


LIBRARIES = {
    name: Library(name, **facts)
    for name, facts in json.loads((FOLDER / "libraries.json").read_text("utf-8")).items()
}
TRANSFORMERS = LIBRARIES["transformers"]
