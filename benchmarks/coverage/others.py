"""Test the rotary functions of libraries other than transformers and diffusers: recognised, and to the bit?

``python -m benchmarks.coverage.others FOLDER --json rows.json`` reads the packages unpacked in FOLDER.
Only the files of :data:`LIBRARIES` are read, and only the definitions that their rotary functions reach
are executed, so that the libraries' own requirements need not be installed.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tightrope.forms import unwrapped
from tightrope.integrations import recognise
from tightrope.integrations._candidate import Candidate
from tightrope.integrations._find import constants_of
from tightrope.integrations._recognise import to_the_bit
from tightrope.integrations._run import replacement

from ..transformers_coverage.functions import _differing, _Spy, arguments


@dataclass(frozen=True)
class Library:
    """A file of a library with rotary functions.

    Attributes:
        name: the name of the library.
        file: the file, relative to the folder of the unpacked packages.
        functions: names in the file, "Class.method" for a method.
        callers: other files that call the functions, possibly with constants.
    """

    name: str
    file: str
    functions: tuple[str, ...]
    callers: tuple[str, ...] = ()


_TIMM = tuple(f"apply_rot_embed{each}" for each in ("", "_list", "_cat"))
_MEGATRON = (
    "_apply_rotary_pos_emb_bshd",
    "_apply_rotary_pos_emb_thd",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_with_cos_sin",
)
_SAM3 = ("apply_rotary_enc", "apply_rotary_enc_real")

LIBRARIES = (
    Library(
        "timm",
        "timm/layers/pos_embed_sincos.py",
        (*_TIMM, "apply_keep_indices_nlc"),
        tuple(
            f"timm/{each}.py"
            for each in (
                *("layers/attention", "layers/attention_pool2d", "models/eva", "models/naflexvit"),
                "models/vision_transformer_sam",
            )
        ),
    ),
    Library("litgpt", "litgpt/model.py", ("apply_rope", "apply_rope_interleave")),
    Library("x-transformers", "x_transformers/x_transformers.py", ("apply_rotary_pos_emb",)),
    Library(
        "rotary-embedding-torch",
        "rotary_embedding_torch/rotary_embedding_torch.py",
        ("apply_rotary_emb", "apply_learned_rotations"),
    ),
    Library(
        "torchtune",
        "torchtune/modules/position_embeddings.py",
        ("RotaryPositionalEmbeddings.forward", "VisionRotaryPositionalEmbeddings.forward"),
    ),
    Library(
        "torchtitan",
        "torchtitan/models/common/rope.py",
        ("ComplexRoPE.apply_rotary_emb", "CosSinRoPE.apply_rotary_emb"),
    ),
    Library("torchtitan (Flux)", "torchtitan/models/flux/model/layers.py", ("apply_rope",)),
    Library("megatron-core", "megatron/core/models/common/embeddings/rope_utils.py", _MEGATRON),
    Library("nanotron", "nanotron/models/llama.py", ("RotaryEmbedding.forward",)),
    Library("gpt-oss", "gpt_oss/torch/model.py", ("_apply_rotary_emb",)),
    Library("sam3", "sam3/sam/rope.py", _SAM3, ("sam3/sam/transformer.py",)),
    Library("sam3 (ViT)", "sam3/model/vitdet.py", _SAM3[:1]),
    Library("mistral_inference", "mistral_inference/rope.py", ("apply_rotary_emb",)),
    Library("llama_models", "llama_models/llama3/model.py", ("apply_rotary_emb",)),
    Library("DINOv3", "dinov3/layers/attention.py", ("rope_apply", "SelfAttention.apply_rope")),
)

# Dtypes of x and of the tables.
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)
_COLUMNS = ("library", "function", "constants", "status", "recognised", "reason")


def definitions(path: Path, names: set[str]) -> ModuleType:
    """The module of a file in which only these names, and what they reach, are defined.

    The bases of classes and annotations are left out, as they do not affect what functions compute.
    """
    tree = ast.parse(path.read_text())
    defined: dict[str, ast.stmt] = {}
    for node in _statements(tree.body):
        for name in _defines(node):
            defined.setdefault(name, node)
    module = ModuleType("others_" + path.with_suffix("").as_posix().replace("/", "_"))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    kept: list[ast.stmt] = []
    pending = sorted(names)
    while pending:
        node = defined.get(pending.pop())
        if node is not None and node not in kept:
            kept.append(_bare(node))
            pending += [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
            defined = {name: each for name, each in defined.items() if each is not node}
    kept.sort(key=lambda node: node.lineno)
    future = ast.parse("from __future__ import annotations").body
    for node in (*future, *kept):
        code = ast.Module([*future, node] if node not in future else [node], [])
        try:
            exec(compile(code, str(path), "exec"), vars(module))
        except (ImportError, NameError):
            continue  # a requirement that is not installed; a function that reads it fails
    return module


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.Try):
            yield from _statements(node.body)
        else:
            yield node


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(each.asname or each.name).partition(".")[0] for each in node.names]
    if isinstance(node, ast.Assign):
        return [each.id for each in node.targets if isinstance(each, ast.Name)]
    return []


def _bare(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.ClassDef):
        node.bases, node.keywords = [], []
        node.body = [each for each in node.body if isinstance(each, ast.FunctionDef)] or [
            ast.Pass()
        ]
    return node


def rows(library: Library, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each function of a library and each combination of constants."""
    path = folder / library.file
    if not path.exists():
        yield {
            "library": library.name,
            "function": "*",
            "status": "absent",
            "reason": "no such file",
        }
        return
    module = definitions(path, {name.partition(".")[0] for name in library.functions})
    callers = [module.__name__, *(_caller(folder / each) for each in library.callers)]
    for name in library.functions:
        holder, _, last = name.rpartition(".")
        value = vars(vars(module)[holder] if holder else module)[last]
        method = bool(holder) and not isinstance(value, staticmethod)
        found = [c for each in callers for c in constants_of(last, value, each)]
        for constants in dict.fromkeys(found):
            row = {"library": library.name, "function": name}
            yield row | {"constants": dict(constants)} | _one(value, method, constants)


