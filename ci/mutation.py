"""Mutation testing: plant small faults one at a time, and note every test that fails for each.

    make mutants ARGS='choose LIST'             draw mutants of each file of src/ and csrc/, or of FILE ...
    make mutants ARGS='trace TRACE'             run tests, and note the lines of each; arguments as for pytest
    make mutants ARGS='run LIST TRACE MATRIX'   run tests on each mutant
    make mutants ARGS='compare OLD NEW'         mutants that only the tests of the first matrix notice
    make mutants ARGS='alone MATRIX'            mutants that one test file alone notices; few tests for all

A mutant is one changed line, made by universalmutator. It is identified by the text of the line, so a
list stays valid after other changes; a mutant whose line no longer exists is reported as gone.

LIST and MATRIX have a JSON object per line. In MATRIX, `failed` names the tests that noticed the mutant, and
`outcome` is "ran", "gone", "not built" or "same code" (the compiler makes the same of it). At the end, tests
that failed also run on the unchanged source; the row without a file names those that fail there. The name
of a file that cannot be imported stands for its tests. Seconds are those of the processor.

For Python, those tests are run that run the changed line; for C++, those of some folders. Of each test
function a few cases are drawn. The others run only if none of these failed. C++ is compiled for one
instruction set. No failure stops the other tests, but three that crash or hang end a mutant.

`run` continues an earlier run. After a change to tests, trace their files again, which adds to TRACE. With
--changed-since, the tests of changed files run again, and what the others found is kept. Changes to helpers
are not seen. `run` works only on Linux: it forks after the imports. Two of it may share the work (--part).
"""

