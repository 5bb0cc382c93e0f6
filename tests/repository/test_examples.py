"""The examples run, and say what their documentation says."""

import json
import re
from pathlib import Path

import pytest
import torch

import decode_padded
import pack_images
import several_processes
import state_tracking
import train_bytes
from benchmarks import state_tracking as picture
from tests.support.command import python
from tests.support.helpers import ROOT
from train_bytes import ByteTransformer, Size


def test_state_tracking_runs_and_its_results_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, drawn = tmp_path / "results.json", tmp_path / "picture.png"
    state_tracking.main(["--quick", "--out", str(out)])
    assert "token by token" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["exact"]["drift"]["turns"] == 0 < found["float32"]["drift"]["turns"]
    assert all(error < 1e-12 for error in found["sums"]["exact"].values())
    picture.main([str(out), "--png", str(drawn)])
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_train_bytes_runs_and_its_loss_falls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Size(layers=1, heads=2, head_dim=8, context=16, batch=2)
    monkeypatch.setattr(train_bytes, "Size", lambda: small)
    train_bytes.main(["--steps", "21", "--seed", "1"])
    output = capsys.readouterr().out
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", output))
    assert last < first
    assert "validation" in output
    assert "\ndef " in output


def test_train_bytes_decodes_as_it_reads() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(Size(layers=2, heads=2, head_dim=8))
    found = list(train_bytes.write(model, "abc", 5))
    tokens = torch.tensor([[*b"abc", *(token for token, _ in found)]])
    want = model(tokens)[0, 2:-1]
    torch.testing.assert_close(torch.stack([logits for _, logits in found]), want)


def test_packed_samples_train_and_have_the_logits_that_they_have_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pack_images.main(["--steps", "6"])
    output = capsys.readouterr().out
    first, *_, last = (float(loss) for loss in re.findall(r"loss (\S+)", output))
    assert last < first
    assert len(re.findall(r"packed and alone differ by", output)) == 4
    assert "'apply_rotary_pos_emb': " in output


def test_padded_prompts_go_on_as_alone(capsys: pytest.CaptureFixture[str]) -> None:
    decode_padded.main(["--steps", "6"])
    assert capsys.readouterr().out.count("->") == 3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["", "--fsdp --compile"])
def test_two_processes_have_the_losses_of_one(way: str) -> None:
    alone = several_processes.train(4)
    assert alone[-1] < alone[0]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, several_processes.__file__, "--steps", "4", *way.split()]
    # Each process has one thread, as many processes share the machine.
    done = python(*command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert losses == pytest.approx(alone, abs=2e-6)


RIGHT = {
    "converted": r"code for neighbours: they differ by \d\.\de-0[5-9]$",
    "server_bits": r"from vllm: \d{4} of 8192 before patch, 0 after$",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_program_proves_its_model_right(name: str) -> None:
    assert re.search(RIGHT[name], python(ROOT / "examples" / f"{name}.py").stdout, re.M)


@pytest.mark.parametrize("name", ["callback", "liger"])
def test_plugs_train_two_steps_and_say_what_they_served(name: str) -> None:
    """The third, the place for kernels in transformers, runs in the tests of that plug."""
    if name == "liger":
        pytest.importorskip("liger_kernel.backends")
    done = python(ROOT / "examples" / "plugs.py", name)
    assert done.returncode == 0, done.stderr
    wanted = {"callback": "4 of 4 calls of apply_rotary_pos_emb", "liger": "8 of 8 rotations"}
    assert f"served {wanted[name]}" in done.stdout
    first, last = (float(loss) for loss in re.findall(r"losses (\S+) and (\S+)", done.stdout)[0])
    assert last < first
