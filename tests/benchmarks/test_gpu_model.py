"""The model of the GPU kernels from their machine code, and its reader of machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import cases, model, report, sass
from benchmarks.pages import table
from tests.support.helpers import ROOT
from tests.support.triton.cases import needs_triton

RESULTS = ROOT / "benchmarks" / "results" / "gpu-h200-model.json"

# Three times, half of the threads load 16 bytes in each step of a loop, whose length is a parameter.
NESTED = """
	//## File "/somewhere/heads.py", line 7
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0020*/                   IMAD.WIDE.U32 R2, R0, 0x10, R2 ;
        /*0030*/                   ISETP.LT.U32.AND P0, PT, R0, 0x20, PT ;
        /*0040*/                   MOV R4, RZ ;
.L_x_0:
        /*0050*/                   MOV R5, RZ ;
.L_x_1:
	//## File "/somewhere/angles.py", line 8
        /*0060*/               @P0 LDG.E.128 R8, desc[UR4][R2.64+-0x10] ;
        /*0070*/                   IADD3 R2, P1, R2.reuse, 0x400, RZ ;
        /*0080*/                   IADD3.X R3, R3, RZ, RZ, P1, !PT ;
        /*0090*/                   VIADD R5, R5, 0x1 ;
        /*00a0*/                   ISETP.GE.U32.AND P2, PT, R5, c[0x0][0x218], PT ;
        /*00b0*/              @!P2 BRA `(.L_x_1) ;
        /*00c0*/                   VIADD R4, R4, 0x1 ;
        /*00d0*/                   ISETP.LT.U32.AND P3, PT, R4, 0x3, PT ;
        /*00e0*/               @P3 BRA `(.L_x_0) ;
        /*00f0*/                   EXIT ;
"""  # fmt: skip


def run(text: str, threads: int = 64, **words: int) -> sass.Program:
    constants = {int(at.removeprefix("at_"), 16): word for at, word in words.items()}
    return sass.Program(sass.read(text), constants, (3, 0, 0), threads)


def test_loops_and_predicates_are_followed() -> None:
    base = (1 << 40) - 0x500  # the sums carry into the upper half
    words = {"at_210": base & 0xFFFFFFFF, "at_214": base >> 32, "at_218": 5}
    program = run(NESTED, **words)
    counts = [program.executed[i] for i in range(16)]
    assert counts == [1] * 5 + [3] + [15] * 6 + [3] * 3 + [1]
    assert [access.addresses.size for access in program.accesses] == [32] * 15
    assert program.accesses[0].addresses[:2].tolist() == [base - 16, base]
    assert program.accesses[14].addresses[31] == base - 16 + 14 * 0x400 + 31 * 16
    assert not program.accesses[0].store
    assert program.accesses[0].size == 16
    assert program.loop == 6
    assert not program.guesses
    code = sass.read(NESTED)
    assert (code[4].source, code[6].source) == ("heads.py", "angles.py")
    assert (code[11].to, code[14].to) == (6, 5)


@pytest.mark.parametrize("used", [False, True])
def test_a_use_of_a_loaded_value_waits_for_it(used: bool) -> None:
    words = {"at_210": 0, "at_214": 1, "at_218": 5}
    use = "VIADD R5, R5, 0x1 ;\n        /*0098*/  FADD R7, R9, R9"
    text = NESTED.replace("VIADD R5, R5, 0x1", use) if used else NESTED
    clocks = run(text, **words).clocks
    assert 15 * sass.LOAD * used < clocks < 15 * sass.LOAD * used + 1000


def test_bytes_in_flight() -> None:
    again = "LDG.E.128 R12, desc[UR4][R2.64] ;\n        /*0068*/"
    use = "FADD R7, R13, R13 ;\n        /*0088*/"
    text = NESTED.replace("@P0 LDG", f"{again} @P0 LDG").replace("IADD3.X", f"{use} IADD3.X")
    assert sass.in_flight(sass.read(text)) == 32
    assert sass.in_flight(sass.read(text.replace("/*0060*/", f"/*0058*/ {use}"))) == 32
    assert sass.in_flight(sass.read("/*0000*/ EXIT ;")) == 0


def test_a_branch_on_an_unknown_number_skips_subroutines() -> None:
    program = run("""
        /*0000*/                   FSETP.GT.AND P0, PT, R1, 1.5, PT ;
        /*0010*/               @P0 BRA 0x40 ;
        /*0020*/                   MOV R8, 0x40 ;
        /*0030*/                   CALL.REL.NOINC 0x60 ;
        /*0040*/              @!P0 BRA 0x50 ;
        /*0050*/                   EXIT ;
        /*0060*/                   RET.REL.NODEC R8 0x0 ;
    """)  # fmt: skip
    assert [program.executed[i] for i in range(7)] == [1, 1, 0, 0, 1, 1, 0]
    assert program.guesses == {0x10, 0x40}


def test_a_called_subroutine_returns() -> None:
    program = run("""
        /*0000*/                   MOV R8, 0x20 ;
        /*0010*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64) ;
        /*0020*/                   EXIT ;
