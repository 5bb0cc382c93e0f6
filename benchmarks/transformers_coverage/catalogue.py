"""List the model types of the installed transformers and the rotary functions in their files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tightrope.forms import unwrapped
from tightrope.integrations._find import INNER, layers

# Names of functions and methods that rotate queries or keys. Not `rotate_half` and the like, which are
# helpers of such functions.
ROTARY = re.compile(
    r"^_?(vision_)?apply_\w*rotary\w*$|^rotate_queries_or_keys$|^_apply_rotary_embedding$"
)

# Endings of model classes, the preferred first: those with a language head run all other parts.
PREFERRED = (
    "ForConditionalGeneration",
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForCTC",
    "ForRNNT",
    "ForTDT",
    "Model",
)


@dataclass(frozen=True)
class ModelType:
    """A model type of transformers, and its modeling file with rotary functions."""

    name: str
    folder: str
    file: str

    @property
    def config_class(self) -> type[Any]:
        """The configuration class."""
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[self.name]

    @property
    def module(self) -> ModuleType:
        """The imported modeling module."""
        return importlib.import_module(f"transformers.models.{self.file[:-3].replace('/', '.')}")

    def model_classes(self) -> list[type[Any]]:
        """The model classes that take its configuration, the most complete first."""
        from transformers import PreTrainedModel

        module = self.module
        found = [
            value
            for name, value in vars(module).items()
            if inspect.isclass(value)
            and issubclass(value, PreTrainedModel)
            and value.__module__ == module.__name__
            and not name.endswith("PreTrainedModel")
            and getattr(value, "config_class", None) is self.config_class
        ]

        def rank(value: type[Any]) -> tuple[int, int]:
            ends = [i for i, end in enumerate(PREFERRED) if value.__name__.endswith(end)]
            return (ends[0] if ends else len(PREFERRED), len(value.__name__))

        return sorted(found, key=rank)


def models_folder() -> Path:
    """The folder of models in the installed transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ImportError("transformers is not installed: pip install transformers")
    return Path(spec.origin).parent / "models"


def named_functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a syntax tree: "Class.method", "f.<locals>.g" for one in a body."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from named_functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield f"{prefix}{child.name}", child
            yield from named_functions(child, f"{prefix}{child.name}{INNER}")
        else:
            yield from named_functions(child, prefix)


@cache
def rotary_names(path: Path) -> tuple[str, ...]:
    """Names of the rotary functions and methods of a file, `Class.method` for methods."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text if "rotary" in text or "rotate_" in text else "")
    return tuple(
        name
        for name, node in named_functions(tree)
        if ROTARY.match(node.name) and INNER not in name
    )


def catalogue() -> list[ModelType]:
    """Every model type whose folder has a modeling file with a rotary function."""
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING_NAMES,
        model_type_to_module_name,
    )

    root = models_folder()
    rotary = {}
    for folder in sorted({p.parent for p in root.rglob("modeling_*.py")}):
        for path in sorted(folder.glob("modeling_*.py")):
            if rotary_names(path):
                rotary[folder.relative_to(root).as_posix()] = path.relative_to(root).as_posix()
    named = {
        name: model_type_to_module_name(name).replace(".", "/") for name in CONFIG_MAPPING_NAMES
    }
    return [
        ModelType(name, folder, rotary[folder])
        for name, folder in sorted(named.items())
        if folder in rotary
    ]


def rotary_codes(module: ModuleType) -> dict[CodeType, str]:
    """The code object of each rotary function of a module, with its name; not of decorators around it."""
    found = {}
    for name in rotary_names(Path(module.__file__)) if module.__file__ else ():
        value: Any = module
        for part in name.split("."):
            value = inspect.getattr_static(value, part)
        *_, function = layers(unwrapped(value))  # type: ignore[arg-type]
        found[function.__code__] = name
    return found


def used_names(model: Any) -> frozenset[str]:
    """Every name in the methods of a model's modules and in the functions they call.

    Methods and functions of transformers count, those of torch do not.
    """
    classes = {k for module in model.modules() for k in type(module).__mro__ if _is_theirs(k)}
    values = [value for k in classes for value in vars(k).values()]
    codes: set[CodeType] = set()
    names: set[str] = set()
    while values:
        value = values.pop()
        for held in ("fget", "__func__", "__wrapped__"):
            if (inner := getattr(value, held, None)) is not None:
                values.append(inner)
        if not isinstance(value, FunctionType) or not _is_theirs(value) or value.__code__ in codes:
            continue
        names.add(value.__name__)
        todo = [value.__code__]
        while todo:
            code = todo.pop()
            codes.add(code)
            names.update(code.co_names)
            values += [value.__globals__.get(name) for name in code.co_names]
            todo += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(names)


def _is_theirs(value: Any) -> bool:
    return (value.__module__ or "").startswith("transformers.")
