"""Mutation testing: plant small faults one at a time, and check that a test fails for each.

    python -m ci.mutation list LIST                        choose the mutants
    python -m ci.mutation trace MAP [pytest arguments]     map tests to the lines that they run
    python -m ci.mutation run LIST MAP RESULTS [pytest arguments]
    python -m ci.mutation compare RESULTS RESULTS          faults that only the first run noticed

A mutant is one changed line. It is identified by the line's text, so a list stays valid after other
changes; a mutant whose line no longer exists is reported as gone. For each mutant, tests run on a
copy of src/ until a test fails: for Python the tests that run the changed line, for C++ those of
all files in NEAREST. The test files that NEAREST lists for the changed file, if any, run first. The
loops in csrc/ are built for one instruction set. `run` continues an earlier run with the same
RESULTS; it works only on Linux, because it forks.

`alone.jsonl` beside this file is a list of a mutant for each of 83 test files, `by` whose tests
alone it is noticed. Before you delete tests of these files, run it.
"""

import collections
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from .mutants import PYTHON, ROOT, build, changed, choose, source_files

# From source files to the test files that run first; the first matching pattern counts.
NEAREST = {
    "tightrope/angles.py": """
        unit/test_angles laws/test_numerics
    """,
    "tightrope/frequencies": """
        unit/frequencies/test_rules unit/test_phase_words unit/spec/test_words
        unit/spec/test_rope_spec
    """,
    "tightrope/positions": """
        unit/positions/test_positions unit/positions/test_grids unit/positions/test_refused_positions
        unit/positions/test_positions_of_transformers unit/test_axes
    """,
    "tightrope/ops/(autograd|gradients|learned)": """
        torch_modes/test_autograd unit/ops/test_learned unit/ops/test_gradients
        unit/functional/test_rounding laws/test_derivatives laws/test_calls
    """,
    "tightrope/ops/(checks|memory)": """
        unit/ops/test_checks unit/ops/test_memory unit/functional/test_out
        kernel/cpu/test_raw_operators
    """,
    "tightrope/ops/gating": """
        unit/ops/test_gating unit/test_gates
    """,
    "tightrope/ops/(vmap|fake|registry|schema)": """
        laws/test_calls torch_modes/test_registration unit/ops/test_extra_tensors unit/functional/test_tables
    """,
    "tightrope/ops": """
        unit/ops/test_route unit/functional/test_rotate unit/functional/test_out
        unit/functional/test_tables unit/functional/test_rounding unit/spec/test_lengths
        unit/spec/test_stated_lengths
    """,
    "tightrope/backends": """
        laws/test_numerics unit/test_angles unit/functional/test_tables
        unit/functional/test_rounding
    """,
    "csrc/overlap": """
        unit/ops/test_memory kernel/cpu/test_raw_operators unit/functional/test_out
    """,
    "csrc/(angle_sums|gate_sums|bind_gradients)": """
        unit/ops/test_gradients unit/test_activations unit/ops/test_gating unit/ops/test_learned
    """,
    "csrc/(stages|acts|bind_stages)": """
        unit/test_activations unit/ops/test_gating unit/functional/test_lrpe
        laws/test_random_stages
    """,
    "csrc": """
        laws/test_numerics laws/test_invariance unit/functional/test_tables
        unit/functional/test_rounding unit/functional/test_out torch_modes/test_autograd
    """,
}
NOTICED = ("killed", "crash", "timeout")
LIMIT = 240.0  # seconds for all tests of a mutant; each test has its own limit too


# ---- the tests of a mutant ------------------------------------------------------------------------


