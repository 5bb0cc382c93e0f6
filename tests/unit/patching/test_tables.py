"""Exact angles: which modules get them, what happens when weights or the configuration change, and notes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support import oracle
from tests.support.models.of_transformers import (
    DEFAULT,
    DIM,
    DYNAMIC,
    LLAMA3,
    LONGROPE,
    TEXT,
    YARN,
    assert_outputs,
    outputs,
    small_inputs,
    small_model,
)
from tests.support.tolerances import assert_each, assert_same_bits, value
from tests.support.zoo import turn
from tightrope import patch, unpatch
from tightrope.patching import Calls, Entry, Report

ROPES: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "linear": {**DEFAULT, "rope_type": "linear", "factor": 10.0},
    "dynamic": DYNAMIC,
    "yarn": YARN,
    "llama3": LLAMA3,
    "longrope": LONGROPE,
}
X, SHORT, LONG = torch.zeros(1), torch.arange(24)[None], torch.arange(96)[None]
FAR = torch.tensor([[0, 1, 4097, 123_457, 1_000_003]])
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def llama(rope: dict[str, Any], **settings: Any) -> Any:
    return small_model("Llama", rope_parameters=rope, max_position_embeddings=64, **settings)


def tables(module: Any, *more: Any) -> list[torch.Tensor]:
    """Cosines and sines for 24 tokens, then for 96."""
    return [table for ids in (SHORT, LONG) for table in module(X, ids, *more)]


def assert_tables(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert_each(assert_outputs, got, want, "exact angles outputs")


def entry_of(report: Report, name: str) -> Entry:
    (entry,) = [entry for entry in report if entry.name == name]
    return entry


def assert_exact(module: Any, dtype: torch.dtype = F32, inv_freq: Any = None) -> None:
    """Tables at far positions are float32 (float64 for a float64 x) and within the error of an angle."""
    wide, name = (F64, "float64 angle") if dtype == F64 else (F32, "float32 angle")
    exact = oracle.cos_sin(FAR, oracle.frequencies(1e4, DIM) if inv_freq is None else inv_freq)
    for table, expected in zip(module(torch.zeros(1, dtype=dtype), FAR), exact):
        assert table.dtype == wide
        assert (table.double() - torch.cat((expected, expected), -1)).abs().max() <= value(name)


# --- modules of transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ROPES)
def test_each_rule_is_that_of_the_configuration(name: str) -> None:
    """NaN in the frequencies of the module does not reach what is served."""
    model = llama(ROPES[name])
    want = tables(LlamaRotaryEmbedding(model.config))
    report = patch(model, angles="exact")
    assert str(entry_of(report, "LlamaRotaryEmbedding").kind) == "exact cosines and sines"
    assert_tables(tables(model.model.rotary_emb), want)
    (calls,) = (c for place, c in report.calls().items() if "RotaryEmbedding" in place)
    assert calls == Calls(2, 0)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_far_angles_are_exact(dtype: torch.dtype) -> None:
    model = llama(DEFAULT).to(dtype)
    rough, _ = model.model.rotary_emb.float()(X, FAR)
    model.to(dtype)
    patch(model, angles="exact")
    assert_exact(model.model.rotary_emb, dtype)
    exact, _ = oracle.cos_sin(FAR, oracle.frequencies(1e4, DIM))
    assert (rough.double() - torch.cat((exact, exact), -1)).abs().max() > 1000 * value(
        "float32 angle"
    )


def test_each_type_of_layers_has_its_angles() -> None:
    kinds = ("sliding_attention", "full_attention")
    bases = {kind: {**DEFAULT, "rope_theta": 10.0**n} for n, kind in enumerate(kinds, 3)}
    model = small_model("Gemma 3", rope_parameters=bases)
    module = model.model.rotary_emb
    want = [tables(module, kind) for kind in kinds]
    patch(model, angles="exact")
    for kind, expected in zip(kinds, want):
        assert_tables(tables(module, kind), expected)
    with pytest.raises((AttributeError, KeyError), match="chunked"):
        module(X, SHORT, "chunked")


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_the_longest_row_decides_for_its_batch(rope: dict[str, Any]) -> None:
    """As in transformers, but a long call leaves nothing behind for short ones."""
    model = llama(rope)
    module = model.model.rotary_emb
    both = torch.cat((SHORT, LONG[:, -24:]))
    want = LlamaRotaryEmbedding(model.config)(X, both)
    patch(model, angles="exact")
    short = module(X, SHORT)
    assert_tables(list(module(X, both)), list(want))
    assert not torch.equal(module(X, both)[0][:1], short[0])
    assert_each(assert_same_bits, module(X, SHORT), short)


@pytest.mark.parametrize("family", ["Phi-3", "Llama"])
def test_a_cache_that_grows_beyond_the_original_length_equals_a_new_run(family: str) -> None:
    """Rows are padded on the left; transformers fills the cache again when LongRoPE's factors change."""
    model = small_model(family)
    given = small_inputs(28)
    given["attention_mask"][0, :9] = 0
    with patch(model, angles="exact"):
        made = model.generate(
            **given,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = made.sequences
        mask = torch.cat((given["attention_mask"], torch.ones_like(ids[:, 28:])), -1)
        whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert_outputs(made.logits[-1], whole[:, -2], "exact angles outputs")


def test_notes_of_dynamic_ntk() -> None:
    words = "note: LlamaRotaryEmbedding follows dynamic NTK, whose frequencies change with the length of the longest row"
    model = llama(DYNAMIC)
    with patch(model, angles="exact") as report:
        assert [note for note in report.notes if note.startswith(words)]
        assert words in str(report)
    assert not notes_of(model)


# --- what changes after patch ---------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "frequencies in place": lambda m: m.model.rotary_emb.inv_freq.mul_(0.25),
    "frequencies assigned": lambda m: setattr(
        m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 0.25
    ),
    "a factor": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 0.5),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", CHANGES)
