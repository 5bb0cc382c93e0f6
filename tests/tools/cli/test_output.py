"""Output of the commands: widths, pictures, what a file may not do to the terminal, and files that cannot be read."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tightrope
from tests.support.checkpoints import llama_tensors, write
from tests.support.command import call
from tests.support.model_configs import MODELS, QWEN3_VL, damaged, llama3, v4
from tightrope import RopeSpec
from tightrope.environment import PACKAGES, read_environment
from tightrope_tools.command import main
from tightrope_tools.convert import run as conversion

LLAMA31 = v4("llama", 4096, 32, 500000.0, max_position_embeddings=131072, rope_scaling=llama3(8.0))
LLAMA3 = v4("llama", 4096, 32, 500000.0, max_position_embeddings=8192)
MAGIC = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}


def written(folder: Path, config: object, name: str = "config.json") -> Path:
    """Write a configuration, or a spec, to a file; return its path."""
    made = config.to_dict() if isinstance(config, RopeSpec) else config
    (folder / name).write_text(json.dumps(made), encoding="utf-8")
    return folder / name


def one_line(path: Path, *options: object) -> str:
    """Inspect what must be refused with exit code 2 and one line; return that line."""
    code, output, error = call(main, "inspect", path, *options)
    assert (code, output, error.count("\n")) == (2, "", 1), error
    assert error.startswith("Error: ")
    return error


# --- widths ---------------------------------------------------------------------------------------

AUDIT = "audit tests.tools.cli.audited:bad --no-isolate --only-float32 --longest 4096"


@pytest.mark.parametrize("width", [24, 40, 80, 200])
@pytest.mark.parametrize(
    "arguments", ["inspect {}", "inspect {} {}", "info", AUDIT, "convert --help", "--help"]
)
def test_lines_fit_the_terminal(tmp_path: Path, arguments: str, width: int) -> None:
    """Those of the help are as they were written."""
    path = written(tmp_path, LLAMA31)
    paths = path, written(tmp_path, LLAMA3, "b.json")
    _, output, _ = call(main, *arguments.format(*paths).split(), width=width)
    if "--help" not in arguments or width >= 80:
        assert max(map(len, output.splitlines())) <= width
    assert "\x1b" not in output


@pytest.mark.parametrize("size", ["0", "00", "", "-1", "x", "²", "9" * 5000])
def test_a_width_that_no_terminal_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setenv("LINES", size)
    for arguments in (["--help"], ["inspect", written(tmp_path, LLAMA3)]):
        code, output, _ = call(main, *arguments, width=size)
        lines = output.splitlines()
        assert (code, len(lines) > 20, max(map(len, lines)) <= 120) == (0, True, True)


# --- what is shown --------------------------------------------------------------------------------


def test_the_pairs_that_matter_are_shown(tmp_path: Path) -> None:
    """The first and last, and those beside which the effect of scaling or the completion of a turn changes."""
    output = call(main, "inspect", written(tmp_path, LLAMA31))[1]
    lines = [line.split() for line in output.splitlines() if "÷" in line or "kept" in line]
    rows = {row[0]: row for row in lines}
    waves = [2 * math.pi * 500000.0 ** (pair / 64) for pair in range(64)]
    kept = max(pair for pair in range(64) if waves[pair] < 8192 / 4)
    whole = min(pair for pair in range(64) if waves[pair] > 8192)
    turns = [131072 / wave / (8 if pair >= whole else 1) for pair, wave in enumerate(waves)]
    last = max(pair for pair in range(64) if turns[pair] > 1)
    assert {*map(str, (0, kept, kept + 1, whole - 1, whole, last, last + 1, 63))} <= set(rows)
    assert rows[str(kept)][3] == "kept"
    assert rows[str(whole)][3:5] == ["÷", "8"]
    assert float(rows[str(last)][1]) > 1 > float(rows[str(last + 1)][1])


SMALL = RopeSpec(2)
PICTURES = [("png", (LLAMA31,)), ("pdf", (LLAMA31,)), ("svg", (LLAMA31,))]
PICTURES += [("png", models) for models in ((QWEN3_VL,), (SMALL,), (LLAMA3, SMALL))]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("form, models", PICTURES)
def test_a_picture_of_parts_and_models(
    tmp_path: Path, form: str, models: tuple[object, ...]
) -> None:
    path = tmp_path / f"picture.{form}"
    inputs = [written(tmp_path, one, f"{number}.json") for number, one in enumerate(models)]
    code, output, _ = call(main, "inspect", *inputs, "--plot", path)
    assert code == len(models) - 1  # two that differ
    assert output.splitlines()[-1] == f"picture  {path}"
    assert path.read_bytes().startswith(MAGIC[form])


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = call(main, "info", "--json")
    found = json.loads(output)
    wanted = {
        "tightrope": tightrope.__version__,
        "torch": torch.__version__,
        "backends": tightrope.backends.why_not(),
        "runs": tightrope.which(torch.zeros(2))[0],
        "threads": torch.get_num_threads(),
        "installed_at": str(Path(tightrope.__file__).parent),
    }
    assert {key: found[key] for key in wanted} == wanted
    assert set(found["packages"]) == set(PACKAGES)
    assert found["packages"]["matplotlib"] is not None
    assert (found["cores"] >= 1, code) == (True, 0)
    assert (found["why_no_gpu"] is None) == torch.cuda.is_available()
    here = read_environment()
    monkeypatch.setattr("tightrope.environment.read_environment", lambda: here)
    for reason, code in ((None, 0), ("it is not built", 1)):
        here["backends"]["cpu"] = reason
        assert call(main, "info", "--require", "cpu")[0] == code


# --- the terminal ---------------------------------------------------------------------------------


def test_a_file_does_not_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\x07\u009b31m"
    nested = {**LLAMA3, "model_type": "llama"}
    for config in (
        {**LLAMA3, "model_type": f"llama{evil}"},
        {**LLAMA3, f"rope_{evil}": 1},
        {"model_type": "other", f"{evil}_config": nested, "text_config": nested},
    ):
        path = written(tmp_path, config)
        for options in ([], ["--lenient", "--half"], ["--json"], [path]):
            _, output, error = call(main, "inspect", path, *options)
            assert not set(evil) & set("\x1b\x07\u009b") & set(output + error), options


# Prints help, tables with bold titles, and progress.
ON_A_TERMINAL = """
import sys
from tightrope_tools.cli._output import progress
from tightrope_tools.command import main
for arguments in (["inspect", "--help"], ["inspect", sys.argv[1]]):
    sys.argv[1:] = arguments
    main()
