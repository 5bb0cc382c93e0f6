"""Write the table of known rotary functions: `python -m benchmarks.known`.

Every class of the installed model files of transformers and diffusers is searched as `patch` does, and what is
recognised is written to `src/tightrope/integrations/known.json`. The table is only a short cut: see
`tightrope.integrations._known`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tightrope.integrations import _find, _known, _recognise

LIBRARIES = {"transformers": "transformers.models", "diffusers": "diffusers.models"}


def main() -> None:
    """Recognise every rotary function and write the table."""
    warnings.simplefilter("ignore")
    entries = _known._entries()
    entries.clear()
    for library, package in LIBRARIES.items():
        for module in modules(package):
            for cls in classes(module):
                found = _find.rotary(cls, accepts)
                for each in found:
                    accepts(each)
        print(f"{library}: {len(entries)} functions", file=sys.stderr)
    made = {key: entries[key].to_dict() for key in sorted(entries)}
    lines = [f'"{key}": {json.dumps(value, separators=(",", ":"))}' for key, value in made.items()]
    _known.TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def accepts(found: _find.Found) -> bool:
    """Recognise a function with each combination of constants."""
    if found.unseen:
        return False
    results = [
        _recognise.recognise_member(found.value, found.owner, each) for each in found.constants
    ]
    return all(results)


def modules(package: str) -> Iterator[ModuleType]:
    """Import the model files of a package that can be imported here."""
    parent = importlib.import_module(package)
    for info in pkgutil.walk_packages(parent.__path__, f"{package}."):
        name = info.name.rpartition(".")[2]
        if package.startswith("diffusers") or name.startswith("modeling_"):
            try:
                yield importlib.import_module(info.name)
            except Exception as error:  # noqa: BLE001  # what a file needs may be absent
                print(f"{info.name}: {error}".splitlines()[0], file=sys.stderr)


def classes(module: ModuleType) -> list[Any]:
    """The classes of modules and processors that a file defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


if __name__ == "__main__":
    main()