def test_angles_are_those_that_the_module_has_now(what: str, when: str) -> None:
    model = llama(DEFAULT)
    if when == "after":
        patch(model, angles="exact")
        outputs(model)
    CHANGES[what](model)
    if when == "before":
        report = patch(model, angles="exact")
        assert (
            report.notes
            == report.to_dict()["notes"]
            == [
                f"note: the configuration states {model.config.rope_parameters}; LlamaRotaryEmbedding holds other "
                "frequencies or another factor, which are used. Build the model from the configuration to use its own."
            ]
        )
    got = tables(model.model.rotary_emb)
    unpatch(model)
    assert_tables(got, tables(model.model.rotary_emb))


def notes_of(model: Any) -> list[str]:
    with patch(model) as report:
        return report.notes


def test_plain_patch_notes_what_does_not_go_together() -> None:
    model = llama(DEFAULT)
    assert not notes_of(model)
    model.model.rotary_emb.inv_freq.mul_(0.25)
    (note,) = notes_of(model)
    assert "LlamaRotaryEmbedding holds other frequencies" in note
    model.model.rotary_emb.inv_freq.fill_(torch.nan)
    words = "note: model.rotary_emb.inv_freq holds NaN, and so will what it rotates"
    assert notes_of(model)[0] == words
    model = llama(DEFAULT)
    model.model.rotary_emb.config = LlamaConfig(**TEXT)
    model.model.rotary_emb.config.rope_parameters = {"rope_type": "new"}
    (note,) = notes_of(model)
    assert "cannot be built again from its configuration, which states {'rope_type': 'new'}" in note


@pytest.mark.parametrize("options", [{"angles": "exact"}, {"stack": "vllm"}], ids=str)
def test_a_change_that_cannot_be_followed_is_an_error(options: dict[str, Any]) -> None:
    model = llama(DEFAULT)
    ((name, given),) = options.items()
    patch(model, **options)
    outputs(model)
    model.model.rotary_emb.inv_freq.fill_(torch.nan)
    with pytest.raises(
        ValueError,
        match=rf"LlamaRotaryEmbedding must have frequencies that can be exchanged.* since patch\(model, {name}='{given}'\)"
        r", and inv_freq holds NaN; call unpatch\(model\)",
    ):
        outputs(model)
    unpatch(model)
    outputs(model)