def _caller(path: Path) -> str:
    module = ModuleType("others_" + path.with_suffix("").as_posix().replace("/", "_"))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    return module.__name__


def _one(value: Any, method: bool, constants: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The recognition of one function with constants, and the comparison with its replacement."""
    this = SimpleNamespace() if method else None
    function = unwrapped(value)
    recognition = to_the_bit(recognise(function, this, constants))
    candidate = recognition.candidate
    if candidate is None:
        return {"status": "left", "recognised": None, "reason": recognition.reason}
    try:
        compared = _compared(function, candidate, this)
    except Exception as error:  # noqa: BLE001  # third-party code can raise anything
        compared = {"status": "different", "reason": f"{type(error).__name__}: {error!s:.200}"}
    return compared | {"recognised": str(candidate)}


def _compared(function: Any, candidate: Candidate, this: object) -> dict[str, Any]:
    """Count the elements of results and gradients in which a function and its replacement differ."""
    make, rotated = arguments(candidate, this), candidate.call.rotated
    selves = () if this is None else (this,)
    found: dict[str, Any] = {}
    with _Spy() as spy:
        for dtypes in _DTYPES:
            runs = []
            for each in (function, replacement(function, [candidate])):
                x, values = (make(dtype) for dtype in dtypes)
                values |= {name: x[name].requires_grad_() for name in rotated}
                values.pop("self", None)
                result = each(*selves, **values, **dict(candidate.constants))
                ys = list(result) if len(rotated) > 1 else [result]
                generator = torch.Generator().manual_seed(1)
                weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in ys]
                grads = torch.autograd.grad(ys, [values[name] for name in rotated], weights)
                runs.append((ys, list(grads)))
            key = ", ".join(str(dtype)[6:] for dtype in dtypes)
            found[key] = [_differing(*both) for both in zip(*runs)]
    equal = spy.calls >= 2 * len(rotated) and not any(map(any, found.values()))
    reason = "equal to the bit" if equal else "differs, or bypasses the operator"
    status = "equal" if equal else "different"
    return {"status": status, "reason": reason, "operator_calls": spy.calls, **found}


def table(found: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [_COLUMNS, ["---"] * len(_COLUMNS)]
    lines += [[_cell(row.get(column)) for column in _COLUMNS] for row in found]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return "" if value is None else str(value)


def main() -> None:
    """Print the table; with --json, also write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="the folder with the unpacked packages")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    found = [row for library in LIBRARIES for row in rows(library, options.folder)]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
