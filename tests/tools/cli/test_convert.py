"""`tightrope convert` and `tightrope detect`: output, exit codes, killed processes, memory."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import LLAMA, TRAINED, contents, llama_tensors, trained, write
from tests.support.command import call, interrupted, python
from tightrope_tools.cli.convert import _lines, _size
from tightrope_tools.command import main
from tightrope_tools.convert import run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "model", llama_tensors(), shards=2)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def tightrope(*arguments: object, width: int = 300) -> tuple[int, str, str]:
    """Run a command, by default so wide that long names of folders do not wrap the lines."""
    return call(main, *arguments, width=width)


def converted(*arguments: object) -> str:
    """Run `convert`, which must succeed; return its output."""
    code, output, error = tightrope("convert", *arguments)
    assert code == 0, error
    return output


def test_the_whole_output(source: Path, out: Path) -> None:
    (source / "model.gguf").write_bytes(b"")
    code, output, progress = tightrope("convert", source, out, "--to", "interleaved", "--verify")
    assert code == 0
    for text in (
        "half (assumed from model_type 'llama') to interleaved",
        ", provided that the checkpoint was half, as assumed from model_type 'llama'",
        "warning     the weights do not show their pairing: half is only assumed from model_type 'llama'",
        "model.layers.*.self_attn.q_proj.weight  (2)",
        "model.layers.*.self_attn.k_norm.weight  (2)",
        "model.layers.*.self_attn.o_proj.weight  (2)",
        "model.gguf: other weights, which are not converted",
        "scores of 2 layers differ by ",
        "note        no key of model_type 'llama' states the pairing: rotate the result by "
        f'RopeSpec.from_config("{out}", interleaved=True), which pairs neighbours',
        ", 5 files",
    ):
        assert text in output, output
    assert "model_type 'llama': 8 of 8 channels from 0 on\n" in re.sub(" +\n", "\n", output)
    assert "\x1b" not in output + progress
    assert "convert 100%" in progress
    assert (out / "model.safetensors.index.json").exists()


def test_verification_states_its_premise(tmp_path: Path) -> None:
    """Permutations of weights that were half do not change scores under a wrong `--from` either."""
    source = write(tmp_path / "a", trained(interleaved=False), TRAINED)
    there, back = tmp_path / "b", tmp_path / "c"
    output = converted(source, there, "--to", "half", "--from", "interleaved", "--verify")
    assert (
        ", provided that the checkpoint was interleaved, as stated by the user (--from)" in output
    )
    assert (
        "warning     the weights show half, not interleaved (by chance at most once in " in output
    )
    flags = "--to", "interleaved", "--from", "half", "--dry-run"
    assert "verified" not in converted(there, back, *flags)


def test_json_and_dry_run(source: Path, out: Path) -> None:
    flags = "--to", "interleaved", "--json", "--dry-run"
    code, output, progress = tightrope("convert", source, out, *flags)
    document = json.loads(output)
    assert (code, progress) == (0, "")
    assert [document[key] for key in ("source", "to", "written")] == ["half", "interleaved", False]
    assert (len(document["changed"]), len(document["left"])) == (12, 7)
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_a_dry_run_in_words_with_many_other_tensors(tmp_path: Path, out: Path) -> None:
    others = {f"{letter}.weight": torch.zeros(2) for letter in "abcdefghijklmn"}
    source = write(tmp_path / "model", llama_tensors() | others)
    output = " ".join(converted(source, out, "--to", "interleaved", "--dry-run").split())
    assert "more lines; --json names all 21" in output
    assert re.search(r"out, [\d.]+ kB, 3 files would be written$", output)
    assert not out.exists()


def test_all_that_can_be_said(tmp_path: Path) -> None:
    tensors = {"layers.0.attention.query_key_value.weight": torch.randn(64, 32)}
    bare = write(tmp_path / "bare", tensors, None)
    flags = "--from=half --naming=gpt_neox --packing=blocks --heads=4 --kv-heads=2 --head-dim=8"
    more = "--rotary-dim=4 --start=2 --prefix= --to=interleaved"
    converted(bare, tmp_path / "b", *flags.split(), *more.split())
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"text_config": LLAMA}), encoding="utf-8")
    plain = write(tmp_path / "plain", llama_tensors(), None)
    flags = f"--to interleaved --config {config} --section text_config"
    converted(plain, tmp_path / "c", *flags.split())
    roles = {"q_proj": "q", "k_proj": "k", "q_norm": "q norm", "k_norm": "k norm"}
    naming = ",".join(f"layers.*.self_attn.{module}={role}" for module, role in roles.items())
    strange = write(tmp_path / "strange", llama_tensors(), {**LLAMA, "swa_rope_theta": 5e5})
    own = ["--no-config", "--naming", naming, *"--head-dim 8 --heads 4 --kv-heads 2".split()]
    converted(strange, tmp_path / "d", "--from", "half", "--to", "interleaved", *own)
    assert tightrope("detect", strange, *own)[0] == 1
    c, d = (load_file(tmp_path / name / "model.safetensors") for name in "cd")
    assert all(torch.equal(c[name], d[name]) for name in c)


ZOO = {"model_type": "zoo", "rope_theta": None, "a_config": LLAMA, "b_config": LLAMA}
GLM = {"model_type": "glm", "head_dim": 8, "partial_rotary_factor": 0.5, "rope_interleaved": False}


@pytest.mark.parametrize(
    "more, options, text",
    [
        ({"swa_rope_theta": 5e5}, "", "got swa_rope_theta; pass --config, a file without them, if"),
        (ZOO, "", "as RoPE is in 'a_config', 'b_config'; for example --section b_config"),
        (
            {"partial_rotary_factor": 0.5},
            "",
            "which rotates a part, pass --no-config and state the slice",
        ),
        ({"model_type": "zebra"}, "--start 4", "pass --rotary-dim=4 if all 4 channels from 4 on"),
        ({"model_type": "zebra"}, "", "pass --rotary-dim=8 if all 8 channels of a head rotate"),
        ({"model_type": "zebra"}, "", "or the number that do, with --start if they"),
        (GLM, "", "and True from model_type 'glm'; pass --from if the key is right"),
    ],
)
def test_errors_about_configurations_name_options(
    tmp_path: Path, out: Path, more: dict[str, Any], options: str, text: str
) -> None:
    source = write(tmp_path / "a", llama_tensors(), {**LLAMA, **more})
    for arguments in (["convert", source, out, "--to", "half"], ["detect", source]):
        code, _, error = tightrope(*arguments, "--naming", "llama", *options.split())
        assert (code, text in error) == (2, True), error


@pytest.mark.parametrize(
    "arguments, about",
    [
        ("convert {gone} {out} --to half", "the checkpoint must exist but"),
        ("convert {model} {out} --to sideways", "but got 'sideways'"),
        ("convert {model} {out}", "--to"),
        ("convert {model} {model} --to interleaved", "must not exist yet but"),
        ("convert {model} {out} --to half", "is already half"),
        ("convert {model} {out} --to half --heads x", "--heads"),
        ("detect {gone}", "the checkpoint must exist but"),
        ("detect {model} --naming x", "Error: naming must be one of"),
        ("detect {model} --naming gpt_neox", "other names with --naming, one of llama,"),
        ("convert {steering} {out} --to interleaved", "must"),
    ],
)
def test_a_mistake_is_one_line(
    source: Path, tmp_path: Path, out: Path, arguments: str, about: str
) -> None:
    steering = write(tmp_path / "steering", {"\x1b[2J\nweight": torch.zeros(1)})
    paths = {"gone": tmp_path / "gone", "model": source, "out": out, "steering": steering}
    code, output, error = tightrope(*(each.format(**paths) for each in arguments.split()))
    assert (code, output, error.count("\n")) == (2, "", 1)
    assert error.startswith("Error: ")
    assert about in error
    assert "\x1b" not in error
    assert not out.exists()


@pytest.mark.parametrize("number, code", [(errno.ENOSPC, 1), (errno.EACCES, 2)])
def test_failures_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, number: int, code: int
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    monkeypatch.setattr(run, "_reorder", fails)
    error = f"Error: somewhere: {os.strerror(number)}.\n"
    made = tightrope("convert", source, out, "--to", "interleaved", "--json")
    assert made == (code, "", error)
    assert [path.name for path in out.parent.iterdir()] == ["model"]


# --- detect ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "interleaved, pairing, code, about",
    [
        (False, "half", 0, "half, confidence above 0.99999"),
        (True, "interleaved", 1, "the weights contradict the files"),
        (None, None, 1, "they do not show the pairing"),
    ],
)
def test_detect(
    tmp_path: Path, interleaved: bool | None, pairing: str | None, code: int, about: str
) -> None:
    weights = llama_tensors() if interleaved is None else trained(interleaved)
    source = write(tmp_path / "a", weights, LLAMA if interleaved is None else TRAINED)
    found, output, _ = tightrope("detect", source)
    assert (found, about in output) == (code, True)
    assert "half (assumed from model_type 'llama')" in output
    advice = "compare the loss on a text under both pairings"
    assert (advice in " ".join(output.split())) == (interleaved is None)
    found, output, _ = tightrope("detect", source, "--json")
    document = json.loads(output)
    assert (found, document["pairing"]) == (code, pairing)
    assert document["contradicts"] == (interleaved is True)


# --- long lists -----------------------------------------------------------------------------------


def test_names_are_grouped() -> None:
    names = [f"m.{n}.q" for n in (0, 1, 2, 5)] + ["m.3.k", "norm"]
    assert _lines(tuple(names), 3) == "m.*.q  (4)\nm.3.k\nnorm"
    assert _lines(tuple(names), 1) == "m.*.q  (4)\nand 2 more lines; --json names all 6"
    sizes = [_size(count) for count in (812, 64_000_000, 2_150_000_000)]
    assert sizes == ["812 bytes", "64.00 MB", "2.15 GB"]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("command", ["convert", "detect"])
def test_help_fits(command: str, width: int) -> None:
    code, output, _ = tightrope(command, "--help", width=width)
    assert code == 0
    assert f"tightrope {command} llama-3-8b" in output
    assert max(map(len, output.splitlines())) <= width


# --- killed, and measured -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("step", ["_copy", "_reorder", "_mark"])
def test_ctrl_c_removes_written_files(source: Path, tmp_path: Path, step: str) -> None:
    # The step waits, so that the signal arrives before it.
    script = (
        "import sys, time; from tightrope_tools.convert import run\n"
        "def slow(*_): print('begun', flush=True); time.sleep(30)\n"
        f"run.{step} = slow\n"
        "from tightrope_tools.command import main; sys.exit(main())"
    )
    before = contents(source)
    arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "interleaved", "--json"]
    for sent, wanted, left in (
        (signal.SIGKILL, -9, {"model", "out.partial"}),
        (signal.SIGINT, 130, {"model"}),
    ):
        code, rest = interrupted(script, *arguments, at="begun", sent=sent)
        assert code == wanted
        assert "Traceback" not in rest
        assert {path.name for path in tmp_path.iterdir()} == left
        assert contents(source) == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from Linux")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Converting 220 MB takes at most 128 MB more than `tightrope info`, there and back, and the bytes are the same."""
    config = {**LLAMA, "hidden_size": 1024, "num_hidden_layers": 40}
    source = write(
        tmp_path / "model", llama_tensors(config, dtype=torch.bfloat16), config, shards=16
    )
    script = (
        "import sys; from tightrope_tools.command import main; code = main()\n"
        "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')])\n"
        "sys.exit(code)"
    )

    def peak(*arguments: object) -> int:
        done = python("-c", script, *arguments)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-2]) // 1024

    before = peak("info")
    assert peak("convert", source, tmp_path / "there", "--to", "interleaved") < before + 128
    back = tmp_path / "back"
    assert peak("convert", tmp_path / "there", back, "--to", "half", "--verify") < before + 128
    for shard in source.glob("*.safetensors"):
        assert (back / shard.name).read_bytes() == shard.read_bytes()
        assert (tmp_path / "there" / shard.name).read_bytes() != shard.read_bytes()
