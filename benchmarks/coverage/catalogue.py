"""List the rotary functions and the model classes in the source of an installed library."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tightrope.forms import unwrapped
from tightrope.integrations._find import INNER, Constants, codes, constants_of, neighbours
from tightrope.integrations._graft import Swap

from ..transformers_coverage.catalogue import named_functions
from ..transformers_coverage.comparing import Place


@dataclass(frozen=True)
class Library:
    """A library and the places of its models.

    Attributes:
        name: the name under which it is installed.
        folder: the folder of its models, in the package.
        rotary: a regular expression for the names of rotary functions and methods, "Class.method" for
            a method. Not helpers like `rotate_half`, and not functions that make angles.
        package: the package, if its name differs from that of the library.
        files: patterns of the files in the folder that are read.
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
    files: tuple[str, ...] = ("**/*.py",)
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


LIBRARIES = {
    each.name: each
    for each in (
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
        return module(self.library, self.file)

    def found(self) -> tuple[Any, type | None]:
        """The function, and the class whose method it is."""
        value = Swap(self.module.__name__, self.name).original()
        *owners, _last = self.name.split(".")
        if not owners or INNER in self.name or isinstance(value, staticmethod):
            return value, None
        owner: Any = self.module
        for each in owners:
            owner = vars(owner)[each]
        return value, owner

    @property
    def code(self) -> CodeType:
        """The code of the function."""
        return unwrapped(self.found()[0]).__code__  # type: ignore[no-any-return]

    def called(self) -> Iterator[CodeType]:
        """Yield the code of the functions that it calls by name or defines in its body."""
        function = unwrapped(self.found()[0])
        yield from list(codes(function.__code__))[1:]
        for _name, value in neighbours(function):
            yield from [code] if (code := getattr(unwrapped(value), "__code__", None)) else []

    def constants(self, value: Any) -> tuple[Constants, ...]:
        """The constants with which the files of the library that define or import it call it."""
        inner = INNER in self.name
        every = [self.file] if inner else sources(self.library)
        files = (f for f in every if f == self.file or self._imported_by(f))
        modules = [module(self.library, file).__name__ for file in files]
        found = dict.fromkeys(c for m in modules for c in constants_of(self.last, value, m))
        return tuple(found) or ((),)

    def _imported_by(self, file: str) -> bool:
        """Return whether a file imports the function, or the class whose method it is."""
        first = self.name.partition(".")[0]
        for node in ast.walk(sources(self.library)[file]):
            if isinstance(node, ast.ImportFrom) and any(n.name == first for n in node.names):
                # A file that needs other packages than those installed calls nothing.
                with contextlib.suppress(ImportError):
                    home = module(self.library, file).__package__
                    source = importlib.import_module("." * node.level + (node.module or ""), home)
                    return vars(source).get(first) is vars(self.module)[first]
        return False


@cache
def sources(library: Library) -> dict[str, ast.Module]:
    """The syntax tree of each file of models."""
    root = library.root
    paths = sorted({path for pattern in library.files for path in root.glob(pattern)})
    return {
        path.relative_to(root).with_suffix("").as_posix(): ast.parse(path.read_text("utf-8"))
        for path in paths
    }


def module(library: Library, file: str) -> ModuleType:
    """Import a file of models."""
    return importlib.import_module(f"{library.home}.{file.replace('/', '.')}")


@cache
def rotary(library: Library) -> tuple[Rotary, ...]:
    """Every rotary function of a library."""
    return tuple(
        Rotary(
            library, file, name, min([node.lineno, *(each.lineno for each in node.decorator_list)])
        )
        for file, tree in sources(library).items()
        for name, node in named_functions(tree)
        if re.search(library.rotary, name) or (file, name) in library.bodies
    )


@cache
def sizes(library: Library) -> dict[str, dict[str, Any]]:
    """The table of sizes of a library's models."""
    path = Path(__file__).with_name("diffusers.json" if library.base else "others.json")
    table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return table if library.base else table.get(library.name, {})


def model_classes(library: Library) -> dict[str, str]:
    """The file of each model class, by the name of the class."""
    if not library.base:
        return {name: entry["file"] for name, entry in sizes(library).items()}
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
