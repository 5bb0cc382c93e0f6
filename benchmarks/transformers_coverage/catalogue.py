"""List the model types of the installed transformers and the rotary functions in their files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

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


@cache
def rotary_names(path: Path) -> tuple[str, ...]:
    """Names of the rotary functions and methods of a file, `Class.method` for methods."""
    found: list[str] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef) and ROTARY.match(child.name):
                found.append(prefix + child.name)

    text = path.read_text(encoding="utf-8")
    if "rotary" in text or "rotate_" in text:
        visit(ast.parse(text), "")
    return tuple(found)


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
    """The code object of each rotary function of a module, with its name."""
    if module.__file__ is None:
        return {}
    found = {}
    for name in rotary_names(Path(module.__file__)):
        value: Any = module
        for part in name.split("."):
            value = inspect.getattr_static(value, part)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        value = inspect.unwrap(value)
        # A decorator of transformers may have wrapped the function in a module.
        if not isinstance(value, FunctionType):
            value = _held(value)
        if value is not None:
            found[value.__code__] = name
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


def _held(value: Any) -> FunctionType | None:
    closure = getattr(getattr(type(value), "forward", None), "__closure__", None) or ()
    functions = [c.cell_contents for c in closure if isinstance(c.cell_contents, FunctionType)]
    return functions[0] if functions else None
