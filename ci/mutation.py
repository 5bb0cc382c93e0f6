"""Mutation testing: plant small faults, one at a time, and note the first test that fails for each.

    make mutants ARGS='choose LIST'            draw mutants of each file of src/ and csrc/, or of FILE ...
    make mutants ARGS='run LIST FOUND'         run the tests near each mutant
    make mutants ARGS='run LIST FOUND --tree OLDER'   the same with the source and the tests of another work tree
    make mutants ARGS='compare OLD NEW'        mutants that only the tests of the first run notice

A mutant is one changed line, made by universalmutator. It is identified by the text of the line, so a
list stays valid after other changes, and in an older tree; a mutant whose line does not exist is "gone".

LIST and FOUND have a JSON object per line. In FOUND, `by` is the first test that failed, or null; `outcome`
is "ran", "gone", "not built" or "same code" (the compiler makes the same of it). `run` continues an earlier run.

NEAR names the tests of each folder of the source. Of each test function a few cases are drawn (--cases), and the
first failure ends a mutant. Tests that also fail on the unchanged source are left out. C++ is compiled with -O1 and
tested with AVX2. `run` works only on Linux: it forks after the imports.
"""

import argparse
import ast
import collections
import contextlib
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import zlib
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Lines of which most mutants change nothing or are not valid.
LEFT_OUT = [
    r"^\s*(//|#|@|\"\"\"|from |import |template|using |struct |static_assert)",
    "TYPE_CHECKING|__all__",
]
# Any other word that is new in a line is a part of one that a rule has cut.
NEW_WORDS = set("and or not if pass break continue None True False min max".split())
SECONDS = 90  # of the processor, for one test; then its process is ended
# Imported once for all mutants, because tests import them; none of them imports tightrope.
SHARED = (
    "torch._dynamo torch.distributed.tensor mpmath numpy transformers diffusers triton hypothesis"
)
PYTEST = "-x -q -p no:cacheprovider -p no:xdist --hypothesis-seed=0"
WARNINGS = "ignore::pytest.PytestAssertRewriteWarning"

# The tests of a file are those of the first entry that its path begins with; under tests/, `unit/test_` are files.
NEAR = {
    "csrc/": "kernel/cpu laws unit/functional unit/ops",
    "src/tightrope/config/": "unit/config",
    "src/tightrope/patching/": "unit/patching",
    "src/tightrope/integrations/onnx": "torch_modes",
    "src/tightrope/integrations/": "unit/integrations",
    "src/tightrope/backends/triton/": "kernel/triton",
    "src/tightrope/spec/": "unit/spec unit/frequencies unit/functional laws",
    "src/tightrope/frequencies/": "unit/frequencies unit/spec unit/stacks unit/functional laws",
    "src/tightrope/positions/": "unit/positions unit/functional laws",
    "src/tightrope/phases/": "unit/phases laws",
    "src/tightrope/stacks/": "unit/stacks unit/functional unit/patching",
    "src/tightrope/nn/": "unit/nn laws",
    "src/tightrope/ops/sharded": "torch_modes",
    "src/tightrope/ops/": "unit/ops laws unit/functional torch_modes",
    "src/tightrope/functional/": "unit/functional laws torch_modes",
    "src/tightrope/": "unit/test_ unit/functional unit/spec unit/nn unit/ops laws",
    "src/tightrope_tools/": "tools",
}


# ---- mutants --------------------------------------------------------------------------------------


def meaning(text, suffix):
    """Return what a mutant must differ in: the code without docstrings, types and texts of errors."""
    if suffix != ".py":
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field in {"annotation", "returns", "exc"}.intersection(node._fields):
            setattr(node, field, None)
        if isinstance(node, ast.JoinedStr):
            node.values = []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(0)
    return ast.dump(tree)


def drawn(text):
    """Return a number by which to sort, to draw the same in every run."""
    return zlib.crc32(text.encode())


def words(text):
    return set(re.findall(r"[^\W\d]\w*", text))