@pytest.mark.parametrize("assign", [False, True])
def test_a_new_configuration_and_its_weights_are_followed(assign: bool) -> None:
    """A trainer that extends the context: the module is initialised again, or its state loaded."""
    model, other = llama(DEFAULT), llama({**DEFAULT, "rope_theta": 5e5})
    patch(model, angles="exact")
    outputs(model)
    model.config.rope_parameters = other.config.rope_parameters
    if assign:
        model.model.rotary_emb.__init__(model.config)
    else:
        model.model.rotary_emb.inv_freq.copy_(other.model.rotary_emb.inv_freq)
    assert_exact(model.model.rotary_emb, F32, oracle.frequencies(5e5, DIM))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_model_on_the_meta_device(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = llama(DEFAULT).to(dtype)
    patch(model, angles="exact")
    assert model.model.rotary_emb(torch.zeros(1, device="meta"), SHORT.to("meta"))[0].is_meta
    state = llama(DEFAULT).state_dict()
    model.to_empty(device="cpu").load_state_dict({k: v.to(dtype) for k, v in state.items()})
    for buffer in model.model.rotary_emb.buffers():  # which are not in the state
        buffer.copy_(frequencies())
    assert_exact(model.model.rotary_emb, dtype)


# --- modules of no library ------------------------------------------------------------------------


def apply_rope(x: Any, cos: Any, sin: Any) -> Any:
    return turn(x, cos, sin)


class Angles(nn.Module):
    """Makes cosines and sines from a buffer; subclasses change them."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies())

    def angle(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, :, None].float() * self.inv_freq

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angle = self.angle(position_ids).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def frequencies(base: float = 1e4) -> torch.Tensor:
    return 1 / base ** (torch.arange(0, DIM, 2) / DIM)


class Learned(Angles):
    def __init__(self) -> None:
        super().__init__()
        del self.inv_freq
        self.inv_freq = nn.Parameter(frequencies())


class Squared(Angles):
    def angle(self, ids: torch.Tensor) -> torch.Tensor:
        return super().angle(ids) ** 1.01


class Clamped(Angles):
    def angle(self, ids: torch.Tensor) -> torch.Tensor:
        return super().angle(ids.clamp(max=20_000))


class ByLength(Angles):
    """Dynamic NTK by the number of positions in a row."""

    def angle(self, ids: torch.Tensor) -> torch.Tensor:
        return super().angle(ids) * (0.5 if ids.shape[-1] > 256 else 1)


class OfRows(Angles):
    """Has a table with a row for each position up to a limit."""

    def angle(self, ids: torch.Tensor) -> torch.Tensor:
        return (torch.arange(6000.0)[:, None] * self.inv_freq)[ids]


class Model(nn.Module):
    def __init__(self, cls: type[Angles]) -> None:
        super().__init__()
        self.angles = cls()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return apply_rope(x, *self.angles(x, ids))


@pytest.mark.parametrize("cls", [Angles, OfRows])
def test_frequencies_that_a_module_holds_are_served(cls: type[Angles]) -> None:
    model = Model(cls)
    assert not patch(model, angles="exact").left
    assert_exact(model.angles, F32, frequencies().tolist())
    # Loaded ones too.
    model.load_state_dict({"angles.inv_freq": frequencies(5e5)})
    assert_exact(model.angles, F32, frequencies(5e5).tolist())


UNLIKE = "its cosines and sines are those of neither its configuration nor its inv_freq"
LEARNED = "it has learned tensors, to which exact angles would give no gradients"


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(Learned, LEARNED), (Squared, UNLIKE), (Clamped, UNLIKE), (ByLength, UNLIKE)],
)
def test_modules_that_compute_something_else_are_left(cls: type[Angles], reason: str) -> None:
    model = Model(cls)
    report = patch(model, angles="exact")
    entry = entry_of(report, cls.__name__)
    assert (entry.replaced, entry.reason) == (False, f"keeps its own cosines and sines: {reason}")
    with pytest.raises(
        ValueError,
        match="must have only functions and tables that can be exchanged, with stack='vllm'",
    ):
        patch(Model(cls), stack="vllm")


def test_a_model_without_a_module_that_makes_tables_is_listed() -> None:
    report = patch(small_model("GPT-J"), angles="exact")
    (left,) = report.left
    assert left.name == "GPTJForCausalLM"
    assert left.reason.startswith("none of its modules takes (x, position_ids)")


@pytest.mark.parametrize(
    "ids",
    [FAR.short(), FAR.float(), FAR[None], FAR[0]],
    ids=["int16", "float", "three dimensions", "one dimension"],
)
def test_other_positions_run_the_original(ids: torch.Tensor) -> None:
    model = Model(Angles)

    def run() -> Any:
        try:
            return model.angles(X, ids)
        except (IndexError, RuntimeError) as error:
            return type(error)

    want = run()
    report = patch(model, angles="exact")
    got = run()
    assert [calls for place, calls in report.calls().items() if "Angles" in place] == [Calls(0, 1)]
    assert got is want or all(map(torch.equal, got, want))


def test_frequencies_in_a_distributed_tensor_are_an_error(one_process: None) -> None:
    model = Model(Angles)
    patch(model, angles="exact")
    model.angles.inv_freq = distribute_tensor(model.angles.inv_freq, init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="must have frequencies that can be exchanged"):
        model.angles(X, FAR)


# --- doubtful calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"angles": "exact"}], ids=str)
def test_ids_of_packed_text_in_all_axes_are_counted(options: dict[str, Any]) -> None:
    model = small_model("Qwen2.5-VL")
    packed = torch.arange(12).remainder(5).expand(3, 2, 12)
    picture = torch.stack((torch.arange(12), torch.arange(12) // 4, torch.arange(12) % 4))
    report = patch(model, **options)
    place = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding.forward"
    for ids, more in ((torch.arange(12).expand(3, 2, 12), 0), (packed, 1), (picture[:, None], 0)):
        before = report.calls()[place].doubtful
        model(**small_inputs(), position_ids=ids)
        assert report.calls()[place].doubtful == before + more
    assert "in which ids restart within a row, equal on all axes: 1; give" in str(report)


def test_a_deep_copy_has_angles_of_its_own() -> None:
    model = llama(DEFAULT)
    patch(model, angles="exact")
    copied = copy.deepcopy(model)
    copied.model.rotary_emb.inv_freq.mul_(0.5)
    assert_exact(copied.model.rotary_emb, F32, (frequencies() / 2).tolist())
    assert_exact(model.model.rotary_emb)
