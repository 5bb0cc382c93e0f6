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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tightrope.patching import _find
from tightrope.patching._find import Member

# The separator of a function and one in its body, in qualified names.
INNER = ".<locals>."


@dataclass(frozen=True)
class Library:
    """A library and the places of its models.

    Attributes:
        name: the name under which it is installed.
        folder: the folder of its models, in the package.
        rotary: a regular expression for the names of rotary functions and methods, "Class.method" for
            a method. Not helpers like `rotate_half`, and not functions that make angles.
        package: the package, if its name differs from that of the library.
        files: a pattern for the files in the folder that are read.
        base: the base of model classes. If empty, the table of sizes lists the models.
        all_of: a folder in `folder` whose every model class is listed. Of other folders, those in
            files with rotary functions are.
        bodies: methods that rotate in their own body: (file, name).
        stand_ins: packages that its files import and that need not be installed, separated by spaces.
        absent: the reason why it cannot be measured if it is not there.
    """

    name: str
    folder: str = ""
    rotary: str = r"apply(?!.*mrope)[^.]*(rot|rope)[^.]*$"
    package: str = ""
    files: str = "**/*.py"
    base: str = ""
    all_of: str = ""
    bodies: tuple[tuple[str, str], ...] = ()
    stand_ins: str = ""
    absent: str = "absent: neither installed nor unpacked in the folder"

    @property
    def home(self) -> str:
        """The package of its models."""
        parts = self.package or self.name.replace("-", "_"), *filter(None, self.folder.split("/"))
        return ".".join(parts)

    @property
    def root(self) -> Path:
        """The folder of models.

        Raises:
            ImportError: the library is neither installed nor in a folder of `sys.path`.
        """
        package, *folders = self.home.split(".")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"{self.name} is not installed: pip install {self.name}")
        return Path(spec.submodule_search_locations[0], *folders)

    def module_name(self, file: str) -> str:
        """The module of a file of models."""
        return f"{self.home}.{file.replace('/', '.')}"


TRANSFORMERS = Library(
    "transformers",
    folder="models",
    rotary=r"apply(?!.*mrope)[^.]*(rot|rope)[^.]*$|\brotate_queries_or_keys$",
    files="**/modeling_*.py",
)
LIBRARIES = {
    each.name: each
    for each in (
        TRANSFORMERS,
        Library(
            "diffusers",
            folder="models",
            rotary=r"apply(?!.*mrope)[^.]*(rot|rope)[^.]*$|\b(rope_apply|_rotate_axis|_apply_ucpe_transform)$",
            base="ModelMixin",
            all_of="transformers",
            bodies=(
                ("autoencoders/autoencoder_kl_minimax_h3", "MiniMaxH3VideoAttnProcessor.__call__"),
                (
                    "autoencoders/ltx2_diffusion_decoder",
                    "LTX2VideoVaeRotaryPosEmbed3D._rotate_axis",
                ),
                ("transformers/transformer_cosmos3", "Cosmos3AttnProcessor.__call__"),
                ("transformers/transformer_ideogram4", "Ideogram4AttnProcessor.__call__"),
            ),
        ),
        Library("timm", stand_ins="torchvision"),
        Library("litgpt", stand_ins="lightning lightning_utilities psutil"),
        Library("x-transformers"),
        Library("rotary-embedding-torch", rotary=r"apply\w*rot|rotate_queries"),
        Library(
            "torchtune",
            rotary=r"RotaryPositionalEmbeddings\.forward|RoPE\.forward",
            stand_ins="torchao torchdata datasets hf_transfer omegaconf sentencepiece tiktoken blobfile",
        ),
        Library(
            "torchtitan",
            folder="models",
            rotary=r"(Complex|CosSin)RoPE\.apply|\bapply_rope$",
            stand_ins="spmd_types tyro torchdata datasets fla",
        ),
        Library("megatron-core", package="megatron", folder="core"),
        Library(
            "nanotron",
            folder="models",
            rotary=r"apply\w*rot|RotaryEmbedding\.forward",
            stand_ins="flash_attn dacite nanotron.logging nanotron.models.base",
        ),
        Library("gpt-oss", rotary=r"apply\w*rot|\._rotate$"),
        Library("sam3", stand_ins="iopath ftfy torchvision pycocotools psutil"),
        Library("mistral_inference", stand_ins="xformers simple_parsing"),
        Library("llama_models", stand_ins="fairscale torchvision"),
        Library(
            "dinov3",
            rotary=r"apply\w*rope|rope_apply",
            absent="absent: the package index has no package of this name",
        ),
    )
}

