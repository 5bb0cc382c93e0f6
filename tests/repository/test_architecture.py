"""Imports go strictly down the ranks in docs/design.md, and `import tightrope` stays light.

Imports are read from the source with `ast`, so those inside functions and under TYPE_CHECKING count
too. Both checks are also run on input that they must reject.
"""

import ast
import json
import re
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import tightrope
from tests.support.command import python
from tests.support.helpers import ROOT
from tests.support.imports import imports_of

SOURCE = ROOT / "src" / "tightrope"

# A module belongs to the group with the longest matching prefix. A group may import from groups of
# lower rank and within itself; two groups of one rank never import each other. "*" matches one name,
# and each match is a group of its own.
RANKS: dict[str, tuple[int, int]] = {
    "_errors": (0, 0),
    "_tracing": (0, 0),
    "_memo": (0, 1),
    "_value": (0, 1),
    "_parts": (0, 0),
    "_namespace": (0, 0),
    "_mkl": (0, 0),
    "ops.schema": (0, 1),
    "ops.registry": (0, 0),
    "channels": (0, 1),
    "frequencies": (1, 0),
    "axes": (1, 0),
    "positions": (1, 0),
    "gates": (1, 0),
    "activations": (1, 0),
    "angles": (2, 0),
    "phase_words": (2, 1),
    "stacks": (2, 1),
    "phases": (2, 2),
    "spec": (2, 2),
    "ops": (2, 3),
    "backends.reference": (3, 0),
    "backends.*": (3, 1),
    "backends": (3, 2),
    "config": (4, 0),
    "functional": (4, 0),
    "nn": (5, 0),
    "": (5, 1),  # tightrope/__init__.py: the public names
    "environment": (6, 0),
    "patching": (6, 0),
    "integrations": (6, 1),
    "__main__": (6, 1),
}

# The same of the tools.
OF_TOOLS = {
    "place": (0, 0),
    "forms": (0, 0),
    "figures": (0, 1),
    **dict.fromkeys(("audit", "convert"), (1, 0)),
    "inspect": (2, 0),
    "cli": (3, 0),
    "command": (4, 0),
    "__main__": (5, 0),
    "": (0, 0),
}

# Imports that go up, from inside a function or for type checkers only: (from, to) -> why there is no other way.
LAZY: dict[tuple[str, str], str] = {
    ("spec._rope", "config"): "RopeSpec.from_config calls the readers, which build specs",
    ("spec._rope", "functional._cos_sin"): "RopeSpec.cos_sin rotates pairs (1, 0) by a spec",
    ("ops.autograd", "ops.run"): "the gradient of a rotation is a rotation like any other",
    ("", "patching"): "tightrope.patch is looked up when it is used, so the import stays light",
}

# Modules that import by a computed name -> why, and why this respects the ranks.
DYNAMIC: dict[str, str] = {}


# --- reading the source ---------------------------------------------------------------------------


def read_files(folder: Path) -> dict[str, str]:
    """Return the Python files under a folder: path -> text."""
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def module_of(path: str) -> str:
    """Return a file's module: ops/run.py -> ops.run, ops/__init__.py -> ops, __init__.py -> ""."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ancestors(module: str) -> list[str]:
    """Return the packages that Python imports before a module, innermost first, not tightrope."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def group_of(module: str, ranks: Mapping[str, tuple[int, int]]) -> str | None:
    """Return the group of a module, its longest prefix in the table with `*` filled in, or None."""
    if module == "":
        return "" if "" in ranks else None
    for prefix in [module, *ancestors(module)]:
        if prefix in ranks:
            return prefix
        parent, _, _ = prefix.rpartition(".")
        if parent and f"{parent}.*" in ranks:
            return prefix
    return None