class Tracer:
    """A pytest plugin that records, for each passing test, its seconds and the lines it runs."""

    def __init__(self):
        self.tests, self.lines, self.seen, self.failed = {}, {}, set(), False
        self.prefixes = tuple(str(ROOT / "src" / name) for name in PYTHON)
        self.texts = {str(p): p.read_text().splitlines() for p in source_files()}

    def trace(self, frame, event, _):
        if event == "line":
            self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace if frame.f_code.co_filename.startswith(self.prefixes) else None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.failed = False
        self.seen.clear()
        start = time.monotonic()
        sys.settrace(self.trace)
        yield
        sys.settrace(None)
        keys = {f"{p[len(str(ROOT)) + 1 :]}\t{self.texts[p][n - 1]}" for p, n in self.seen}
        if not self.failed:
            lines = [self.lines.setdefault(key, len(self.lines)) for key in keys]
            self.tests[item.nodeid] = (round(time.monotonic() - start, 4), lines)

    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or report.failed


class Chosen:
    """A pytest plugin that runs the chosen tests, quickest first, and notes the running one."""

    def __init__(self, seconds, until, note):
        self.seconds, self.until, self.note = seconds, until, note
        self.result = {"outcome": "survived", "by": None, "tests": 0}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.seconds]
        # Times are rounded to powers of two, so that the tests of a file mostly stay together.
        items.sort(key=lambda item: int(1000 * self.seconds[item.nodeid]).bit_length())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.note.write_text(json.dumps({"outcome": "crash", "by": item.nodeid}))
        self.result["tests"] += 1
        # The default action of this signal ends the process, even inside C++ code.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30 + int(20 * self.seconds[item.nodeid]))
        if time.monotonic() > self.until:
            self.result["outcome"] = item.session.shouldstop = "unfinished"

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.result |= {"outcome": "killed", "by": report.nodeid}

    pytest_collectreport = pytest_runtest_logreport


