"""The GPU benchmark, tested without a GPU: its checks, its recovery from crashes, its report."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command, cases, contenders, peers, report, test_cases
from benchmarks.gpu.plugin import Options, read_units
from benchmarks.speed import Made, measure
from benchmarks.speed._measure import Expected, WrongError, check, inputs
from tests.support.command import python
from tests.support.helpers import ROOT
from tests.support.triton.cases import kernels_in_place, needs_triton

# --- units that fail ------------------------------------------------------------------------------

UNITS = """
import os, sys, time
from types import SimpleNamespace
import pytest

def broken():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.parametrize("contender", [SimpleNamespace(name=n) for n in ("tightrope", "Liger")])
def test_aborts(contender, record):
    record["before"] = 1
    os.abort()

def test_right(record):
    record["value"] = 5

def test_wrong():
    assert 1 == 2, "planted"

def test_hangs():
    while True:
        time.sleep(0.01)

def test_spoils_the_device():
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=broken)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)

def test_absent():
    pytest.skip("not here")

def test_last(record):
    record["torch"] = "torch" in sys.modules
"""


def run(folder: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Run UNITS as the command does; return the recorded units by name."""
    path = folder / "test_units.py"
    path.write_text(UNITS)
    phase = command.Phase((str(path),), alone=True, share=1.0)
    given = Options(str(folder), **{"deadline": time.time() + 60, **options})
    command.run(phase, given, 1, lambda: None)
    return {unit["unit"].partition("::test_")[2]: unit for unit in read_units(folder)}


@pytest.mark.slow
def test_a_failure_costs_its_unit(tmp_path: Path) -> None:
    """After a crash, a hang, a wrong result or a lost device, all other units still get results."""
    found = run(tmp_path, limit=1.5)
    outcomes = {name: unit["outcome"] for name, unit in found.items()}
    assert outcomes == {
        "aborts[contender0]": "crashed",
        "aborts[contender1]": "crashed",
        "right": "passed",
        "wrong": "failed",
        "hangs": "hung",
        "spoils_the_device": "failed",
        "absent": "skipped",
        "last": "passed",
    }
    assert found["right"]["result"] == {"value": 5}
    # The worker that lost the device was replaced.
    assert found["last"]["result"] == {"torch": False}
    for name, text in {
        "aborts[contender0]": "test_aborts",
        "wrong": "planted",
        "hangs": "test_hangs",
        "spoils_the_device": "the device is unusable: CUDA error",
        "absent": "not here",
    }.items():
        assert text in found[name]["note"], name
    failed = [
        unit["unit"].partition("::test_")[2] for unit in report.failures(read_units(tmp_path))
    ]
    assert failed == ["aborts[contender0]", "wrong", "hangs", "spoils_the_device"]