import argparse
import ast
import collections
import contextlib
import filecmp
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
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
_FOLDERS = "kernel/cpu/ laws/ unit/functional/ unit/ops/ unit/test_ torch_modes/test_autograd"
CPP_TESTS = tuple(f"tests/{name}" for name in _FOLDERS.split())
INSTRUCTION_SET = "avx2"
SECONDS = 60  # of the processor, for one test; then its process is ended
# Imported once for all mutants, because tests import them; none of them imports tightrope.
SHARED = "torch._dynamo torch.distributed.tensor mpmath numpy transformers diffusers triton"
ENDED = (0, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
COVERAGE = "--cov=tightrope --cov=tightrope_tools --cov-context=test --cov-report= --cov-append"
PYTEST = "-q -p no:cacheprovider -p no:xdist --hypothesis-seed=0 --continue-on-collection-errors"


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


def place_of(lines, mutant):
    """Return the index of the line that a mutant changes, or None if it is gone."""
    places = [n for n, line in enumerate(lines) if line == mutant["before"]]
    return places[mutant["at"]] if mutant["at"] < len(places) else None


# ---- tests ----------------------------------------------------------------------------------------


def trace(folder, arguments):
    """Run tests with coverage by test, and add what they ran to the folder, beside a copy of the source."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")]
    if folder.exists() and any(filecmp.cmpfiles(ROOT, folder, files, shallow=False)[1:]):
        raise SystemExit(f"{folder} is for other source: trace all tests, into another folder")
    shutil.copytree(ROOT / "src", folder / "src", dirs_exist_ok=True)
    os.environ["COVERAGE_FILE"] = str(folder / "coverage")
    # Without our configuration, which asks for branches: they take a hundred times the space.
    pytest.main([*COVERAGE.split(), f"--cov-config={os.devnull}", *arguments])


def tests_of(mutant, data, folder):
    """Return the tests of a mutant, by the trace in a folder."""

    def tests(contexts):
        return {context.rpartition("|")[0] for context in contexts} - {""}

    if mutant["file"].startswith("csrc/"):
        return {test for test in tests(data.measured_contexts()) if test.startswith(CPP_TESTS)}
    files = [name for name in data.measured_files() if name.endswith("/" + mutant["file"])]
    # Tests that copy the source leave others, with longer names.
    lines = data.contexts_by_lineno(min(files, key=len, default=""))
    place = place_of((folder / mutant["file"]).read_text(encoding="utf-8").splitlines(), mutant)
    # Only the first line of a statement is sure to be known.
    known = [number for number in lines if place is not None and number <= place + 1]
    # What runs at import may matter to every test of the file.
    return tests(lines[max(known)] if known else ()) or tests(set().union(*lines.values()))


class Chosen:
    """A pytest plugin that runs the chosen tests, and notes which started and which failed."""

    def __init__(self, tests, out):
        self.tests, self.out = tests, out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.tests]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        print("started", item.nodeid, file=self.out, flush=True)
        # The default action of these signals ends the process, even inside C++ code.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10 * SECONDS)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            print("failed", report.nodeid, file=self.out, flush=True)

    pytest_collectreport = pytest_runtest_logreport


def file_of(test):
    return test.partition("::")[0]


def in_child(folder, tests, arguments):
    """Run tests with pytest on the copy of src/ in a folder, in this process."""
    os.setpgid(0, 0)
    os.chdir(ROOT)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    sys.path.insert(0, str(folder / "src"))
    os.environ["PYTHONPATH"] = str(folder / "src")
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    files = sorted(file for file in set(map(file_of, tests)) if (ROOT / file).exists())
    options = [*PYTEST.split(), "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]
    with (folder / "log").open("w") as out:
        return pytest.main([*options, *files], plugins=[Chosen(tests, out)]) if files else 0


def run_tests(folder, tests, arguments):
    """Return the tests that fail on the copy of src/ in a folder, those that started, and the time."""
    failed, started, seconds = set(), set(), 0.0
    for _ in range(3):  # again after a crash
        child = os.fork()
        if child == 0:
            status = pytest.ExitCode.INTERNAL_ERROR
            try:
                status = in_child(folder, tests - started, arguments)
            finally:
                os._exit(status)
        _, status, used = os.wait4(child, 0)
        seconds += used.ru_utime + used.ru_stime
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        notes = [line.partition(" ") for line in (folder / "log").read_text().splitlines()]
        failed.update(test for word, _, test in notes if word == "failed")
        running = [test for word, _, test in notes if word == "started"]
        started.update(running)
        if os.waitstatus_to_exitcode(status) in ENDED:
            break
        if status != signal.SIGALRM:  # which may also say that the machine was busy
            failed.add(running[-1] if running else "tests/conftest.py")
    return failed, started, seconds


# ---- runs -----------------------------------------------------------------------------------------


def includes(name):
    """Return the files of csrc/ that a file includes, and itself."""
    text = (ROOT / "csrc" / name).read_text(encoding="utf-8")
    return {name}.union(*map(includes, re.findall(r'#include "(.*)"', text)))


def build(name, folder, kept):
    """Build the library of a copy of the source in which a file of csrc/ is changed; return the outcome.

    Of the units that include the file, it compiles those for one instruction set. The objects of the unchanged
    source are kept in another folder.
    """
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(ROOT / "setup.py"))["build_library"].__globals__
    units = [path.stem for path in (ROOT / "csrc").glob("*.cpp") if name in includes(path.name)]
    loops = f"rotate_{INSTRUCTION_SET}"
    units = [unit for unit in units if unit == loops or not unit.startswith("rotate_")]
    different = []

    def produce(stem, _, suffix, command):
        made, plain = folder / (stem + suffix), kept / (stem + suffix)
        if suffix == ".o" and stem not in units:
            return next(setup["OBJECTS"].glob(f"{stem}-*.o"))
        command = ["-O1" if part == "-O3" else part for part in command]
        if suffix == ".o" and not plain.exists():
            unchanged = [part.replace(str(folder), str(ROOT)) for part in command]
            subprocess.run([*unchanged, "-o", plain], check=True, capture_output=True)
        subprocess.run([*command, "-o", made], check=True, capture_output=True)
        different.append(suffix == ".o" and made.read_bytes() != plain.read_bytes())
        return made

    setup |= {"CSRC": folder / "csrc", "JOBS": 1, "produce": produce, "say": str}
    try:
        shutil.copy2(setup["build_library"](), folder / "src/tightrope" / setup["LIBRARY"])
    except subprocess.CalledProcessError:
        return "not built"
    return "ran" if any(different) else "same code"


def cases(tests, count):
    """Return some cases of each test function, the same in every run."""
    functions = collections.defaultdict(list)
    for test in sorted(tests, key=drawn):
        functions[test.partition("[")[0]].append(test)
    return {test for found in functions.values() for test in found[:count]}


def run_mutant(mutant, tests, failed, kept, options):
    """Return what happened to a mutant; `failed` has tests that are known to notice it."""
    outcome, started, seconds = "ran", set(), 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder, name = Path(temporary), mutant["file"]
        for part in ("src", "csrc"):
            shutil.copytree(ROOT / part, folder / part)
        if name:
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            place = place_of(lines, mutant)
            if place is None:
                return {"outcome": "gone", "failed": []}
            lines[place] = mutant["after"]
            (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.environ["TIGHTROPE_CPU_ISA"] = INSTRUCTION_SET if name.startswith("csrc/") else ""
        if name.startswith("csrc/"):
            outcome = build(Path(name).name, folder, kept)
        first = cases(tests, options.cases if name else len(tests))
        for some in (first, tests - first):
            if outcome == "ran" and some and (some is first or not failed):
                found, ran, used = run_tests(folder, some, options.arguments)
                failed, started, seconds = failed | found, started | ran, seconds + used
    found = {"outcome": outcome, "failed": sorted(failed)}
    return found | {"tests": len(started), "seconds": round(seconds, 1)}


UNCHANGED = {"file": "", "line": 0, "at": 0, "before": "", "after": ""}


def key_of(row):
    return row["file"], row["before"], row["at"], row["after"]


def read(path):
    """Return the rows of a file by mutant; of two rows for one, the later."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return {key_of(row): row for row in rows}


def run(options):
    """Run the mutants that have no row yet; with `changed_since`, also those whose tests changed."""
    import coverage

    # Without this, the compiler could reuse the code of another mutant.
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    for name in SHARED.split():
        with contextlib.suppress(ImportError):
            __import__(name)
    data = coverage.CoverageData(str(options.trace / "coverage"))
    data.read()
    command = ["git", "diff", "--name-only", options.changed_since or "HEAD", "--", "tests"]
    output = subprocess.check_output(command, cwd=ROOT, text=True)
    changed = set(output.split()) if options.changed_since else set()
    if missing := [name for name in CPP_TESTS if not any(ROOT.glob(f"{name}*"))]:
        raise FileNotFoundError(f"there are no tests {missing}")
    old, part, parts = read(options.matrix), *map(int, options.part.split("/"))
    mutants = [*read(options.list).items()][part - 1 :: parts]
    with tempfile.TemporaryDirectory() as kept, options.matrix.open("a", encoding="utf-8") as out:
        for key, mutant in mutants:
            tests = tests_of(mutant, data, options.trace)
            known = set(old[key]["failed"]) if key in old else set()
            failed = {test for test in known if file_of(test) not in changed}
            if key in old:
                tests = {test for test in tests if file_of(test) in changed}
            if key not in old or tests or failed != known:
                found = run_mutant(mutant, tests, failed, Path(kept), options)
                print(json.dumps(mutant | found, ensure_ascii=False), file=out, flush=True)
        rows = read(options.matrix).values()
        every = {test for row in rows if row["file"] for test in row["failed"]}
        found = run_mutant(UNCHANGED, every, set(), Path(kept), options)
        print(json.dumps(UNCHANGED | found, ensure_ascii=False), file=out)


def noticed(path):
    """Return, for each mutant that ran, the tests that notice it."""
    rows = read(path)
    always = set(rows.pop(key_of(UNCHANGED), {"failed": ()})["failed"])
    return {key: {*row["failed"]} - always for key, row in rows.items() if row["outcome"] == "ran"}


def compare(old, new):
    """Print the mutants that only the first run noticed, and the numbers of both."""
    before, after = noticed(old), noticed(new)
    for key, tests in before.items():
        if tests and not after.get(key):
            how = "missed" if key in after else "not run"
            print(f"{how}: {key[0]}: {key[3].strip()} (noticed by {min(tests)})")
    for path, found in ((old, before), (new, after)):
        print(f"{path}: of {len(found)} mutants, {sum(map(bool, found.values()))} are noticed")


def alone(path):
    """Print the mutants that a single test file notices, and few test functions that notice all."""
    found = {key: tests for key, tests in noticed(path).items() if tests}
    for key, tests in found.items():
        files = set(map(file_of, tests))
        if len(files) == 1:
            print(f"only {files.pop()}: {key[0]}: {key[3].strip()}")
    left = [{test.partition("[")[0] for test in tests} for tests in found.values()]
    while left:
        counts = collections.Counter(test for tests in left for test in sorted(tests))
        test, count = counts.most_common(1)[0]
        print(f"{count:5} more with {test}")
        left = [tests for tests in left if test not in tests]


def main():
    parser = argparse.ArgumentParser("python -m ci.mutation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices="choose trace run compare alone".split())
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--each", type=int, default=3, help="choose: mutants of each file")
    parser.add_argument("--seed", type=int, default=0, help="choose: of the sample")
    parser.add_argument("--cases", type=int, default=2, help="run: cases of each test function")
    parser.add_argument("--changed-since", help="run: a revision; see above")
    parser.add_argument("--part", default="1/1", help="run: 1/2 is the first half of the mutants")
    options, options.arguments = parser.parse_known_args()
    first, *others = options.paths
    if options.command == "choose":
        every = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "csrc").glob("*.*"))]
        files = [*others, *map(Path, options.arguments)] or every  # before and after the options
        rows = [row for path in files for row in choose(path.resolve(), options)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        first.write_text(text, encoding="utf-8")
    elif options.command == "trace":
        trace(first, [*map(str, others), *options.arguments])
    elif options.command == "run":
        options.list, options.trace, options.matrix = options.paths
        run(options)
    else:
        {"compare": compare, "alone": alone}[options.command](*options.paths)


if __name__ == "__main__":
    main()
