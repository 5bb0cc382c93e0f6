"""Check and measure the GPU kernels: `python -m benchmarks.gpu --out benchmarks/results/gpu-NAME.json`.

It runs pytest over the files of this folder, in three phases:

    budgets   the speed budgets, most of them relative to a copy (one worker)
    checks    every case at small sizes; every contender of every case, compiled and compared; the
              tests of the Triton backend, tests/kernel/triton without test_machine_code.py and test_emulated.py
              (parallel workers)
    times     all contenders with right results, in turns; then other block shapes (one worker)

A contender is an implementation that is timed: this library, a copy, or another library. Each test
is a unit. A unit that times contenders first compares every element of the contenders' results
with float64. The result of a unit is written as soon as the unit ends, so a crash or a hang loses
one unit only. Units that were not started have the outcome "no time".

--dry-run runs tiny sizes under Triton's interpreter, without compiled contenders unless --against selects
them; its times mean nothing.
--report FILE prints the tables of a run, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .plugin import Options

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = "tests/kernel/triton/test_*.py"
HERE = "benchmarks/gpu"

#: Exit codes: all results are right; something is wrong; there is no GPU, or a package is missing.
FINE, WRONG, UNABLE = 0, 1, 2

#: The packages that the tests need: name of the module -> name to install.
NEEDS = {
    "pytest": "pytest",
    "xdist": "pytest-xdist",
    "hypothesis": "hypothesis",
    "mpmath": "mpmath",
}

#: Seconds that a phase's last unit may run beyond the deadline, and seconds reserved for the report.
GRACE, SPARE = 20.0, 10.0


class Phase(NamedTuple):
    """A group of tests that run together.

    Attributes:
        tests: test files, or tests in them.
        alone: whether a single worker runs them.
        share: the fraction of the remaining time that they may take.
    """

    tests: tuple[str, ...]
    alone: bool
    share: float


def phases() -> tuple[Phase, ...]:
    """Return the phases of a run, in order."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(KERNEL_TESTS))
    # The tests that only compile, or emulate, need no GPU.
    triton = [
        path for path in found if not path.endswith(("test_machine_code.py", "test_emulated.py"))
    ]
    if len(triton) == len(found) or len(triton) < 3:
        raise FileNotFoundError(f"{KERNEL_TESTS}: these are not the tests of the kernels: {found}")
    return (
        Phase((f"{HERE}/test_budgets.py",), True, 0.4),
        Phase(
            (f"{HERE}/test_cases.py::test_small", f"{HERE}/test_cases.py::test_right", *triton),
            False,
            0.5,
        ),
        Phase((f"{HERE}/test_cases.py::test_time", f"{HERE}/test_blocks.py"), True, 1.0),
    )


def run(phase: Phase, given: Options, jobs: int, out: Any) -> int:
    """Run a phase, at most until GRACE seconds after its deadline; return pytest's exit code.

    Args:
        out: called every few seconds, to write the results so far.
    """
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-W", "default"),
        *("-n", str(1 if phase.alone else jobs), "--maxschedchunk=1", "--max-worker-restart=99"),
        *("-p", "benchmarks.gpu.plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler"),
        *phase.tests,
    ]
    paths = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    variables = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # Compile in the worker: starting a pool of compilers takes longer than compiling one kernel.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": f"{given.results}/inductor",
        "TRITON_CACHE_DIR": f"{given.results}/triton",
        **({} if phase.alone else {"OMP_NUM_THREADS": "1"}),
        **({"CUDA_VISIBLE_DEVICES": ""} if given.dry else {}),
        **given.environment(),
    }
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **variables}, start_new_session=True
    )
    try:
        while process.poll() is None and time.time() < given.deadline + GRACE:
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                out()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("gpu-results.json"),
        help="JSON file to write (default: gpu-results.json)",
    )
    add("--minutes", type=float, default=8.0, help="time limit of the whole run (default: 8)")
    add("--only", type=_pattern, default="", help="regular expression for the names of units")
    add(
        "--against",
        type=_pattern,
        help="regular expression for contenders (default: all; in a dry run, those not compiled)",
    )
    add("--peers", type=Path, help="folder with source files of other libraries")
    add("--jobs", type=int, help="parallel workers (default: cores - 2, from 1 to 8)")
    add("--limit", type=float, default=120.0, help="time limit of a unit in seconds (default: 120)")
    add("--dry-run", action="store_true", help="tiny sizes, under Triton's interpreter")
    add("--report", type=Path, metavar="FILE", help="print the tables of a run and exit")
    return parser.parse_args(arguments)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid regular expression: {error}"
        ) from error
    return text


def main(arguments: list[str] | None = None) -> int:
    """Run all phases, write the results, print the tables; return the exit code."""
    options = parsed(arguments)
    sys.path.insert(0, str(ROOT / "src"))  # the package need not be installed
    needed = ("pytest",) if options.report else tuple(NEEDS)
    missing = [NEEDS[name] for name in needed if find_spec(name) is None]
    if missing:
        print(f"it needs packages: python -m pip install {' '.join(missing)}", file=sys.stderr)
        return UNABLE
    if options.report:
        from .report import written

        print(written(json.loads(options.report.read_text())))
        return FINE
    if not options.dry_run and not _has_gpu():
        print("torch finds no GPU: run on a machine with one, or pass --dry-run", file=sys.stderr)
        return UNABLE
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        return _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> int:
    from .plugin import Options, read_units, write

    start = time.time()
    against = options.against or ("^(?!.*compiled)" if options.dry_run else "")
    jobs = options.jobs or (1 if options.dry_run else max(1, min(8, (os.cpu_count() or 1) - 2)))
    if options.peers:
        os.environ["TIGHTROPE_GPU_PEERS"] = str(options.peers.resolve())
    data: dict[str, Any] = {
        "dry": options.dry_run,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pytest": [],
    }

    def out() -> None:
        data["units"], data["seconds"] = read_units(folder), time.time() - start
        write(options.out, data)

    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for phase in phases():
            now = time.time()
            ends = now + phase.share * max(0.0, start + 60 * options.minutes - SPARE - now)
            given = Options(
                str(folder),
                ends,
                options.limit,
                options.dry_run,
                options.only,
                against,
                mixed=not phase.alone,
            )
            data["pytest"].append(run(phase, given, jobs, out))
            out()
    except KeyboardInterrupt:
        out()
        return 130
    from .report import USUAL_EXITS, failures, written

    print(written(data))
    wrong = failures(data["units"]) or set(data["pytest"]) - {*USUAL_EXITS}
    return WRONG if wrong else FINE


def _has_gpu() -> bool:
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