def test_after_the_deadline_nothing_starts(tmp_path: Path) -> None:
    found = run(tmp_path, deadline=time.time() - 1, only="right|last")
    assert {name: unit["outcome"] for name, unit in found.items()} == {
        "right": "no time",
        "last": "no time",
    }


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
@needs_triton
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A dry run of a few units works, from the command line to the tables."""
    phases = command.phases()
    assert [phase.alone for phase in phases] == [True, False, True]
    assert "tests/kernel/triton/test_device.py" in phases[1].tests
    for path in (path.partition("::")[0] for phase in phases for path in phase.tests):
        assert (ROOT / path).is_file(), path
    few = command.Phase((phases[0].tests[0], f"{command.HERE}/test_cases.py"), True, 1.0)
    monkeypatch.setattr(command, "phases", lambda: (few,))
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    out = tmp_path / "deep" / "out.json"
    chosen = "machine|compilations|share.*prefill 32k.$|(right|time).decode 1(,|])"
    arguments = ["--dry-run", "--out", str(out), "--only", chosen, "--against", "^eager$"]
    assert command.main(arguments) == 0
    data = json.loads(out.read_text())
    assert {unit["outcome"] for unit in data["units"]} == {"passed"}
    assert len(data["units"]) == 3 + 2 * 2
    assert data["dry"]
    printed = capsys.readouterr().out
    assert "A dry run: times mean nothing." in printed
    assert re.search(r"^\| decode 1, graph \(cut\) \| [\d.e+]+ \| 0 \|", printed, re.MULTILINE)
    assert command.main(["--report", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed
    monkeypatch.setattr(command, "_has_gpu", lambda: False)
    assert command.main(["--out", str(tmp_path / "none.json")]) == command.UNABLE
    with pytest.raises(SystemExit):
        command.main(["--only", "("])


def test_packages_that_are_missing_are_one_line() -> None:
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({list(command.NEEDS)}));"
        "from benchmarks.gpu.__main__ import main; sys.exit(main())"
    )

    def done(*arguments: str) -> tuple[int, str]:
        ended = python("-c", script, *arguments, cwd=ROOT)
        return ended.returncode, ended.stderr

    assert done("--help") == (0, "")
    packages = "it needs packages: python -m pip install pytest"
    assert done() == (2, f"{packages} pytest-xdist hypothesis mpmath\n")
    assert done("--report", "none.json") == (2, f"{packages}\n")


def test_the_tables_need_no_installed_package(tmp_path: Path) -> None:
    """On a machine with a GPU only torch is installed; the end of a run must not fail there."""
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"dry": True, "date": "", "units": [], "seconds": 0, "pytest": []}))
    # -S and PYTHONPATH: without the links to packages that are installed in place.
    line, where = ("-S", "-m", "benchmarks.gpu", "--report", out), Path(torch.__file__).parents[1]
    ended = python(*line, cwd=ROOT, PYTHONPATH=str(where))
    assert ended.returncode == 0, ended.stderr
    assert "A dry run: times mean nothing." in ended.stdout


@pytest.mark.slow
@needs_triton
def test_everything_dry(tmp_path: Path) -> None:
    """Every kind of unit runs dry; compiled contenders are left out on the CPU.

    Of the tests of the kernels, which `make test` runs as they are, one runs as a unit.
    """
    out = tmp_path / "out.json"
    ours = "^benchmarks.*(::test_[mshcr]|_time.(decode|prefill 32k)|_blocks.decode)"
    only = f"{ours}|test_phases.*::test_rows_are_shared"
    options = ["--dry-run", "--minutes", "30", "--jobs", "2", "--out", str(out), "--only", only]
    ended = python("-m", "benchmarks.gpu", *options, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    units = json.loads(out.read_text())["units"]
    assert {unit["outcome"] for unit in units} <= {"passed", "skipped"}
    assert len(units) > 190


# --- cases and contenders -------------------------------------------------------------------------


def test_cases_have_names_of_their_own_and_fit_into_memory() -> None:
    for group in (cases.SHARES, cases.CASES):
        assert len({case.name for case in group}) == len(group)
    assert set(report.RIVALS) <= {one.name for one in contenders.CONTENDERS}
    whole = cases.CASES[0]
    assert cases.fitted(whole, 10**10) is whole
    assert [cases.fitted(whole, room).rows for room in (1_300_000_000, 10**9)] == [6, 3]
    assert cases.fitted(whole, 10**8).tokens == 8192


LOOSE = {
    # Python functions with the signatures of the libraries' kernels.
    "Liger-Kernel/src/liger_kernel/ops/rope.py": """
import torch

class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turned(q, cos[:, None], sin[:, None]), turned(k, cos[:, None], sin[:, None])

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = (x[:, None] for x in ctx.saved_tensors)
        return turned(dq, cos, -sin), turned(dk, cos, -sin), None, None

def turned(x, cos, sin):
    u, v = x.detach().clone().chunk(2, -1)
    return x.detach().copy_(torch.cat((u, v), -1) * cos + torch.cat((-v, u), -1) * sin)
""",
    "flash-attention/flash_attn/layers/rotary.py": """
import torch

def apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets=0, cu_seqlens=None, max_seqlen=0):
    at = torch.arange(x.shape[-3])
    if cu_seqlens is not None:
        assert x.dim() == 3 and max_seqlen <= len(cos)
        at = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    elif not isinstance(seqlen_offsets, int):
        at = at + seqlen_offsets[:, None]
    cos, sin = (table[at][..., None, :] for table in (cos, sin))
    u, v = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    y = u * cos - v * sin, u * sin + v * cos
    y = torch.stack(y, -1).flatten(-2) if interleaved else torch.cat(y, -1)
    return x.copy_(y) if inplace else y
""",
    "xopes/xopes/ops/lrpe/rotate/_1d/lrpe_rotate_1d_sp_triton.py": """
import torch
from xopes.utils import contiguous

def lrpe_rotate_1d_sp_triton(x, theta, offset, act, dim):
    angle = torch.arange(x.shape[1])[:, None, None] * theta
    u, v = x.chunk(2, -1)
    return torch.cat((u * angle.cos() - v * angle.sin(), u * angle.sin() + v * angle.cos()), -1)
