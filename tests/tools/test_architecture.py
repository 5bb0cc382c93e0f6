"""The public names of the library that the tools use, and the private ones in a list that shrinks."""

import ast
import importlib
from collections.abc import Iterator

from tests.support.helpers import ROOT

SOURCE = ROOT / "src" / "tightrope_tools"

# Names of the library that are not public and that the tools use -> why neither a copy nor a public name is
# better. The list may only shrink: a later issue replaces a part of it.
ALLOWED = {
    "_errors": (
        "bad_type bad_value integer public",
        "one sentence for all errors, and none inside tightrope's own calls",
    ),
    "angles": ("cos_sin phase_at", "users rotate; only `inspect` looks at single angles"),
    "config": (
        "recorded source_of",
        "the layout of a checkpoint and the record of a conversion are read as for the spec",
    ),
    "config.families": ("FAMILIES", "the table of families; Provenance could name the family"),
    "config.files": (
        "ELSEWHERE NAMES Record load url_in",
        "the writer of a record of a conversion and its reader share the file's name and its checks",
    ),
    "config.formats": ("is_megatron is_meta", "Provenance could name the format"),
    "config.keys": (
        "HEADS LAYERS_WITHOUT_ATTENTION PAIRING",
        "spellings of a key that the reader knows; Provenance could have the values",
    ),
    "config.source": ("Source", "the type that `source_of` returns"),
    "channels": ("join_pairs split_pairs", "pairs of channels, as the operator splits them"),
    "stacks": ("named", "`stacks.get` puts its own name into the sentence of an error"),
}

FILES = {path.relative_to(SOURCE): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}


def names_used(text: str) -> Iterator[str]:
    """Yield each name of the library that a file imports, or takes from a module that it imports."""
    tree = ast.parse(text)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tightrope":
                    modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] != "tightrope":
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if is_module(name):
                    modules[alias.asname or alias.name] = name
                else:
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            name = f"{modules[ast.unparse(node.value)]}.{node.attr}"
            if not is_module(name):
                yield name


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def is_public(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    hidden = any(part.startswith("_") for part in module.split("."))
    listed = attribute in getattr(importlib.import_module(module), "__all__", ())
    return not hidden and (listed or attribute == "__file__")


def test_the_tools_use_public_names_of_the_library_and_a_few_others() -> None:
    used = {name for text in FILES.values() for name in names_used(text)}
    allowed = {
        f"tightrope.{module}.{name}"
        for module, (names, _) in ALLOWED.items()
        for name in names.split()
    }
    assert {name for name in used if not is_public(name)} == allowed
    assert len(allowed) <= 30