def rank_of(group: str, ranks: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    return ranks[group] if group in ranks else ranks[group.rpartition(".")[0] + ".*"]


def find_problems(
    files: Mapping[str, str],
    ranks: Mapping[str, tuple[int, int]] = RANKS,
    lazy_allowed: Collection[tuple[str, str]] = (),
    dynamic_allowed: Collection[str] = (),
    whole: str = "tightrope",
) -> list[str]:
    """Return one line per problem; ``whole`` is the package that contains all files.

    Problems are forbidden imports, imports by a computed name, imports of a missing module, cycles,
    modules without a rank, and exceptions that are no longer needed.
    """
    modules = {module_of(path): path for path in files}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    problems, used = [], set()
    for module, path in modules.items():
        group = group_of(module, ranks)
        if group is None:
            problems.append(f"{path}: has no rank")
        package = f"{whole}/{path}".rpartition("/")[0].replace("/", ".")
        for each in imports_of(files[path], package):
            root, _, target = each.module.partition(".")
            if root == "?":
                used.add(module)
                if module not in dynamic_allowed:
                    problems.append(f"{path}: imports by a computed name")
            if root != whole:
                continue
            inner = each.whole.partition(".")[2]
            target = inner if inner in modules else target
            if target not in modules:
                problems.append(f"{path}: imports {target}, which does not exist")
                continue
            if (module, target) in lazy_allowed and each.lazy:
                used.add((module, target))
                continue
            # Python first runs the packages that contain the target, so they are imported too.
            around = set(ancestors(target)) & modules.keys() - {module, *ancestors(module)}
            for reached in [target, *sorted(around)]:
                edges[module].add(reached)
                other = group_of(reached, ranks)
                if group is None or other is None or group == other:
                    continue
                here, there = rank_of(group, ranks), rank_of(other, ranks)
                if there >= here:
                    way = "up" if there > here else "sideways"
                    problems.append(f"{path}: imports {way} to {reached or 'tightrope'}")
    problems += [f"LAZY: {a} no longer imports {b}" for a, b in lazy_allowed if (a, b) not in used]
    problems += [
        f"DYNAMIC: {a} no longer imports by name" for a in dynamic_allowed if a not in used
    ]
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        problems.append("cycle: " + " <- ".join(name or "tightrope" for name in error.args[1]))
    return problems


# --- the ranks ------------------------------------------------------------------------------------


def test_imports_go_down() -> None:
    files, tools = read_files(SOURCE), read_files(ROOT / "src" / "tightrope_tools")
    assert files, f"no source in {SOURCE}"
    assert find_problems(files, RANKS, LAZY, DYNAMIC) == []
    assert len(tools) > 30
    lazy = [("inspect.notes", "inspect.report"), ("inspect.stored", "inspect.subject")]  # for types
    dynamic = ["audit._targets", "command"]
    assert find_problems(tools, OF_TOOLS, lazy, dynamic, whole="tightrope_tools") == []


def test_the_page_about_the_design_names_every_group() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| [0-6] \|", line)]
    named = {
        (int(row.split("|")[1]), name) for row in rows for name in re.findall(r"`([\w.*]+)`", row)
    }
    wanted = {(rank, group or "__init__") for group, (rank, _) in RANKS.items()}
    assert {one for one in named if one[1] in {name for _, name in wanted}} == wanted
    assert len(rows) == 7


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


SOUND = {
    "__init__.py": "from .functional import rotate as rotate",
    "_errors.py": "",
    "frequencies.py": "import torch\nfrom ._errors import sentence",
    "angles.py": "from .frequencies import Frequencies",
    "spec.py": "from . import angles",
    "ops/__init__.py": "from . import autograd, schema",
    "ops/schema.py": "",
    "ops/autograd.py": "from ..spec import RopeSpec\nfrom .schema import library",
    "backends/__init__.py": "from . import cpu, reference",
    "backends/reference/__init__.py": "from ...ops.schema import library",
    "backends/cpu/__init__.py": "from .. import reference\nfrom ... import angles",
    "functional.py": "from .backends import register",
    "integrations/__init__.py": "import tightrope\nfrom tightrope.backends import cpu",
}


def test_a_sound_tree_passes() -> None:
    assert find_problems(SOUND) == []


# What is wrong -> the changed file, its text, and the problem.
REJECTED = {
    "up": ("spec.py", "import tightrope.nn", "imports up to nn"),
    "up, to the top": ("spec.py", "from . import rotate", "imports up to tightrope"),
    "up, through a package": ("angles.py", "from .ops.schema import x", "imports up to ops"),
    "up, in a function": ("angles.py", "def f():\n    from .nn import x", "imports up to nn"),
    "up, for types": ("angles.py", "if TYPE_CHECKING:\n    from .nn import x", "up to nn"),
    "up, by a string": ("angles.py", "import_module('tightrope.nn')", "imports up to nn"),
    "sideways": ("positions.py", "from . import frequencies", "imports sideways to frequencies"),
    "a backend": ("backends/triton.py", "from .cpu import x", "imports sideways to backends.cpu"),
    "no rank": ("helpers.py", "", "has no rank"),
    "not there": ("spec.py", "from .nowhere import x", "imports nowhere, which does not exist"),
    "a computed name": ("spec.py", "import_module(f'{x}.y')", "imports by a computed name"),
    "a cycle in one group": ("ops/autograd.py", "from . import rotate", "cycle: "),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_wrong_tree_is_rejected(case: str) -> None:
    path, text, wanted = REJECTED[case]
    found = "\n".join(find_problems({**SOUND, "nn.py": "", path: text}))
    assert wanted in found
    assert path in found or "cycle" in wanted


def test_a_listed_lazy_import_passes_only_inside_a_function_or_for_types() -> None:
    allowed = {("spec", "functional")}
    for line in ("def f():", "if typing.TYPE_CHECKING:"):
        inside = {**SOUND, "spec.py": f"{line}\n    from .functional import rotate"}
        assert find_problems(inside, RANKS, allowed) == []
    outside = {**SOUND, "spec.py": "from .functional import rotate"}
    assert "spec.py: imports up to functional" in find_problems(outside, RANKS, allowed)


def test_a_stale_exception_is_rejected() -> None:
    assert find_problems(SOUND, RANKS, [("spec", "nn")], ["nn"]) == [
        "LAZY: spec no longer imports nn",
        "DYNAMIC: nn no longer imports by name",
    ]


# --- the cost of an import ------------------------------------------------------------------------

HEAVY = ("triton", "matplotlib", "safetensors", "torch._dynamo", "torch._inductor")

# Runs one statement after `import torch` and reports the modules that it imports and the device
# functions that it calls.
PROBE = """
import json, sys
import torch, torch.cuda
before = set(sys.modules)
asked = []
def watch(owner, name):
    real = getattr(owner, name)
    def watched(*args, **kwargs):
        asked.append(name)
        return real(*args, **kwargs)
    setattr(owner, name, watched)
for name in ("_lazy_init", "is_available", "device_count", "current_device"):
    watch(torch.cuda, name)
watch(torch.accelerator, "is_available")
watch(torch.accelerator, "device_count")
{statement}
if torch.cuda.is_initialized():
    asked.append("is_initialized")
print(json.dumps([sorted(set(sys.modules) - before), asked]))
"""


def last_line_of(program: str) -> Any:
    """Run a program in a new process and return its last line, which is JSON."""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def cost_of(statement: str) -> tuple[set[str], set[str]]:
    """Return the heavy packages that a statement imports, and the device functions it calls."""
    added, asked = last_line_of(PROBE.replace("{statement}", statement))
    heavy = {name for name in HEAVY if any(f"{m}.".startswith(f"{name}.") for m in added)}
    return heavy, set(asked)


def test_import_is_light() -> None:
    assert cost_of("import tightrope") == (set(), set())


# Prints the public names of tightrope; whether `patch` is the function of patching; and whether
# patching is imported before the first use of that name, and after it.
FRONT = """
import json, sys
import tightrope
before = "tightrope.patching" in sys.modules
patch, unpatch = tightrope.patch, tightrope.unpatch
after = "tightrope.patching" in sys.modules
from tightrope import patching
same = patch is patching.patch and unpatch is patching.unpatch
print(json.dumps([dir(tightrope), same, before, after]))
"""


def test_patch_is_imported_when_it_is_used() -> None:
    names, same, before, after = last_line_of(FRONT)
    assert (same, before, after) == (True, False, True)
    assert set(tightrope.__all__) <= set(names)


def test_the_public_names() -> None:
    from_top = "RopeSpec rotate rotate_ rotate_qk rotate_qk_ rerotate apply_rotary_pos_emb which"
    for name in [*from_top.split(), "patch", "unpatch"]:
        assert name in tightrope.__all__
        assert callable(getattr(tightrope, name))
    text = "module 'tightrope' has no attribute 'nowhere'"
    with pytest.raises(AttributeError, match=f"^{text}$"):
        tightrope.nowhere  # noqa: B018


def test_the_probe_sees_heavy_imports_and_touched_devices() -> None:
    statement = "import torch._dynamo; sys.modules['matplotlib_text'] = sys; "
    statement += "torch.cuda.is_available(); torch.accelerator.device_count(); "
    # The last statement fakes an initialised device on a machine without one.
    heavy, asked = cost_of(statement + "torch.cuda._initialized = True")
    assert "torch._dynamo" in heavy
    assert "matplotlib" not in heavy
    assert {"is_available", "device_count", "is_initialized"} <= asked


# --- the native sources ---------------------------------------------------------------------------


def test_no_named_tuple_that_is_traced_has_a_property() -> None:
    """Torch 2.10 cannot trace it. Code in two folders is not traced."""
    for path, source in read_files(SOURCE).items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
                untraced = path.startswith(("backends/", "config/"))
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