""",
    "xopes/xopes/utils/utils.py": "contiguous = generate_configs = next_power_of_two = None",
    "xopes/xopes/__init__.py": "raise RuntimeError('the whole package')",
}


@pytest.fixture
def loose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with stand-ins for the peers' files."""
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    names = ("liger_kernel", "flash_attn", "xopes", "fla")

    def forget() -> None:
        for module in [m for m in sys.modules if m.split(".")[0] in names]:
            del sys.modules[module]

    forget()
    for name, text in LOOSE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    forget()


def small(name: str) -> Any:
    (case,) = (case for case in cases.CASES if case.name == name)
    return replace(cases.small(case, 9), device="cpu", dtype="float32", threads=1)


def named(name: str) -> Any:
    return next(one for one in contenders.KERNELS if one.name == name)


def test_a_crashed_contender_is_not_timed() -> None:
    decode, other = small("decode 32"), small("decode 1")
    units = [
        unit("right", decode, outcome="passed", contender="eager"),
        unit("right", decode, outcome="no time", contender="xopes"),
        unit("right", decode, outcome="skipped", contender="FLA", note="wrong\nmore"),
        unit("right", decode, outcome="crashed", contender="Liger", note="Fatal Python error"),
        unit("right", other, outcome="crashed", contender="transformers"),
        unit("right", decode, outcome="crashed", contender="tightrope"),
        unit("time", decode, outcome="crashed"),
    ]
    assert test_cases.lost(decode, units) == {"FLA": "wrong", "Liger": "Fatal Python error"}


@pytest.mark.parametrize(
    "name, at",
    [
        ("Liger", "prefill 32k, training"),
        ("Liger", "decode 32"),
        ("flash-attention", "prefill 2k"),
        ("flash-attention", "prefill 2k, in place"),
        ("flash-attention", "prefill 32k, interleaved"),
        ("flash-attention", "packed 32k"),
        ("flash-attention", "decode 32"),
        ("xopes", "prefill 32k"),
    ],
)
def test_peers_get_the_arguments_that_they_expect(name: str, at: str, loose: Path) -> None:
    case = small(at)
    assert named(name).why_not(case) is None
    given = inputs(case)
    check(named(name), case, *given, Expected(case, *given)).call()


def test_a_peer_that_is_wrong_or_missing_is_not_timed(loose: Path) -> None:
    path = loose / "flash-attention" / "flash_attn" / "layers" / "rotary.py"
    path.write_text(LOOSE["flash-attention/flash_attn/layers/rotary.py"].replace("+ v", "- v"))
    (loose / "Liger-Kernel/src/liger_kernel/ops/rope.py").unlink()
    case = small("prefill 2k")
    given = inputs(case)
    with pytest.raises(WrongError, match=r"elements are wrong; the first is q\[0, 0, 0, 8\]"):
        check(named("flash-attention"), case, *given, Expected(case, *given))
    reason = named("Liger").why_not(small("decode 32"))
    assert reason == "liger_kernel is neither installed nor in the folder of peers"
    assert "its autotuning takes long" in str(named("FLA").why_not(case))
    with pytest.raises(ImportError):
        peers.function("FLA")


@needs_triton
def test_a_wrong_element_is_found_and_its_contender_not_timed() -> None:
    """One wrong element of 432 is reported; the right results come from the Triton kernels."""
    case = small("prefill 32k, in place")
    calls = []

    def wrong(*given: Any) -> Made:
        made = contenders.OURS.make(*given)
        made.result[1][0, 0, 3, 5] += 0.5
        return Made(lambda: calls.append(None), made.result)

    planted = replace(contenders.OURS, name="planted", make=wrong)
    with kernels_in_place():
        found = measure(
            case, (contenders.OURS, planted), runs=1, rounds=2, wanted=re.compile("planted")
        )
    assert set(found["seconds"]) == {"tightrope"}
    assert ": 1 of 432 elements are wrong" in found["absent"]["planted"]
    assert "the first is k[0, 0, 3, 5]: " in found["absent"]["planted"]
    assert calls == []


# --- the report -----------------------------------------------------------------------------------


def unit(test: str, case: Any = None, result: Any = None, **more: Any) -> dict[str, Any]:
    name = f"benchmarks/gpu/test_x.py::test_{test}"
    found = {"unit": name, "outcome": "passed", "note": "", "result": result or {}, **more}
    return found if case is None else {**found, "case": case.name}