def choose(path, options):
    """Yield some mutants of a file: the rules of universalmutator in turn, at most one per line."""
    from universalmutator import mutator

    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rules = ["universal", "python" if path.suffix == ".py" else "c_like"]
    with contextlib.redirect_stdout(None):
        found = mutator.mutants_regexp(lines, rules, ignorePatterns=LEFT_OUT, ignoreStringOnly=True)
    found.sort(key=lambda mutant: drawn(f"{options.seed} {mutant[0]} {mutant[1]}"))
    old, used, count = meaning("".join(lines), path.suffix), collections.Counter(), options.each
    while found and count:
        number, after, (rule, _), _ = one = min(found, key=lambda mutant: used[mutant[2][0]])
        found.remove(one)
        before = lines[number - 1]
        if after.count("\n") > 1 or not words(after) <= words(before) | NEW_WORDS:
            continue
        try:
            text = "".join([*lines[: number - 1], after, *lines[number:]])
            if meaning(text, path.suffix) == old:
                continue
        except SyntaxError:
            continue
        used[rule] += 1
        count -= 1
        found = [other for other in found if other[0] != number]
        at = lines[: number - 1].count(before)
        place = {"file": path.relative_to(ROOT).as_posix(), "line": number, "at": at}
        yield place | {"before": before.rstrip("\n"), "after": after.rstrip("\n")}


# ---- tests ----------------------------------------------------------------------------------------


def near(name, tree):
    """Return the folders and files of the tests of a source file."""
    names = next(found for start, found in NEAR.items() if name.startswith(start)).split()
    found = [sorted((tree / "tests").glob(f"{each}*")) for each in names]
    return tuple(str(path) for paths in found for path in paths if path.suffix in ("", ".py"))


class Drawn:
    """A pytest plugin that runs a few cases of each test function, and notes which test fails."""

    def __init__(self, cases, without, log):
        self.cases, self.without, self.log = cases, without, log

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        functions = collections.defaultdict(list)
        for item in sorted(items, key=lambda item: drawn(item.nodeid)):
            if item.nodeid not in self.without:
                functions[item.nodeid.partition("[")[0]].append(item)
        kept = {item.nodeid for some in functions.values() for item in some[: self.cases]}
        items[:] = [item for item in items if item.nodeid in kept]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        print("started", item.nodeid, file=self.log, flush=True)
        # The default action of these signals ends the process, even inside C++ code.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10 * SECONDS)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            print("failed", report.nodeid, file=self.log, flush=True)

    pytest_collectreport = pytest_runtest_logreport


