"""Imports follow the contracts in pyproject.toml, `import tightrope` stays light, and rules that torch sets for the source."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

import tightrope
from tests.support.command import python
from tests.support.helpers import ROOT

SOURCE = ROOT / "src" / "tightrope"


def last_line_of(program: str) -> Any:
    """Run a program in a new process and return its last line, which is JSON."""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_imports_follow_the_contracts() -> None:
    """The ranks of docs/design.md, no circles, and which folder may import what."""
    cli = pytest.importorskip("importlinter.cli")
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


# --- what an import costs -------------------------------------------------------------------------

# Runs after `import torch`; prints the modules that `import tightrope` imports, the device functions that it
# calls, whether `patching` is imported before its first use, and whether the names of the package are its own.
LIGHT = """
import json, sys
import torch, torch.cuda
before, asked = set(sys.modules), []
def watch(owner, name):
    real = getattr(owner, name)
    setattr(owner, name, lambda *a, **n: (asked.append(name), real(*a, **n))[1])
for name in ("_lazy_init", "is_available", "device_count", "current_device"):
    watch(torch.cuda, name)
for name in ("is_available", "device_count"):
    watch(torch.accelerator, name)
import tightrope
asked += ["is_initialized"] * torch.cuda.is_initialized()
added = sorted(set(sys.modules) - before)
patch, unpatch = tightrope.patch, tightrope.unpatch
from tightrope import patching
same = patch is patching.patch and unpatch is patching.unpatch
print(json.dumps([added, asked, same]))
"""
HEAVY = ("triton", "matplotlib", "safetensors", "torch._dynamo", "torch._inductor")


def test_the_import_is_light() -> None:
    """It imports torch alone, asks for no device, and `patch` imports its package when it is used."""
    added, asked, same = last_line_of(LIGHT)
    assert "tightrope.spec" in added
    heavy = [name for name in added if f"{name}.".startswith(tuple(f"{one}." for one in HEAVY))]
    assert (heavy, asked, same) == ([], [], True)
    assert not {"tightrope.patching", "tightrope.config"} & {*added}
    assert set(tightrope.__all__) <= set(dir(tightrope))
    with pytest.raises(AttributeError, match=r"^module 'tightrope' has no attribute 'nowhere'$"):
        tightrope.nowhere  # noqa: B018


# Imports every module, without the tools; prints the modules, and those that their packages do not have under
# their names.
EVERY = """
import importlib, json, pkgutil, sys
sys.modules["tightrope_tools"] = None
import tightrope, tightrope.__main__
found, hidden = [], []
for each in pkgutil.walk_packages(tightrope.__path__, "tightrope."):
    if each.name.endswith((".__main__", "._native")):
        continue
    try:
        module = importlib.import_module(each.name)
    except ImportError as error:  # of a library that is not installed
        if (error.name or "tightrope").startswith("tightrope"):
            raise
        continue
    found.append(each.name)
    package, _, name = each.name.rpartition(".")
    if getattr(sys.modules[package], name) is not module:
        hidden.append(each.name)
print(json.dumps([found, hidden]))
"""


def test_no_module_needs_the_tools_and_no_function_hides_a_module() -> None:
    """``import tightrope.backends.cpu as cpu`` works, as does every other module under its name."""
    found, hidden = last_line_of(EVERY)
    assert {"tightrope.backends.cpu", "tightrope.functional.tables"} <= set(found)
    assert len(found) > 90
    assert hidden == []


# Runs without numpy, which torch can do without; prints the calls that give nothing.
ALONE = """
import json, sys
sys.modules["numpy"] = None
from tests.support.calls import CASES, Call
lost = []
for number, case in enumerate(CASES):
    try:
        Call(case).derivatives()
    except RuntimeError as error:
        lost.append([number, str(error)])
print(json.dumps([len(CASES), lost]))
"""


def test_calls_need_torch_alone() -> None:
    count, lost = last_line_of(ALONE)
    assert count > 100
    assert lost == []


# --- rules of the source --------------------------------------------------------------------------


def test_no_named_tuple_that_is_traced_has_a_property() -> None:
    """Torch 2.10 cannot trace it. Code in two folders is not traced."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
                untraced = path.relative_to(SOURCE).parts[0] in ("backends", "config")
                assert untraced or "@property" not in ast.unparse(node), f"{path}: {node.name}"


def test_only_the_binding_includes_torch() -> None:
    """Only bind_problem.h includes torch, and only units that bind operators include it.

    The loops are compiled once per instruction set. If they included torch's headers, the linker
    would keep one copy of each function in them, which could use instructions that the machine
    lacks.
    """
    folder = ROOT / "csrc"
    aware = {path.name for path in folder.iterdir() if "<torch/" in path.read_text()}
    assert aware == {"bind_problem.h"}
    units = {path.name for path in folder.glob("*.cpp") if '"bind_' in path.read_text()}
    assert units == {f"bind_{name}.cpp" for name in ("compiled", "gradients", "phases", "torch")}
