"""`tightrope audit`: exit codes, JSON, output, and functions that crash."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import call, interrupted
from tests.support.helpers import ROOT
from tightrope import RopeSpec
from tightrope_tools.audit import AngleError, Check, Finding, Report
from tightrope_tools.cli.audit import show_report
from tightrope_tools.command import main

MODULE = """
import os, time
import torch
from tests.support import planted_faults
print("imported")
good, made = planted_faults.rope(), planted_faults.rope
bad = planted_faults.rope(sign=-1.0)
apply = planted_faults.with_tables()
dict, QUICK = dict, []
crashes = lambda x, positions: os.abort()
hangs = lambda x, positions: time.sleep(1e6)
def fails():
    raise RuntimeError("no luck")
def raises(x, positions):
    raise RuntimeError("[bold]no luck[/bold]")
"""
QUICK = ["--only-float32", "--longest", "4096"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a module of functions, in which the command runs."""
    (tmp_path / "audited_rope.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    sys.modules.pop("audited_rope", None)
    return tmp_path


def audit(*arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code, output and error stream."""
    return call(main, "audit", "--no-isolate", *arguments)


def in_json(*arguments: str) -> tuple[int, Report]:
    """Run the command, which must print JSON and nothing else; return its exit code and the report."""
    code, out, _ = audit(*arguments, "--json")
    saved = json.loads(out)
    report = Report.from_dict(saved)
    assert (saved["version"], saved["ok"]) == (2, report.ok)
    return code, report


def test_nothing_found_is_0() -> None:
    code, out, err = audit("audited_rope:good", *QUICK)
    assert code == 0
    for words in ("audit of audited_rope:good", "geometric, base 10000", "No findings; "):
        assert words in out
    assert "\x1b" not in out
    # The module's own output goes to the error stream.
    assert "imported" not in out
    assert "imported" in err


def test_findings_are_1() -> None:
    code, out, _ = audit("audited_rope:bad", *QUICK)
    assert code == 1
    assert "warning sign\n  All pairs turn in the opposite direction to RoPE: " in out
    assert "  negate the sines, or the positions: " in out
    code, report = in_json("audited_rope:bad", *QUICK)
    assert (code, report.codes) == (1, ("sign",))
    assert report.angle_errors[0].position == 4096


@pytest.mark.parametrize(
    "options, codes",
    [
        ("--head-dim 64 --base 10000 --half", ()),
        ("--head-dim 64 --base 500000", ("base",)),
        ("--head-dim 64 --interleaved", ("pairing",)),
        ("--head-dim 64 --rotary-dim 32", ("slice",)),
        ("--meant spec.json", ("base",)),
        ("--meant config.json", ("base",)),
    ],
)
def test_the_declared_rotation(options: str, codes: tuple[str, ...], folder: Path) -> None:
    (folder / "spec.json").write_text(
        json.dumps(RopeSpec(64, base=2e4).to_dict()), encoding="utf-8"
    )
    config = {"model_type": "llama", "head_dim": 64, "rope_theta": 3e4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, report = in_json("audited_rope:good", *QUICK, *options.split())
    assert (code, report.codes) == (len(codes), codes)


def test_a_factory() -> None:
    assert audit("audited_rope:made", "--make", *QUICK)[0] == 0


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("audited_rope:fails", "must return a function to audit but raised RuntimeError: no luck"),
        ("audited_rope:dict", "must return a callable but returned dict"),
        ("audited_rope:QUICK", "audited_rope:QUICK must be callable but is list"),
    ],
)
def test_what_makes_no_function_is_refused(target: str, words: str) -> None:
    code, _, err = audit(target, "--make", *QUICK)
    assert code == 2
    assert words in " ".join(err.split())


def test_notes_can_fail_the_audit() -> None:
    far = ["audited_rope:good", "--only-float32"]
    assert audit(*far)[0] == 0
    assert audit(*far, "--fail-on", "note")[0] == 1


def test_a_base_that_was_not_checked_is_a_note() -> None:
    options = ["audited_rope:apply", *QUICK, "--head-dim", "64", "--base", "500000"]
    sentence = (
        "The caller provides cosines and sines, so the audit did not check the declared base."
    )
    code, out, _ = audit(*options)
    assert code == 0
    out = " ".join(out.split())
    assert f"note frequencies-unchecked {sentence}" in out
    assert "not checked: frequencies are as declared (the caller provides them)" in out
    assert audit(*options, "--fail-on", "note")[0] == 1


@pytest.mark.parametrize("isolate", ["--isolate", "--no-isolate"])
def test_a_function_that_raises_is_a_finding(
    isolate: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = audit(isolate, "audited_rope:raises")
    assert code == 1
    assert "error cannot-call" in out
    assert "[bold]no luck[/bold]" in " ".join(out.split())
    assert "Traceback" not in "".join((out, err, *capfd.readouterr()))


def test_a_function_that_crashes_is_a_finding(capfd: pytest.CaptureFixture[str]) -> None:
    # Without an option a function runs in a process of its own.
    code, out, err = call(main, "audit", "audited_rope:crashes", "--json")
    assert code == 1
    (finding,) = Report.from_dict(json.loads(out)).findings
    assert finding.code == "crashes"
    assert finding.sentence == "The audit process was ended by signal 6."
    assert "Traceback" not in "".join((err, *capfd.readouterr()))


def test_a_function_that_hangs_is_a_finding() -> None:
    code, out, _ = audit("--isolate", "audited_rope:hangs", "--timeout", "0.5")
    assert code == 1
    assert "The audit did not end within 0.5 s." in out


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_ends_both_processes_without_a_traceback() -> None:
    Path("slow_rope.py").write_text(
        "import sys, time\nsys.stderr.write('begun\\n')\nsys.stderr.flush()\ntime.sleep(60)\n",
        encoding="utf-8",
    )
    script = "import sys; from tightrope_tools.command import main; sys.exit(main())"
    code, rest = interrupted(script, "audit", "slow_rope:f", at="begun")
    assert code == 130
    assert "Traceback" not in rest


# What is wrong -> the arguments, and the words of the error.
GOOD = "audited_rope:good"
WRONG: dict[str, tuple[str, str]] = {
    "no module": ("nowhere:f", "module 'nowhere' must be importable from"),
    "no function": ("audited_rope:f", "module 'audited_rope' must define 'f' but does not"),
    "no target": ("./nothing", "target must be MODULE:FUNCTION, the path of a config.json"),
    "broken config": ("broken.json", "broken.json must hold JSON but is invalid at line 1"),
    "two values": ("twice.json", "in twice.json each key must have one value but rope_theta"),
    "list": ("list.json", "list.json must hold a JSON object but holds list"),
    "empty folder": ("empty", "empty must hold a config.json but does not"),
    "no type": ("none.json", "none.json must have a model_type that is a string but has None"),
    "no head_dim": (f"{GOOD} --base 10", "need --head-dim as well"),
    "both": (f"{GOOD} --meant x --base 1", "--meant gives the whole spec"),
    "meant": (f"{GOOD} --meant missing.json", "missing.json"),
    "negative base": (f"{GOOD} --head-dim 64 --base -1", "base must be positive and finite"),
    "NaN": (
        f"{GOOD} --timeout nan",
        "--timeout must be positive and below 1e6 seconds but got nan",
    ),
    "device": (f"{GOOD} --device mars", "device 'mars' must be available but torch raised Runtime"),
    "long": (f"{GOOD} --longest {10**30}", "longest must be at most 2147483648"),
    "no GGUF": (f"{GOOD} --meant binary.gguf", "must be a GGUF file"),
    "option": (f"{GOOD} --nothing", "unrecognized arguments: --nothing"),
    "binary": ("binary.json", "binary.json must hold JSON but is not UTF-8 text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_2_and_one_line(name: str, folder: Path) -> None:
    (folder / "broken.json").write_text('{"model_type": ', encoding="utf-8")
    (folder / "list.json").write_text("[]", encoding="utf-8")
    (folder / "empty").mkdir()
    (folder / "none.json").write_text('{"rope_theta": 1.0}', encoding="utf-8")
    (folder / "twice.json").write_text('{"rope_theta": 1.0, "rope_theta": 2.0}', encoding="utf-8")
    for suffix in ("json", "gguf"):
        (folder / f"binary.{suffix}").write_bytes(b"\xff\xfe\x00")
    arguments, words = WRONG[name]
    code, out, err = audit(*arguments.split())
    assert (code, out) == (2, "")
    (error,) = [line for line in err.splitlines() if line != "imported"]
    assert words in error


def test_wrong_use_in_the_other_process(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = audit("--isolate", "audited_rope:f")
    assert (code, out) == (2, "")
    own, other = capfd.readouterr()
    assert "module 'audited_rope' must define 'f' but does not" in err + other
    assert "Traceback" not in err + own + other


SAMPLE: dict[str, Any] = {
    "target": "some.module:function",
    "facts": {"called as": "fn(x, positions)", "scores": "move by 1e-8 " * 12},
    "findings": (
        Finding(
            "sign", "error", "All pairs turn the wrong way. " * 6, "[red]no markup[/red]", "a = 1"
        ),
        Finding("angle-error", "note", "A note.", ""),
    ),
    "checks": (Check("norm", "passed"), Check("rows", "skipped: " + "because " * 20)),
    "angle_errors": (AngleError(4096, 1e-4, None, 5e-4),),
}


@pytest.mark.parametrize("width", [80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    def shown() -> int:
        show_report(Report(**SAMPLE))
        return 0

    text = call(shown, width=width)[1]
    assert max(map(len, text.splitlines())) <= width
    for words in ("[red]no markup[/red]", "1 error, 1 note; 1 check passed.", "4,096"):
        assert words in text


PAIR = """
import torch
from tests.support.planted_faults import inv_freq, turn

def tables(positions):
    angle = positions[..., None] * inv_freq()
    return angle.sin(), angle.cos()

def apply(x, cos, sin):
    return turn(x.float(), cos[:, None], sin[:, None]).to(x.dtype)
"""


def test_a_function_with_its_partner(folder: Path) -> None:
    (folder / "audited_pair.py").write_text(PAIR, encoding="utf-8")
    sys.modules.pop("audited_pair", None)
    code, report = in_json("audited_pair:apply", *QUICK)
    assert (code, [each.code for each in report.findings]) == (0, ["partner-unseen"])
    code, report = in_json("audited_pair:apply", "--with", "audited_pair:tables", *QUICK)
    assert (code, report.codes) == (1, ("swapped-tables",))
    code, _, err = audit(
        "audited_pair:apply", "--with", "audited_pair:tables", "--against", "llama"
    )
    assert code == 2
    assert "--against compares two targets, so it takes no --with" in " ".join(err.split())
