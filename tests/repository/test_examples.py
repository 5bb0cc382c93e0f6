"""The examples run, and say what their documentation says."""

import json
import re
from pathlib import Path
from typing import Any

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
from tests.support.tolerances import assert_each, assert_same_bits
from tightrope import rotate
from tightrope.positions import MRope, Report, mrope_batch, packed, text
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


def test_float32_sums_one_by_one_are_those_of_decoding() -> None:
    model = state_tracking.Tracker("float32")
    tokens, sums = state_tracking.sequences(2, 40, torch.Generator().manual_seed(0))
    assert sums[0, -1] == tokens[0, 1:].sum() % 5
    model.way = state_tracking.ONE_BY_ONE
    first, *others = (state_tracking.decode(model, tokens, n)[1].phases for n in (1, 7, 41))
    assert_each(assert_same_bits, others, [first, first])


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


def test_train_bytes_splits_text_by_file(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"file_{index}.py").write_bytes(bytes([index]) * 6000)
    corpus = train_bytes.load_text(tmp_path)
    train, validation = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert (len(train), len(validation)) == (36, 4)
    assert train.isdisjoint(validation)


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


def test_positions_of_packed_samples_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbered_through(*args: object, cu_seqlens: torch.Tensor, **more: object) -> MRope:
        return mrope_batch(*args, **more)

    monkeypatch.setattr(pack_images.positions, "mrope_batch", numbered_through)
    with pytest.raises(AssertionError, match="numbered-through"):
        pack_images.pack(pack_images.samples(0))


def test_packed_images_that_are_numbered_like_text_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def like_text(types: torch.Tensor, *, cu_seqlens: torch.Tensor, **_: Any) -> MRope:
        return MRope(text(packed(cu_seqlens), axes=3), cu_seqlens.diff())

    monkeypatch.setattr(pack_images.positions, "mrope_batch", like_text)
    monkeypatch.setattr(pack_images.positions, "check", lambda *_, **__: Report((), ()))
    with pytest.raises(AssertionError):
        pack_images.main(["--steps", "0"])


def test_padded_prompts_go_on_as_alone(capsys: pytest.CaptureFixture[str]) -> None:
    decode_padded.main(["--steps", "6"])
    assert capsys.readouterr().out.count("->") == 3


def test_padded_prompts_that_go_on_from_the_number_of_tokens_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counted(types: torch.Tensor, **more: Any) -> MRope:
        where, _ = mrope_batch(types, **more)
        mask = more.get("attention_mask", torch.ones_like(types))
        return MRope(where, mask.sum(-1))

    monkeypatch.setattr(decode_padded.positions, "mrope_batch", counted)
    with pytest.raises(AssertionError):
        decode_padded.main(["--steps", "12"])


def test_rotated_keys_of_padded_prompts_have_the_bits_of_each_alone() -> None:
    types = (torch.tensor([[98, 98, 5, 99, 99], [1, 99, 99, 99, 99]]) == 99).long()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    where, _ = mrope_batch(
        *(types,), model="qwen2_vl", images=[(1, 2, 4), (1, 4, 4)], attention_mask=mask
    )
    alone, _ = mrope_batch(types[0, 2:], model="qwen2_vl", images=[(1, 2, 4)])
    k = torch.randn(2, 4, 5, 64)
    together = rotate(k, decode_padded.SPEC, where)
    assert_same_bits(together[:1, :, 2:], rotate(k[:1, :, 2:], decode_padded.SPEC, alone))


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