$__internal_0_$__cuda_sm20_div_s64:
        /*0030*/                   RET.REL.NODEC R8 0x0 ;
    """)  # fmt: skip
    assert dict(program.executed) == {0: 1, 1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize(
    "text, error",
    [
        ("/*0000*/ LDG.E R4, desc[UR4][R2.64] ;", "address"),
        ("/*0000*/ S2R R0, SR_TID.X ;\n/*0010*/ ISETP.LT.U32.AND P0, PT, R0, 0x5, PT ;\n"
         "/*0020*/ @P0 BRA 0x0 ;", "diverge"),
        ("/*0000*/ FSETP.GT.AND P0, PT, R1, 1.5, PT ;\n/*0010*/ @P0 EXIT ;", "exit"),
        ("/*0000*/ BRA 0x0 ;", "must end"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_an_error(text: str, error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        run(text)


def value_of(line: str, **registers: int) -> list[int]:
    """Run one instruction with given registers; return the 64 bits at R0 that it leaves."""
    moves = [f"/*{16 * i:04x}*/ MOV {name}, {n:#x} ;" for i, (name, n) in enumerate(registers.items())]  # fmt: skip
    program = run("\n".join([*moves, f"/*0ff0*/ {line} ;", "/*1000*/ EXIT ;"]), 1)
    found = [program._known.get(name) for name in ("R0", "R1", "P0")]
    return [int(np.atleast_1d(x)[0]) for x in found if x is not None]


@pytest.mark.parametrize(
    "line, registers, wanted",
    [
        ("IADD3 R0, P0, R4, -R5, RZ", {"R4": 7, "R5": 0}, [7, 1]),
        ("IADD3 R0, P0, R4, -R5, RZ", {"R4": 2, "R5": 5}, [0xFFFFFFFD, 0]),
        ("LEA R0, P0, -R4, R5, 0x2", {"R4": 0, "R5": 9}, [9, 1]),
        ("LEA R0, P0, -R4, R5, 0x2", {"R4": 3, "R5": 9}, [0xFFFFFFFD, 0]),
        ("LEA.HI R0, R4, 0xe, RZ, 0x1a", {"R4": 0xC0}, [0x11]),
        ("IMAD R0, R4, R5, -R6", {"R4": 3, "R5": 0xFFFFFFFF, "R6": 1}, [0xFFFFFFFC]),
        ("IMAD.HI.U32 R0, R4, R5, R6", {"R4": 1 << 31, "R5": 6, "R6": 0, "R7": 5}, [8]),
        ("IMAD.WIDE.U32 R0, R4, R5, RZ", {"R4": 0xFFFFFFFF, "R5": 3}, [0xFFFFFFFD, 2]),
        ("SHF.R.S32.HI R0, RZ, 0x4, R4", {"R4": 0x80000000}, [0xF8000000]),
        ("SHF.L.U64.HI R0, R4, 0x8, R5", {"R4": 0xAB000000, "R5": 1}, [0x1AB]),
        ("SHF.R.U64 R0, R4, 0x8, R5", {"R4": 0x100, "R5": 0xCD}, [0xCD000001]),
        ("PRMT R0, R4, 0x7610, R5", {"R4": 0x11112222, "R5": 0x33334444}, [0x33332222]),
        ("LOP3.LUT R0, R4, R5, RZ, 0x3c, !PT", {"R4": 0xF0, "R5": 0xFF}, [0xF]),
        ("ISETP.LT.AND P0, PT, R4, 0x1, PT", {"R4": 0xFFFFFFFF}, [1]),
        ("ISETP.LT.U32.AND P0, PT, R4, 0x1, PT", {"R4": 0xFFFFFFFF}, [0]),
        ("SGXT.U32 R0, R4, 0x4", {"R4": 0x123}, [3]),
        ("HFMA2.MMA R0, -RZ, RZ, 0, 5.9604644775390625e-08", {}, [1]),
    ],
)
def test_integer_instructions(line: str, registers: dict[str, int], wanted: list[int]) -> None:
    found = value_of(line, **registers)
    assert found[: len(wanted)] == wanted if "P0" not in line else found == wanted


@pytest.mark.parametrize(
    "registers, shared, warps, wanted",
    [
        # Known values of sm_90: 64 warps, 32 programs, 228 KB of shared memory, 65,536 registers.
        (32, 0, 4, 16),
        (72, 4096, 4, 7),
        (80, 4096, 4, 6),
        (81, 4096, 4, 5),
        (128, 0, 4, 4),
        (255, 0, 4, 2),
        (32, 0, 1, 32),
        (32, 100 * 1024, 4, 2),
        (64, 0, 8, 4),
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, wanted: int) -> None:
    assert model.resident(sass.Usage(registers, 1024, 0), shared, warps) == wanted


def launch(**moved: int) -> dict[str, Any]:
    return {"kernel": "rotate", "moved": moved, "wide": sorted(moved)}


def test_the_bytes_of_a_case_are_checked() -> None:
    case = cases.CASES[0]
    half = case.moved // 4
    whole = {"q": half, "k": half, "out_q": half, "out_k": half}
    model.checked(case, [launch(**whole)])
    # A load is missing; a load is twice; a tensor is not written; a head is not in units of 16 bytes.
    for wrong in (
        {**whole, "q": half - 16},
        {**whole, "k": 2 * half},
        {name: n for name, n in whole.items() if name != "out_k"},
    ):
        with pytest.raises(RuntimeError, match="must access"):
            model.checked(case, [launch(**wrong)])
    with pytest.raises(RuntimeError, match="accesses 0"):
        model.checked(case, [{**launch(**whole), "wide": ["q", "k", "out_k"]}])
    with pytest.raises(RuntimeError, match="must move"):
        model.checked(case, [launch(**whole), launch(**whole)])


def test_times_of_waves() -> None:
    one = {"programs": 1320 * 2 + 1, "resident": 10, "memory": 2.641, "arithmetic": 1.3205}
    found = model._times({**one, "latency": 0.5}, alone=0.25, start=0.125)
    assert found["lower"] == 2.641
    # Two whole waves of 1.32 + 0.66 / 10, and one program.
    assert found["higher"] == pytest.approx(2 * (1.32 + 0.066) + 0.125 + 0.25)


def command(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    environment.pop("TRITON_INTERPRET", None)
    call = [sys.executable, "-m", "benchmarks.gpu.model", *arguments]
    subprocess.run(call, cwd=ROOT, env=environment, check=True, capture_output=True)


@needs_triton
@pytest.mark.slow
def test_one_case(tmp_path: Path) -> None:
    """The main case accesses its bytes once; what the compiler chose may differ between versions."""
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    page.write_text("<!-- model -->\n<!-- end of model -->\n")
    command("--only", "^12 x 32768, 12 heads$", "--out", str(out), "--page", str(page))
    data = json.loads(out.read_text())
    assert data["assumed"]["target"] == "sm_90"
    assert str(ROOT) not in out.read_text()
    (one,) = data["cases"].values()
    (found,) = one["launches"]
    assert one["bytes"] == cases.CASES[0].moved == sum(found["moved"].values()) - 512
    assert found["moved"]["primary"] == 64 * 8
    assert found["programs"] == 12 * 32768 // 16
    assert found["in flight"] == 64
    assert found["spills"] == 0
    # The budget of 92 % leaves no room for more.
    assert found["arithmetic"] < 0.5 * found["memory"]
    assert found["latency"] < 0.5 * found["memory"]
    assert 0.92 < one["share"][0] <= one["share"][1] <= 1
    assert "| 12 x 32768, 12 heads | " in page.read_text()


@needs_triton
@pytest.mark.slow
def test_every_case(tmp_path: Path) -> None:
    """All cases pass the check of their bytes, and the main ones leave room for the budget."""
    out = tmp_path / "out.json"
    command("--out", str(out))
    found = json.loads(out.read_text())["cases"]
    assert set(found) == {
        case.name for case in (*model.BUDGETS, *cases.CASES) if not case.neighbours
    }
    for case in model.BUDGETS:
        assert found[case.name]["share"][0] > report.SHARE
    for one in found.values():
        assert all(part["spills"] == 0 for part in one["launches"])


def test_the_page_shows_the_numbers_of_the_file() -> None:
    found = json.loads(RESULTS.read_text())["cases"]
    shown = {name: found[name] for name in model.MAIN}
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert "\n".join(table(model.HEADINGS, model.rows(shown))) in text


def test_a_report_shows_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.json"
    case = cases.CASES[0]
    path.write_text(json.dumps({"cases": {case.name: {"share": [0.9, 1.0]}}}))
    monkeypatch.setattr(report, "MODEL", path)
    result = {"case": asdict(case), "seconds": {"tightrope": [1.0]}, "ratios": {"clone": [1.05]}}
    units = [
        {"unit": f"x::test_{test}", "outcome": "passed", "case": case.name, "result": result}
        for test in ("share_of_the_copy", "time")
    ]
    assert next(report.budgets(units))[2] == "95.24 % (model 90.00–100.00 %): held"
    assert "| 1.05 (model 1.00–1.11) |" in list(report.ratios(units))[2]