progress("work")(0.5, "half")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX terminals")
@pytest.mark.parametrize("no_colour, plain", [("1", True), ("", False)])
def test_no_color_prints_no_escape_codes(tmp_path: Path, no_colour: str, plain: bool) -> None:
    import pty

    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", ON_A_TERMINAL, str(written(tmp_path, LLAMA3))]
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": no_colour, "COLUMNS": "80"}
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        screen = b""
        # After the last writer closes a terminal, reading it fails on Linux, and elsewhere returns
        # nothing.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                screen += part
    os.close(ours)
    assert process.returncode == 0
    for text in (b"Exit codes", b"rope_theta", b"work"):
        assert text in screen
    assert (b"\x1b" not in screen) == plain


# --- files that cannot be read --------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, about",
    [
        (b"\x00\xff\xfe\x80", "must hold JSON but is not UTF-8 text"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has a number of thousands of digits"),
    ],
)
def test_bytes_that_are_no_configuration(tmp_path: Path, content: bytes, about: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    error = one_line(path)
    assert about in error
    assert str(path) in error


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is faked, as tests may run as a user with access to every file."""

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    path = written(tmp_path, LLAMA3)
    monkeypatch.setattr(Path, "open", refuse)
    assert one_line(path) == f"Error: {path}: Permission denied.\n"


@pytest.mark.slow
def test_damaged_files_are_one_line_or_a_report(tmp_path: Path) -> None:
    path, rng, codes = tmp_path / "config.json", random.Random(8), Counter[int]()
    for _ in range(200):
        text = json.dumps(damaged(rng.choice(MODELS).config, rng))
        if rng.random() < 0.2:
            text = text[: rng.randrange(len(text))]
        data = bytearray(text.encode())
        if rng.random() < 0.1 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        code, out, error = call(main, "inspect", path, "--json")
        codes[code] += 1
        if code == 2:
            assert (out, error.count("\n")) == ("", 1), error
            assert error.startswith("Error: ["), error
        else:
            json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert path.read_bytes() == data
    assert codes[2] > 100
    assert codes[0] > 20
    assert set(codes) == {0, 1, 2}


@pytest.mark.parametrize("number, code", [(errno.ENOSPC, 1), (errno.EACCES, 2)])
def test_failures_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, code: int
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    source = write(tmp_path / "model", llama_tensors())
    monkeypatch.setattr(conversion, "reorder", fails)
    made = call(main, "convert", source, tmp_path / "out", "--to", "interleaved", "--json")
    assert made == (code, "", f"Error: somewhere: {os.strerror(number)}.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