def timed(test: str, case: Any, ours: float, **others: list[float]) -> dict[str, Any]:
    """Return a unit with our time in seconds, and the ratios of our time to the times of others."""
    others = {name.replace("_", " "): ratios for name, ratios in others.items()}
    seconds = {"tightrope": [ours], **{name: [1.0] for name in others}}
    return unit(test, case, {"case": asdict(case), "seconds": seconds, "ratios": others})


def test_the_numbers_of_a_report() -> None:
    long, prefill, back, _ = cases.SHARES
    decode = next(case for case in cases.CASES if case.name == "decode 32")
    error = "E   AssertionError: off by 5\nmore"
    units = [
        timed("share_of_the_copy", long, 1.0, clone=[1.0, 1.05]),
        timed("share_of_the_copy", replace(prefill, tokens=16384), 1.0, clone=[1.0]),
        timed("share_of_the_copy", back, 1.0, clone=[1.2, 1.25]),
        unit("host_time", None, {"rotate_qk_, prepared": 24.4, "rotate_qk, prepared": 25.6}),
        unit(
            "compilations",
            None,
            {"after two calls": 2, "after all": 3},
            outcome="failed",
            note=error,
        ),
        timed(
            "time[a]",
            cases.CASES[0],
            0.001,
            clone=[1.0],
            compiled_eager=[0.5, 0.6],
            Liger=[0.9, 1.1],
        ),
        timed("time[b]", decode, 2e-5, compiled_eager=[1.2], Liger=[0.5]),
        unit("right", decode, outcome="crashed", contender="Liger", note="Fatal Python error"),
    ]
    data = {"dry": False, "date": "2026-01-01", "seconds": 5.0, "pytest": [0, 3]}
    data["units"] = units
    text = report.written(data)
    for line in (
        "| bandwidth of 12 x 32768, 12 heads | ≥ 92% of a copy's | 95.24–100.00 %: held |",
        "| bandwidth of prefill 32k | ≥ 92% of a copy's | 100.00 %: open: measured on a smaller case |",
        "| bandwidth of 12 x 32768, 12 heads, backward | ≥ 92% of a copy's | 80.00–83.33 %: NOT HELD |",
        "| bandwidth of prefill 32k, backward | ≥ 92% of a copy's | not measured: not selected |",
        "| host time of rotate_qk_, prepared | ≤ 25 µs | 24.4 µs: held |",
        "| host time of rotate_qk, prepared | ≤ 25 µs | 25.6 µs: NOT HELD |",
        "| kernels compiled, over lengths and offsets | none after the first calls | 2, then 3: NOT HELD |",
        "| time relative to compiled eager | ≤ 1 in each of 2 cases | NOT HELD in decode 32 (1.20) |",
        "| time relative to Liger | ≤ 1 in each of 2 cases | held; open in 12 x 32768, 12 heads (0.90–1.10) |",
        "| time relative to xopes | ≤ 1 in each of 0 cases | not measured |",
        "| case | µs | GB/s | / `clone` | / `compiled eager` | / `Liger` |",
        "| 12 x 32768, 12 heads | 1000 | 4832 | 1.00 | 0.50–0.60 | 0.90–1.10 |",
        "6 passed, 1 failed, 1 crashed, in 5 s",
        "- benchmarks/gpu/test_x.py::test_compilations: failed: AssertionError: off by 5",
    ):
        assert line in text.splitlines(), line
    assert "Fatal" not in text  # that is another library's failure
    assert text.endswith("pytest ended with 3")
    timed_out = unit("share_of_the_copy", prefill, outcome="no time")
    text = report.written({**data, "units": [timed_out]})
    assert "| bandwidth of prefill 32k | ≥ 92% of a copy's | not measured: no time |" in text


def test_the_fastest_shape_is_beside_that_of_the_table() -> None:
    units = [
        timed(f"blocks[{ratio}]", cases.CASES[0], 1.0, clone=[ratio]) for ratio in (1.2, 0.9, 1.0)
    ]
    for one, change in zip(units, ({"warps": 8}, {"pairs": 512}, {}), strict=True):
        one["result"]["change"] = change
    assert list(report.shapes(units)) == [
        "- 12 x 32768, 12 heads: {'pairs': 512}, 0.900 of the time of the table's shape"
    ]
