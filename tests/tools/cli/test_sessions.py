"""The commands as a user sees them: the sessions in the text files of `sessions/`.

A file has sessions, each with a title after `==`; what comes before the first belongs to all. A line that begins with
`>` names a file, whose content follows up to the next empty line, and `$` calls the command, or one of the system. Below a call, `=` is its
exit code if it is not 0, `!` a part of the error stream, `-` what is printed nowhere, `:` the path and the value of an
entry of the output in JSON, and every other line a part of the output, in this order. White space does not count. Exit
code 2 means no output, and one line of error.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import LLAMA, TRAINED, contents, llama_tensors, trained, write
from tests.support.command import call
from tests.support.helpers import ROOT
from tightrope_tools.command import main

MANY = {f"{letter}.weight": torch.zeros(2) for letter in "abcdefghijklmn"}
FUSED = {"layers.0.attention.query_key_value.weight": torch.randn(64, 32)}
# Folders that a session may name.
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "model": lambda path: write(path, llama_tensors(), shards=2),
    "single": lambda path: write(path, llama_tensors()),
    "many": lambda path: write(path, llama_tensors() | MANY),
    "bare": lambda path: write(path, FUSED, None),
    "steering": lambda path: write(path, {"\x1b[2J\nweight": torch.zeros(1)}, LLAMA),
    "trained-half": lambda path: write(path, trained(interleaved=False), TRAINED),
    "trained-interleaved": lambda path: write(path, trained(interleaved=True), TRAINED),
}


def sessions() -> Iterator[object]:
    for file in sorted(Path(__file__).with_name("sessions").glob("*.txt")):
        common, *parts = re.split(r"(?m)^== ", file.read_text("utf-8"))
        for part in parts:
            title, _, steps = part.partition("\n")
            yield pytest.param(common + steps, id=f"{file.stem}: {title}")


def words(text: str) -> str:
    return " ".join(text.split())


def check_call(command: str, expected: list[str]) -> None:
    """Run a command, and compare what it prints with the lines below it."""
    arguments = shlex.split(command)[1:]
    code, output, error = call(main, *arguments, width=200)
    below: dict[str, list[str]] = {mark: [] for mark in ("=", "!", "-", ":", "")}
    for line in expected:
        mark = line[:1] if line[1:2] == " " and line[:1] in below else ""
        below[mark].append(words(line.removeprefix(f"{mark} ")))
    assert code == int("".join(below["="]) or 0), error
    assert "\x1b" not in output + error
    error = error.removeprefix("imported\n")  # what a module prints does not mix with the result
    assert "imported" not in output
    if code == 2:
        assert (output, error.count("\n"), error[:7]) == ("", 1, "Error: ")
    assert [each for each in below["!"] if each not in words(error)] == [], error
    assert [each for each in below["-"] if each in words(output + error)] == []
    for path, value in (each.split(" ", 1) for each in below[":"]):
        found = json.loads(output)
        for key in path.split("."):
            found = found[int(key) if isinstance(found, list) else key]
        assert found == json.loads(value), path
    rest = words(output)
    for each in below[""]:
        assert each in rest, f"{command}: {each!r} is not in\n{output}"
        rest = rest.partition(each)[2]


@pytest.mark.parametrize("session", [*sessions()])
def test_session(
    session: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    for name, make in CHECKPOINTS.items():
        if re.search(rf"[\s/]{name}[\s/]", session):
            make(tmp_path / name)
    for step in re.split(r"(?m)^(?=[$>] )", session):
        first, *lines = step.splitlines() or [""]
        if first.startswith("> "):
            path = tmp_path / first[2:]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines).strip(), encoding="utf-8")
        elif first.startswith("$ ") and not first.startswith("$ tightrope"):
            subprocess.run(shlex.split(first[2:]), check=True)
        elif first.startswith("$ "):
            before = contents(tmp_path)
            check_call(first[2:], [line for line in lines if line.strip()])
            assert contents(tmp_path).items() >= before.items()
            if "= 2" in lines:
                assert contents(tmp_path) == before
    assert "Traceback" not in "".join(capfd.readouterr())  # also of the other process