# The place of a function: file, first line, name. Copies of the function have the same place.
Place = tuple[str, int, str]


def label(module: str, name: str) -> str:
    """`file.function`, the name under which calls are counted; without the "modeling_" of transformers' files.

    >>> label("transformers.models.llama.modeling_llama", "apply_rotary_pos_emb")
    'llama.apply_rotary_pos_emb'
    """
    return f"{module.rpartition('.')[2].removeprefix('modeling_')}.{name}"


@dataclass(frozen=True)
class Rotary:
    """A rotary function in the source of a library.

    Attributes:
        file: the file, below the folder of models and without suffix.
        name: "Class.method", "function", or one of these, `.<locals>.` and the name of a function in
            its body.
    """

    library: Library
    file: str
    name: str

    @property
    def label(self) -> str:
        """The name under which its calls are counted."""
        return label(self.library.module_name(self.file), self.name)

    @property
    def last(self) -> str:
        """The function's own name."""
        return self.name.rpartition(".")[2]

    def found(self) -> Member:
        """The function in its place; the module is imported.

        Raises:
            LookupError: it is not there, or reads variables of the function around it.
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


def _code(function: Any) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


@cache
def sources(library: Library) -> dict[str, ast.Module]:
    """The syntax tree of each file of models; an empty one if the file cannot mention rotary embeddings."""
    root = library.root
    found = {}
    for path in sorted(root.glob(library.files)):
        text = path.read_text("utf-8")
        rotates = re.search("rotary|rope|rotate_|rot_", text, re.IGNORECASE)
        name = path.relative_to(root).with_suffix("").as_posix()
        found[name] = ast.parse(text if rotates or library.base else "")
    return found


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


@cache
def rotary(library: Library) -> tuple[Rotary, ...]:
    """Every rotary function of a library."""
    return tuple(
        Rotary(library, file, name)
        for file, tree in sources(library).items()
        for name in _functions(tree)
        if re.search(library.rotary, name) or (file, name) in library.bodies
    )


def places(library: Library) -> dict[Place, str]:
    """The place of each rotary function in the files that are imported, with the label of the function."""
    found = {}
    for each in rotary(library):
        if library.module_name(each.file) in sys.modules:
            # An import that failed leaves no function.
            with contextlib.suppress(AttributeError, KeyError, StopIteration, ImportError):
                found[each.place] = each.label
    return found


@cache
def table(library: Library) -> dict[str, dict[str, Any]]:
    """The table of sizes of a library's models; see `building`."""
    own = Path(__file__).with_name(f"{library.name}.json")
    path = own if own.exists() else own.with_name("others.json")
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found if path == own else found.get(library.name, {})


@cache
def catalogued(library: Library) -> dict[str, str]:
    """The file of each model: by its type for transformers, by the name of its class for other libraries."""
    if library is TRANSFORMERS:
        from transformers.models.auto import configuration_auto as auto

        # Of several files of a folder, the last.
        rotating = {each.file.rpartition("/")[0]: each.file for each in rotary(library)}
        folders = {
            name: auto.model_type_to_module_name(name).replace(".", "/")
            for name in auto.CONFIG_MAPPING_NAMES
        }
        return {name: rotating[f] for name, f in sorted(folders.items()) if f in rotating}
    if not library.base:
        return {name: entry["file"] for name, entry in table(library).items()}
    files = {each.file for each in rotary(library)}
    return {
        node.name: file
        for file, tree in sources(library).items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(library.base in ast.unparse(base) for base in node.bases)
        and (file.startswith(f"{library.all_of}/") or file in files)
    }


def mentions(library: Library, file: str) -> bool:
    """Return whether a file mentions rotary embeddings at all."""
    return bool(re.search(r"rotary|rope", ast.unparse(sources(library)[file]), re.IGNORECASE))


def used_names(model: Any) -> set[str]:
    """Every name in the methods of a model's modules, and in the functions of their files that these name."""
    classes = _find.classes_of(model)
    return _find._names(classes, [sys.modules[name] for name in {c.__module__ for c in classes}])
