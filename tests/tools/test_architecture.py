"""The public names of the library that the tools use, and the private ones in a list that shrinks."""

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec

from tests.support.helpers import ROOT

SOURCE = ROOT / "src" / "tightrope_tools"

# Names of the library that are not public and that the tools use; the list may only shrink. A copy or a public name
# would be no better: errors have one form, a checkpoint and its records are read as for a spec, and spellings of keys,
# families and pairs of channels are known to the reader.
ALLOWED = """
    _errors.bad_type _errors.bad_value _errors.integer _errors.public angles.cos_sin angles.phase_at config.recorded
    config.source_of config.files.ELSEWHERE config.files.NAMES config.files.Record
    config.files.load config.files.url_in config.formats.is_megatron config.formats.is_meta config.keys.HEADS
    config.keys.LAYERS_WITHOUT_ATTENTION config.keys.PAIRING stacks.named
""".split()


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # inside of what is no package
        return False


def names_used(text: str) -> Iterator[str]:
    """Yield each name of the library that a file imports, or takes from a module that it imports."""
    tree, modules = ast.parse(text), dict[str, str]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "level", 0):
            continue
        start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = start + alias.name
            if name.split(".")[0] == "tightrope" and is_module(name):
                modules[alias.asname or alias.name] = name
            elif name.startswith("tightrope."):
                yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            name = f"{modules[ast.unparse(node.value)]}.{node.attr}"
            if not is_module(name):
                yield name


def is_public(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    hidden = any(part.startswith("_") for part in module.split("."))
    listed = attribute in getattr(importlib.import_module(module), "__all__", ())
    return not hidden and (listed or attribute == "__file__")


def test_the_tools_use_public_names_of_the_library_and_a_few_others() -> None:
    used = {name for path in SOURCE.rglob("*.py") for name in names_used(path.read_text("utf-8"))}
    assert {name for name in used if not is_public(name)} == {f"tightrope.{n}" for n in ALLOWED}