def run_tests(folder, tree, arguments, plugin):
    """Run tests on the copy of src/ in a folder, in a process of their own."""
    os.setpgid(0, 0)
    os.chdir(tree)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    sys.path[:0] = [str(folder / "src"), str(tree)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    pytest.main([*PYTEST.split(), "-W", WARNINGS, *arguments], plugins=[plugin])
    print("ended", file=plugin.log, flush=True)


def failures(folder, tree, arguments, cases, without=()):
    """Return the tests that fail on the copy of src/ in a folder; of a process that dies, the one that ran."""
    with (folder / "log").open("w") as log:
        given = folder, tree, arguments, Drawn(cases, without, log)
        child = multiprocessing.get_context("fork").Process(target=run_tests, args=given)
        child.start()
        child.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    notes = [line.partition(" ") for line in (folder / "log").read_text().splitlines()]
    if not notes or notes[-1][0] != "ended":
        return [notes[-1][2] if notes else "tests/conftest.py"]
    return [test for word, _, test in notes if word == "failed"]


# ---- runs -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def copied(tree, kept):
    """Yield a folder with a copy of the source of a tree, where builds share their objects."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in ("src", "csrc"):
            shutil.copytree(tree / part, folder / part)
        shutil.copy2(tree / "setup.py", folder)
        (folder / "build").symlink_to(kept)
        yield folder


def build(folder):
    """Build the library of a copy of the source; return its bytes, or none if that fails.

    Loops for AVX-512 are compiled once, for the first copy.
    """
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(folder / "setup.py"))["build_library"].__globals__
    original = setup["produce"]

    def produce(stem, *rest):
        there = setup["OBJECTS"].glob(f"{stem}-*.o") if stem.startswith("rotate_avx512") else ()
        return next(iter(there), None) or original(stem, *rest)

    setup["produce"] = produce
    try:
        made = setup["build_library"]()
    except setup["NotBuilt"]:
        return b""
    shutil.copy2(made, folder / "src/tightrope" / setup["LIBRARY"])
    return made.read_bytes()


def run_mutant(mutant, kept, options, unchanged):
    """Plant a mutant; return what happened."""
    tree, name = options.tree, mutant["file"]
    lines = (tree / name).read_text("utf-8").splitlines() if (tree / name).exists() else []
    places = [n for n, line in enumerate(lines) if line == mutant["before"]]
    if mutant["at"] >= len(places):
        return {"outcome": "gone", "by": None}
    arguments, is_cpp = near(name, tree), name.startswith("csrc/")
    os.environ["TIGHTROPE_CPU_ISA"] = "avx2" if is_cpp else ""
    library, without = unchanged(arguments, is_cpp)
    with copied(tree, kept) as folder:
        lines[places[mutant["at"]]] = mutant["after"]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        if is_cpp and (made := build(folder)) in (b"", library):
            return {"outcome": "same code" if made else "not built", "by": None}
        every = [*options.arguments, *arguments]
        found = failures(folder, tree, every, options.cases, without)
        return {"outcome": "ran", "by": found[0] if found else None}


def run(options):
    """Run the mutants that have no row yet."""
    # Without this, the compiler could reuse the code of another mutant.
    os.environ |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0", "TIGHTROPE_CXXFLAGS": "-O1"}
    for name in SHARED.split():
        with contextlib.suppress(ImportError):
            __import__(name)
    old = read(options.found)
    with tempfile.TemporaryDirectory() as kept, options.found.open("a", encoding="utf-8") as out:

        @lru_cache
        def unchanged(arguments, is_cpp):
            """Return the library of the unchanged source, for C++, and the tests that fail on it."""
            with copied(options.tree, kept) as folder:
                library = build(folder) if is_cpp else b""
                every = [*options.arguments, "--maxfail=1000", *arguments]
                return library, frozenset(failures(folder, options.tree, every, options.cases))

        for key, mutant in read(options.list).items():
            if key not in old:
                found = run_mutant(mutant, kept, options, unchanged)
                print(json.dumps(mutant | found, ensure_ascii=False), file=out, flush=True)


def key_of(row):
    return row["file"], row["before"], row["at"], row["after"]


def read(path):
    """Return the rows of a file by mutant; of two rows for one, the later."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return {key_of(row): row for row in rows}


def compare(old, new):
    """Print the mutants that only the first run noticed, and the numbers of both."""
    ran = [
        {key: row for key, row in read(path).items() if row["outcome"] == "ran"}
        for path in (old, new)
    ]
    both = [key for key in ran[0] if key in ran[1]]
    for key in both:
        if ran[0][key]["by"] and not ran[1][key]["by"]:
            print(f"missed: {key[0]}: {key[3].strip()} (noticed by {ran[0][key]['by']})")
    for path, found in zip((old, new), ran):
        print(
            f"{path}: of {len(both)} mutants, {sum(bool(found[key]['by']) for key in both)} are noticed"
        )


def main():
    parser = argparse.ArgumentParser("python -m ci.mutation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices="choose run compare".split())
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--each", type=int, default=3, help="choose: mutants of each file")
    parser.add_argument("--seed", type=int, default=0, help="choose: of the sample")
    parser.add_argument("--cases", type=int, default=2, help="run: cases of each test function")
    parser.add_argument("--tree", type=Path, default=ROOT, help="run: another work tree")
    options, options.arguments = parser.parse_known_args()
    first, *others = options.paths
    if options.command == "choose":
        every = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "csrc").glob("*.*"))]
        rows = [row for path in others or every for row in choose(path.resolve(), options)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        first.write_text(text, encoding="utf-8")
    elif options.command == "run":
        options.list, options.found = options.paths
        options.tree = options.tree.resolve()
        run(options)
    else:
        compare(*options.paths)


if __name__ == "__main__":
    main()