def in_child(source, isa, options, chosen):
    """Run pytest on a copy of src/ in this process, and write the result to `chosen.note`."""
    os.setpgid(0, 0)
    os.chdir(ROOT)
    output = os.open(source.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    sys.path[:0] = [str(source)]
    os.environ.update(PYTHONPATH=str(source), TIGHTROPE_CPU_ISA=isa or "")
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(source.parent / "hypothesis")
    status = pytest.main(options, plugins=[chosen])
    if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
        chosen.result |= {"outcome": "crash", "by": "import"}
    chosen.note.write_text(json.dumps(chosen.result))


def run_tests(source, seconds, until, arguments, isa=None):
    """Run tests on a copy of src/ in a child process, and return the outcome."""
    files = sorted({nodeid.split("::")[0] for nodeid in seconds})
    missing = [name for name in files if not (ROOT / name).exists()]
    if missing:
        raise FileNotFoundError(f"the map names tests that are gone: {missing}; trace them again")
    if not files:
        return {"outcome": "survived", "by": None, "tests": 0}
    note = source.parent / "note"
    note.write_text(json.dumps({"outcome": "crash", "by": "collection"}))
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", *files, *arguments]
    child = os.fork()
    if child == 0:
        try:
            in_child(source, isa, options, Chosen(seconds, until, note))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    result = json.loads(note.read_text())
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        result["outcome"] = "timeout"
    return result


def file_of(nodeid):
    """Return the file of a test as NEAREST spells it: below tests/, without the suffix."""
    return nodeid.split("::")[0].removeprefix("tests/").removesuffix(".py")


def stages(mutant, traced):
    """Return two dictionaries {test: seconds}: the tests of the nearest files, and the others."""
    name, tests = mutant["file"], traced["tests"]
    near = next((f for pattern, f in NEAREST.items() if re.search(pattern, name)), "").split()
    if name.startswith("csrc"):
        others = {file for files in NEAREST.values() for file in files.split()}
        found = {n: s for n, (s, _) in tests.items() if file_of(n) in others}
    else:
        lines = traced["lines"]
        # A line that runs only at import is not traced: use the tests of its whole file.
        own = lines.get(f"{name}\t{mutant['before']}")
        wanted = {own} if own is not None else {lines[key] for key in lines if key.startswith(name)}
        found = {n: s for n, (s, ran) in tests.items() if not wanted.isdisjoint(ran)}
    first = {n: s for n, s in found.items() if file_of(n) in near}
    return first, {n: s for n, s in found.items() if n not in first}


# ---- runs -----------------------------------------------------------------------------------------


def run_mutant(mutant, traced, arguments):
    """Return the outcome of one mutant.

    If `mutant` is None, run the tests `traced` (test -> seconds) on the unchanged source instead.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder, start, isa = Path(temporary), time.monotonic(), None
        shutil.copytree(ROOT / "src", folder / "src")
        if mutant is None:
            return run_tests(folder / "src", traced, start + 3600, arguments)
        text = changed((ROOT / mutant["file"]).read_text(), mutant)
        if text is None:
            return {"outcome": "gone"}
        if mutant["file"].startswith("csrc"):
            isa = "avx512" if "avx512" in mutant["file"] else "avx2"
            if not build(mutant, text, folder, isa):
                return {"outcome": "not built"}
        else:
            (folder / mutant["file"]).write_text(text)
        built, tests = time.monotonic(), 0
        for seconds in stages(mutant, traced):
            result = run_tests(folder / "src", seconds, built + LIMIT, arguments, isa)
            tests += result.get("tests", 0)
            if result["outcome"] != "survived":
                break
        spent = {"seconds": round(time.monotonic() - built, 1), "build": round(built - start, 1)}
        return {**result, "tests": tests, **spent}


def read_results(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return {(m["file"], m["before"], m["at"], m["after"]): m for m in map(json.loads, lines)}


def check_nearest():
    """Raise FileNotFoundError if a file that NEAREST lists does not exist."""
    files = {name for names in NEAREST.values() for name in names.split()}
    missing = {name for name in files if not (ROOT / f"tests/{name}.py").exists()}
    if missing:
        raise FileNotFoundError(f"NEAREST lists tests that do not exist: {sorted(missing)}")


def run(mutants, traced, results, arguments):
    """Run the mutants that have no result yet, and print how many had each outcome.

    Then run every test that failed for a mutant on the unchanged source, where it should pass.
    """
    check_nearest()
    done = read_results(results)
    with results.open("a") as out:
        for mutant in mutants:
            if (mutant["file"], mutant["before"], mutant["at"], mutant["after"]) not in done:
                found = {**mutant, **run_mutant(mutant, traced, arguments)}
                print(json.dumps(found, ensure_ascii=False), file=out, flush=True)
    done = read_results(results)
    outcomes = collections.Counter(
        (Path(m["file"]).parent.name, m["outcome"]) for m in done.values()
    )
    for (where, outcome), count in sorted(outcomes.items()):
        print(f"{where:15} {outcome:10} {count}")
    killers = {m.get("by") for m in done.values()} & set(traced["tests"])
    print(
        "the tests that failed for a mutant, run on the unchanged source:",
        run_mutant(None, dict.fromkeys(killers, 5.0), arguments),
    )


def main():
    command, *paths = sys.argv[1:]
    if command == "list":
        lines = [json.dumps(m, ensure_ascii=False) for p in source_files() for m in choose(p)]
        Path(paths[0]).write_text("\n".join(lines) + "\n")
    elif command == "trace":
        tracer = Tracer()
        pytest.main(["-q", "-p", "no:cacheprovider", *paths[1:]], plugins=[tracer])
        Path(paths[0]).write_text(json.dumps({"lines": tracer.lines, "tests": tracer.tests}))
    elif command == "compare":
        before, after = (read_results(Path(path)) for path in paths)
        for key, mutant in before.items():
            now = after.get(key, {"outcome": "not run"})["outcome"]
            if mutant["outcome"] in NOTICED and now not in NOTICED:
                print(f"{now}: {mutant['file']}: {mutant['after'].strip()} ({mutant['by']})")
    elif command == "run":
        # Without this, the compiler could reuse the code of another mutant.
        os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
        # Imported once for all forked children; each imports its own copy of tightrope.
        import mpmath  # noqa: F401
        import torch._dynamo  # noqa: F401

        mutants = [json.loads(line) for line in Path(paths[0]).read_text().splitlines()]
        run(mutants, json.loads(Path(paths[1]).read_text()), Path(paths[2]), paths[3:])


if __name__ == "__main__":
    main()
