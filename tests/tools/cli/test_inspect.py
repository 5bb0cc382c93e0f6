"""`tightrope inspect` end to end: text, JSON, pictures, exit codes, and invalid files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command import call
from tests.support.model_configs import MODELS, QWEN3_VL, damaged, llama3, v4
from tightrope import RopeSpec
from tightrope.frequencies import YaRN
from tightrope_tools.cli._output import as_mistakes, show
from tightrope_tools.command import main
from tightrope_tools.convert import Stated, convert

LLAMA31 = v4("llama", 4096, 32, 500000.0, max_position_embeddings=131072, rope_scaling=llama3(8.0))
LLAMA3 = v4("llama", 4096, 32, 500000.0, max_position_embeddings=8192)
MAGIC = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two models, each a folder with a config.json."""
    for name, config in (("llama-3.1", LLAMA31), ("llama-3", LLAMA3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def written(folder: Path, config: object, name: str = "config.json") -> Path:
    """Write a configuration, or a spec, to a file; return its path."""
    made = config.to_dict() if isinstance(config, RopeSpec) else config
    (folder / name).write_text(json.dumps(made), encoding="utf-8")
    return folder / name


def run(*arguments: object, width: int = 80) -> tuple[int, str, str]:
    """Run the command; return exit code, output and error stream."""
    return call(main, "inspect", *arguments, width=width)


# --- text output ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
def test_one_configuration_in_words(folder: Path, width: int) -> None:
    code, output, error = run(folder / "llama-3.1", width=width)
    assert (code, error) == (0, "")
    assert max(map(len, output.splitlines())) <= max(width, len(str(folder / "llama-3.1")))
    assert "\x1b" not in output
    whole = " ".join(output.split())
    for text in (
        "model_type 'llama'",
        "scaling.original_max_position 8192",
        "context 131072 max_position_embeddings",
        "attention scaling 1 on rotated channels",
        "Pairs (14 of 64; --all shows every one)",
        "Largest exact context: 2,147,483,648 positions with phase words",
        "29 of 64 pairs never complete a turn within the 8,192 positions of training",
    ):
        assert text in whole, text


def test_the_rows_that_matter_are_shown(folder: Path) -> None:
    output = run(folder / "llama-3.1")[1]
    rows = {
        line.split()[0]: line.split()
        for line in output.splitlines()
        if "÷" in line or "kept" in line
    }
    # The first and last pair; 28 and 29, the last that scaling keeps and the first that it changes;
    # 34 and 35, the last before and the first with the full division by 8; 38 and 39, the last that
    # completes a turn within the context and the first that does not.
    assert {"0", "28", "29", "34", "35", "38", "39", "63"} <= set(rows)
    assert rows["28"][5] == "kept"
    assert rows["35"][5:7] == ["÷", "8"]
    assert float(rows["38"][7]) > 1 > float(rows["39"][7])


def test_every_pair_on_request(folder: Path) -> None:
    output = run(folder / "llama-3", "--all")[1]
    assert "Pairs (64 pairs)" in output
    assert all(f"\n{pair:4}" in output for pair in range(64))


def test_without_a_length_turns_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, RopeSpec(8))
    output = run(path)[1]
    assert "RopeSpec JSON" in output
    assert "turns in" not in output
    assert "turns in 100" in run(path, "--context", 100)[1]


def test_parts_with_and_without_a_rotation(tmp_path: Path) -> None:
    path = written(tmp_path, QWEN3_VL)
    output = run(path)[1]
    equal = "These errors are at positions whose coordinates are all equal."
    for text in ("\ntext_config\n", "\nvision_config\n", equal):
        assert text in output
    assert "vision_config" not in run(path, "--section", "text_config")[1]


def test_two_configurations_in_words(folder: Path) -> None:
    code, output, _ = run(folder / "llama-3.1", folder / "llama-3")
    assert code == 1
    whole = " ".join(output.split())
    for text in (
        "35 of 64 pairs have different frequencies",
        "disagree by up to 3.142 rad over 131,072 positions",
        "They differ.",
        "original_max_position",
    ):
        assert text in whole
    code, output, _ = run(folder / "llama-3", folder / "llama-3")
    assert code == 0
    assert "Every angle is the same." in output
    assert "Alike." in output


def test_several_are_compared_with_the_first(folder: Path) -> None:
    code, output, _ = run(folder / "llama-3", folder / "llama-3", folder / "llama-3.1")
    assert (code, output.count("Alike."), output.count("They differ.")) == (1, 1, 1)


def test_options_may_stand_between_configurations(folder: Path) -> None:
    one, other = folder / "llama-3", folder / "llama-3.1"
    assert run(one, "--context", "4096", other) == run(one, other, "--context", "4096")


def test_numbers_of_pairs_that_differ(tmp_path: Path, folder: Path) -> None:
    output = run(written(tmp_path, RopeSpec(64)), folder / "llama-3")[1]
    assert "Their angles cannot be compared pair by pair." in output


def test_a_warning_is_exit_code_1(tmp_path: Path) -> None:
    lost = {**LLAMA31, "rope_scaling": None, "rope_theta": 10000.0}
    code, output, _ = run(written(tmp_path, lost))
    assert code == 1
    assert "warning  base 10000 without scaling at 131,072 positions" in output


def test_unknown_keys_are_warned_of_on_request(tmp_path: Path) -> None:
    path = written(tmp_path, {**LLAMA3, "rope_tetha": 1.0})
    code, output, error = run(path)
    assert (code, output) == (2, "")
    assert "rope_tetha (perhaps rope_theta); --lenient ignores them with a warning" in error
    code, output, error = run(path, "--lenient")
    assert code == 0
    assert error.startswith("Warning: [from_config] every key about RoPE must be known")


ZEBRA = {**LLAMA3, "model_type": "zebra", "layer_types": ["a", "b"], "num_hidden_layers": 2}
A: dict[str, Any] = {"a": {"rope_theta": 1e4}}
WIDE = {"rope_parameters": {**A, "b": A["a"]}, "per_layer_config": {"0": {"head_dim": 64}}}


@pytest.mark.parametrize(
    "config, options, advice",
    [
        (ZEBRA, ["--half"], "with --start if they are not the first; --rope-layers='all' if"),
        ({**ZEBRA, "rope_parameters": A}, ["--half"], "pass --rope-layers, a list of the types"),
        ({**ZEBRA, **WIDE}, ["--half"], "pass --layer-type with the --rotary-dim of its layers"),
        (
            {**LLAMA3, "partial_rotary_factor": 0.5},
            [],
            "for other code, which rotates a part, make a RopeSpec by hand.",
        ),
        ({**LLAMA3, "model_type": "nobody"}, [], "pass --half if channel i"),
        ({**LLAMA3, "rope_interleaved": True}, [], "pass --interleaved if the key is right."),
        ({**LLAMA3, "rope_tetha": 1.0}, [], "--lenient ignores them with a warning."),
        (
            {"model_type": "nobody", "head_dim": 64},
            [],
            "pass --base=10000.0 if it is that of the paper",
        ),
        ({**LLAMA3, "model_type": "nobody"}, [], "--rotary-dim=128 if all 128 channels"),
    ],
)
def test_advice_names_options(
    tmp_path: Path, config: dict[str, Any], options: list[str], advice: str
) -> None:
    assert advice in one_line([written(tmp_path, config), *options])


def test_the_pairing_can_be_said(tmp_path: Path) -> None:
    path = written(tmp_path, {**LLAMA3, "model_type": "nobody"})
    assert one_line([path]).endswith("(to name some of them, add layer_types to the config).\n")
    stated = ("--interleaved", "--rotary-dim=128", "--rope-layers=all")
    (config,) = json.loads(run(path, *stated, "--json")[1])["configs"]
    assert config["parts"][0]["spec"]["interleaved"]


# --- JSON -----------------------------------------------------------------------------------------


def test_json_and_nothing_else(folder: Path) -> None:
    code, output, error = run(folder / "llama-3.1", "--json")
    assert (code, error) == (0, "")
    (config,) = json.loads(output)["configs"]
    (part,) = config["parts"]
    assert RopeSpec.from_dict(part["spec"]) == RopeSpec.from_config(LLAMA31)
    assert len(part["pairs"]) == 64
    assert part["pairs"][63]["effect"] == "÷ 8"
    assert part["exact_below"] == 2**31
    assert {"code", "warning", "text"} == set(part["notes"][0])


def test_json_of_two(folder: Path) -> None:
    code, output, _ = run(folder / "llama-3.1", folder / "llama-3", "--json")
    found = json.loads(output)
    assert (code, len(found["configs"])) == (1, 2)
    (comparison,) = found["comparisons"]
    assert comparison["alike"] is False
    assert comparison["parts"][0]["disagreement"]["lost"] == 1125


# --- pictures -------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", MAGIC)
def test_a_picture(folder: Path, form: str) -> None:
    path = folder / f"picture.{form}"
    code, output, _ = run(folder / "llama-3.1", "--plot", path)
    assert code == 0
    assert output.splitlines()[-1] == f"picture  {path}"
    assert path.read_bytes().startswith(MAGIC[form])


@pytest.mark.slow
def test_pictures_of_several_parts_and_models(folder: Path) -> None:
    config = written(folder, QWEN3_VL, "vl.json")
    small = written(folder, RopeSpec(2), "small.json")
    still = written(folder, {**RopeSpec(4).to_dict(), "rotary_dim": 0}, "still.json")
    path = folder / "picture.png"
    assert "every rotation must have a pair that turns but still.json has none" in one_line(
        [still, "--plot", path]
    )
    for inputs in ([config], [small], [folder / "llama-3"], [folder / "llama-3.1", small]):
        run(*inputs, "--plot", path)
        assert path.read_bytes().startswith(MAGIC["png"]), inputs
        path.unlink()


@pytest.mark.parametrize(
    "place, about",
    [("nowhere/x.png", "No such file or directory"), ("x.xyz", "not supported"), ("", "directory")],
)
def test_a_picture_that_cannot_be_written(folder: Path, place: str, about: str) -> None:
    assert about in one_line([folder / "llama-3", "--plot", folder / place])


# --- mistakes -------------------------------------------------------------------------------------


def one_line(arguments: list[object]) -> str:
    """Run a call that must end with exit code 2 and one line; return that line."""
    code, output, error = run(*arguments)
    assert (code, output, error.count("\n")) == (2, "", 1), error
    assert error.startswith("Error: ")
    return error


@pytest.mark.parametrize(
    "content, about",
    [
        (b"", "must hold JSON but is invalid at line 1, column 1"),
        (b'{"model_type": "lla', "must hold JSON but is invalid at line 1"),
        (b"\x00\xff\xfe\x80", "must hold JSON but is not UTF-8 text"),
        (b"[1, 2]", "must hold a JSON object but holds list"),
        (b"null", "must hold a JSON object but holds NoneType"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has a number of thousands of digits"),
        (b"{}", "the config must give the width of a head, the base of the frequencies"),
        (b"GGUF", "must be a complete GGUF file but ends within"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, about: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    error = one_line([path])
    assert about in error
    assert str(path) in error or content == b"{}"


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.GGUF"
    for content in (b"", b"{}", b"GGU", b"\x00\xff\xfe\x80" * 99):
        path.write_bytes(content)
        assert f"{path} must be a GGUF file, as its name says, but does not begin with 'GGUF'" in (
            one_line([path])
        )


@pytest.mark.parametrize("url", ["https://huggingface.co/x/config.json", "hf://x", "s3://a//b"])
def test_a_url_is_not_taken_for_a_path(url: str, tmp_path: Path) -> None:
    scheme = url.partition(":")[0]
    about = f"must be on this machine but got a URL ({scheme}://…); download it first"
    assert f"a configuration {about}" in one_line([url])
    with pytest.raises(ValueError, match=re.escape(about)):
        RopeSpec.from_config(url)
    with pytest.raises(ValueError, match=re.escape(f"the checkpoint {about}")):
        convert(url, tmp_path / "out", to="half")
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"a configuration {about}")):
        convert(tmp_path, tmp_path / "out", to="half", stated=Stated(config=url))
    # The name of a folder may end in a colon.
    there = tmp_path / "odd:" / "config.json"
    there.parent.mkdir()
    there.write_text(json.dumps(LLAMA3), encoding="utf-8")
    assert run(there)[0] == 0


def test_places_that_are_no_configuration(tmp_path: Path) -> None:
    for name in ("nowhere.json", "nowhere.gguf"):  # advice for Python is no advice here
        line = one_line([tmp_path / name])
        assert line.strip() == f"Error: {tmp_path / name}: No such file or directory."
    assert "has neither" in one_line([tmp_path])
    (tmp_path / "loop.json").symlink_to("loop.json")
    assert "loop.json" in one_line([tmp_path / "loop.json"])
    (tmp_path / "gone.json").symlink_to("nowhere")
    assert "No such file" in one_line([tmp_path / "gone.json"])
    os.mkfifo(tmp_path / "pipe.json")
    assert "is a device or a pipe" in one_line([tmp_path / "pipe.json"])
    for name in ("config.json", "params.json"):
        (tmp_path / name).write_text("{}")
    assert "has config.json and params.json" in one_line([tmp_path])
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(65 * 2**20)
    assert "is not GGUF and has 68,157,440 bytes" in one_line([tmp_path / "model.safetensors"])


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The error is faked, as tests may run as a user with access to every file.
    def refuse(self: Path, *_: object, **__: object) -> Iterator[bytes]:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    path = folder / "llama-3" / "config.json"
    assert one_line([path]) == f"Error: {path}: Permission denied.\n"


@pytest.mark.parametrize(
    "length, why",
    [
        (-5, "must be at least 1 but got -5"),
        (0, "must be at least 1 but got 0"),
        (1.5, "must be an int but got 1.5"),
        (True, "must be an int but got True"),
        ("8192", "must be an int but got '8192'"),
        (10**30, f"must be at most 2147483648 but got {10**30}"),
    ],
)
def test_lengths_that_no_context_has(tmp_path: Path, length: Any, why: str) -> None:
    scaling = LLAMA31["rope_scaling"]
    mine = "original_max_position_embeddings"
    linear = {"rope_type": "linear", "factor": 2.0}
    for changed, name in (
        ({"max_position_embeddings": length}, "max_position_embeddings"),
        ({"n_positions": length}, "n_positions"),
        ({mine: length, "rope_scaling": linear}, mine),
        ({"rope_scaling": {**scaling, mine: length}}, f"rope_scaling.{mine}"),
        ({"rope_scaling": {**linear, mine: length}}, f"rope_scaling.{mine}"),
    ):
        path = written(tmp_path, {**LLAMA31, **changed})
        assert one_line([path]) == f"Error: [from_config] {name} {why}.\n"
    spec = RopeSpec(64, scaling=YaRN(4.0, 4096)).to_dict()
    spec["scaling"]["original_max_position"] = length
    path = written(tmp_path, spec)
    assert one_line([path]) == f"Error: [YaRN] original_max_position {why}.\n"


def test_layers_that_do_not_rotate_cannot_be_selected(tmp_path: Path) -> None:
    config = next(each.config for each in MODELS if each.origin == "HuggingFaceTB/SmolLM3-3B")
    path = written(tmp_path, config)
    assert "has no rotation here" in one_line([path, "--layer-type", "no_rope"])
    assert run(path)[0] == 0


def test_unexpected_errors_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), as_mistakes():
        raise ZeroDivisionError


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
            _, output, error = run(path, *options)
            assert not set(evil) & set("\x1b\x07\u009b") & set(output + error), options


@pytest.mark.slow
def test_damaged_files_are_one_line_or_a_report(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    rng = random.Random(8)
    codes: Counter[int] = Counter()
    for _ in range(200):
        text = json.dumps(damaged(rng.choice(MODELS).config, rng))
        if rng.random() < 0.2:
            text = text[: rng.randrange(len(text))]
        data = bytearray(text.encode())
        if rng.random() < 0.1 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        code, out, error = run(path, "--json")
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


# --- the terminal ---------------------------------------------------------------------------------


# Prints help, a table with bold text, and a progress bar.
ON_A_TERMINAL = """
import sys, time
from tightrope_tools.cli._output import progress
from tightrope_tools.command import main
for arguments in (["inspect", "--help"], ["inspect", sys.argv[1]]):
    sys.argv[1:] = arguments
    main()
with progress("work") as update:
    update(0.5, "half")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX terminals")
@pytest.mark.parametrize("no_colour, plain", [("1", True), ("", False)])
def test_no_color_prints_no_escape_codes(folder: Path, no_colour: str, plain: bool) -> None:
    import pty

    ours, theirs = pty.openpty()
    call = [sys.executable, "-c", ON_A_TERMINAL, str(folder / "llama-3")]
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": no_colour, "COLUMNS": "80"}
    with subprocess.Popen(call, stdout=theirs, stderr=theirs, env=environment) as process:
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


@pytest.mark.parametrize("size", ["0", "00", "", "-1", "x", "²", "9" * 5000])
def test_a_width_that_no_terminal_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setenv("LINES", size)
    for arguments in (["--help"], ["inspect", folder / "llama-3"]):
        code, output, _ = call(main, *arguments, width=size)
        lines = output.splitlines()
        assert (code, len(lines) > 20, max(map(len, lines)) <= 120) == (0, True, True)


@pytest.mark.parametrize("width", [24, 40])
def test_a_narrow_terminal_gets_a_list(folder: Path, width: int) -> None:
    _, output, _ = run(folder / "llama-3.1", width=width)
    lines = [line.rstrip() for line in output.splitlines()]
    assert "  value: 128" == lines[lines.index("field: rotary_dim") + 1]
    assert "  source: rope_theta" in lines
    at = lines.index("pair: 0")
    assert lines[at + 1 : at + 4] == ["  channels: 0, 64", "  wavelength: 6.28", "  unscaled: 6.28"]
    assert "…" not in output
    _, output, _ = run(folder / "llama-3.1", folder / "llama-3", width=width)
    assert "  A: Llama3" in [line.rstrip() for line in output.splitlines()]


@pytest.mark.parametrize("columns, width", [("72", 72), (None, 110)])
def test_a_pipe_has_a_width(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: str | None,
    width: int,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    show("ab " * 200)
    assert max(map(len, capsys.readouterr().out.splitlines())) == width - (width - 2) % 3
