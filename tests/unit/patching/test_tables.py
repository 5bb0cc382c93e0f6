"""Exact angles and stacks: which modules get other tables, what they are, what changes after a patch, and notes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from tests.support import oracle
from tests.support.models.of_transformers import (
    DEFAULT,
    DIM,
    DYNAMIC,
    LLAMA3,
    LONGROPE,
    YARN,
    assert_outputs,
    outputs,
    small_inputs,
    small_model,
)
from tests.support.tolerances import assert_each, assert_same_bits, value
from tests.support.zoo import turn
from tightrope import patch, unpatch
from tightrope.patching import Calls

KINDS = ("sliding_attention", "full_attention")
BASES = {kind: {**DEFAULT, "rope_theta": 10.0**n} for n, kind in enumerate(KINDS, 3)}
#: A rule -> a family, its configuration, and what its module takes after positions.
RULES: dict[str, tuple[str, dict[str, Any], list[tuple[str, ...]]]] = {
    "default": ("Llama", DEFAULT, [()]),
    "linear": ("Llama", {**DEFAULT, "rope_type": "linear", "factor": 10.0}, [()]),
    "dynamic": ("Llama", DYNAMIC, [()]),
    "yarn": ("Llama", YARN, [()]),
    "llama3": ("Llama", LLAMA3, [()]),
    "longrope": ("Llama", LONGROPE, [()]),
    "two types of layers": ("Gemma 3", BASES, [(kind,) for kind in KINDS]),
}
X, SHORT, LONG = torch.zeros(1), torch.arange(24)[None], torch.arange(96)[None]
BOTH = torch.cat((SHORT, LONG[:, -24:]))
FAR = torch.tensor([[0, 1, 4097, 123_457, 1_000_003]])
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def of_rule(name: str) -> Any:
    family, rope, _ = RULES[name]
    return small_model(family, rope_parameters=rope, max_position_embeddings=64)


def tables(module: Any, *more: Any) -> list[torch.Tensor]:
    """Cosines and sines for 24 tokens, then for 96, then for rows of both, then for 24 again."""
    return [table for ids in (SHORT, LONG, BOTH, SHORT) for table in module(X, ids, *more)]


def assert_tables(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert_each(assert_outputs, got, want, "exact angles outputs")


def frequencies(base: float = 1e4) -> torch.Tensor:
    return 1 / base ** (torch.arange(0, DIM, 2) / DIM)


def assert_exact(module: Any, dtype: torch.dtype = F32, inv_freq: Any = None) -> None:
    """Tables at far positions are float32 (float64 for a float64 x) and within the error of an angle."""
    wide, name = (F64, "float64 angle") if dtype == F64 else (F32, "float32 angle")
    exact = oracle.cos_sin(FAR, oracle.frequencies(1e4, DIM) if inv_freq is None else inv_freq)
    for table, expected in zip(module(torch.zeros(1, dtype=dtype), FAR), exact):
        assert table.dtype == wide
        assert (table.double() - torch.cat((expected, expected), -1)).abs().max() <= value(name)


def notes_of(model: Any, **options: Any) -> list[str]:
    with patch(model, **options) as report:
        assert report.notes == report.to_dict()["notes"]
        return report.notes


# --- modules of transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_that_of_the_configuration(name: str) -> None:
    """The longest row decides for its batch, as in transformers, but a long call leaves nothing behind for short ones."""
    model = of_rule(name)
    module, kinds = model.model.rotary_emb, RULES[name][2]
    fresh = [type(module)(model.config) for _ in kinds]
    want = [tables(each, *kind) for each, kind in zip(fresh, kinds)]
    report = patch(model, angles="exact")
    for kind, expected in zip(kinds, want):
        got = tables(module, *kind)
        assert_tables(got, expected)
        assert_each(assert_same_bits, got[-2:], got[:2])
        assert torch.equal(got[4][:1], got[0]) == (name not in ("dynamic", "longrope"))
    entry = next(each for each in report if each.name == type(module).__name__)
    assert entry.kind == "exact cosines and sines"
    assert Calls(4 * len(kinds), 0) in report.calls().values()
    if name == "two types of layers":
        with pytest.raises((AttributeError, KeyError), match="chunked"):
            module(X, SHORT, "chunked")


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_far_angles_are_exact(dtype: torch.dtype) -> None:
    model = of_rule("default").to(dtype)
    patch(model, angles="exact")
    assert_exact(model.model.rotary_emb, dtype)


@pytest.mark.parametrize("family", ["Phi-3", "Llama"])
def test_a_cache_that_grows_beyond_the_original_length_equals_a_new_run(family: str) -> None:
    """Rows are padded on the left; transformers fills the cache again when LongRoPE's factors change."""
    model, given = small_model(family), small_inputs(28)
    given["attention_mask"][0, :9] = 0
    how = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    with patch(model, angles="exact"):
        made = model.generate(**given, **how, return_dict_in_generate=True)
        ids = made.sequences
        mask = torch.cat((given["attention_mask"], torch.ones_like(ids[:, 28:])), -1)
        whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert_outputs(made.logits[-1], whole[:, -2], "exact angles outputs")


# --- what changes after patch ---------------------------------------------------------------------


def other_base(model: Any) -> None:
    """A trainer that extends the context initialises the module again."""
    model.config.rope_parameters = {**DEFAULT, "rope_theta": 5e5}
    model.model.rotary_emb.__init__(model.config)


def scaled(model: Any) -> None:
    module = model.model.rotary_emb
    module.inv_freq = module.inv_freq * 0.25


CHANGES: dict[str, Callable[[Any], Any]] = {
    "frequencies in place": lambda m: m.model.rotary_emb.inv_freq.mul_(0.25),
    "frequencies assigned": scaled,
    "a factor": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 0.5),
    "another base": other_base,
}


@pytest.mark.parametrize("when", ["before", "after", "in a copy"])
@pytest.mark.parametrize("what", CHANGES)
def test_angles_are_those_that_the_module_has_now(what: str, when: str) -> None:
    model = of_rule("default")
    own = tables(model.model.rotary_emb)
    first = model
    if when != "before":
        patch(model, angles="exact")
        outputs(model)
        model = copy.deepcopy(model) if when == "in a copy" else model
    CHANGES[what](model)
    if when == "before":
        noted = notes_of(model, angles="exact") + notes_of(model)
        words = "LlamaRotaryEmbedding holds other frequencies or another factor, which are used"
        assert [words in note for note in noted] == [True] * 2 * (what != "another base")
        patch(model, angles="exact")
    got = tables(model.model.rotary_emb)
    if when == "in a copy":
        assert_tables(tables(first.model.rotary_emb), own)
        unpatch(first)
    unpatch(model)
    assert_tables(got, tables(model.model.rotary_emb))
    assert not torch.equal(got[2], own[2])


def test_notes_of_what_does_not_go_together() -> None:
    assert not notes_of(of_rule("default"))
    model = of_rule("dynamic")
    words = (
        "note: LlamaRotaryEmbedding follows dynamic NTK, whose frequencies change with the length"
    )
    assert any(note.startswith(words) for note in notes_of(model, angles="exact"))
    assert not notes_of(model)
    model = of_rule("default")
    model.model.rotary_emb.inv_freq.fill_(torch.nan)
    words = "note: model.rotary_emb.inv_freq holds NaN, and so will what it rotates"
    assert notes_of(model)[0] == words
    model = of_rule("default")
    model.config.rope_parameters = {"rope_type": "new"}
    (note,) = notes_of(model)
    assert "cannot be built again from its configuration, which states {'rope_type': 'new'}" in note


@pytest.mark.parametrize("options", [{"angles": "exact"}, {"stack": "vllm"}], ids=str)
def test_a_change_that_cannot_be_followed_is_an_error(options: dict[str, Any]) -> None:
    model, ((name, given),) = of_rule("default"), options.items()
    patch(model, **options)
    outputs(model)
    model.model.rotary_emb.inv_freq.fill_(torch.nan)
    words = (
        rf"that can be exchanged.* since patch\(model, {name}='{given}'\), and inv_freq holds NaN"
    )
    with pytest.raises(ValueError, match=rf"LlamaRotaryEmbedding must have .*{words}; call unp"):
        outputs(model)
    unpatch(model)
    outputs(model)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_model_on_the_meta_device(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = of_rule("default").to(dtype)
    patch(model, angles="exact")
    assert model.model.rotary_emb(torch.zeros(1, device="meta"), SHORT.to("meta"))[0].is_meta
    state = of_rule("default").state_dict()
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


class OfRows(Angles):
    """Has a table with a row for each position up to a limit."""

    def angle(self, ids: torch.Tensor) -> torch.Tensor:
        return (torch.arange(6000.0)[:, None] * self.inv_freq)[ids]


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


@pytest.mark.parametrize("cls", [Learned, Squared, Clamped, ByLength])
def test_modules_that_compute_something_else_are_left(cls: type[Angles]) -> None:
    words = "its cosines and sines are those of neither its configuration nor its inv_freq"
    if cls is Learned:
        words = "it has learned tensors, to which exact angles would give no gradients"
    (entry,) = patch(Model(cls), angles="exact").left
    assert (entry.name, entry.reason) == (cls.__name__, f"keeps its own cosines and sines: {words}")
    with pytest.raises(ValueError, match="that can be exchanged, with stack='vllm'"):
        patch(Model(cls), stack="vllm")


def test_a_model_without_a_module_that_makes_tables_is_listed() -> None:
    (left,) = patch(small_model("GPT-J"), angles="exact").left
    assert left.name == "GPTJForCausalLM"
    assert left.reason.startswith("none of its modules takes (x, position_ids)")


OTHERS = {"int16": FAR.short(), "float": FAR.float(), "three dims": FAR[None], "one dim": FAR[0]}


@pytest.mark.parametrize("ids", OTHERS.values(), ids=OTHERS)
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


EACH = torch.arange(12)
TOKENS = torch.arange(24).view(2, 12) % 9 + 1
PADDED = torch.cat((TOKENS[:1], TOKENS[1:].index_fill(1, torch.tensor([0, 1]), 0)))
PICTURE = torch.stack((EACH, EACH // 4, EACH % 4))[:, None]
SHARED = EACH.expand(3, 2, 12)
OWN = torch.stack((EACH, (EACH - 2).clamp(min=0))).expand(3, 2, 12)
#: What is counted -> calls, of which only one counts, and what the report says.
COUNTED: dict[str, tuple[list[tuple[torch.Tensor, torch.Tensor]], str]] = {
    "doubtful": (
        [(TOKENS, SHARED), (TOKENS, (EACH % 5).expand(3, 2, 12)), (TOKENS, PICTURE)],
        "in which ids restart within a row, equal on all axes: 1; give",
    ),
    "padded": (
        [(TOKENS, SHARED), (PADDED, OWN), (PADDED, SHARED), (PADDED[1:], SHARED[:, 1:])],
        "in which rows share ids, but some seem to begin with padding: 1; give",
    ),
}


@pytest.mark.parametrize("options", [{}, {"angles": "exact"}], ids=str)
@pytest.mark.parametrize("kind", COUNTED)
def test_ids_of_packed_or_padded_rows_are_counted(kind: str, options: dict[str, Any]) -> None:
    model, (calls, words) = small_model("Qwen2.5-VL"), COUNTED[kind]
    report = patch(model, **options)
    for input_ids, ids in calls:
        model(input_ids=input_ids, position_ids=ids)
    found = {place: n for place, calls in report.calls().items() if (n := getattr(calls, kind))}
    place = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding.forward"
    assert found == {place: 1}
    assert words in str(report)


def test_ids_without_values_are_not_looked_at() -> None:
    model = small_model("Qwen2.5-VL")
    patch(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {
            "input_ids": mode.from_tensor(torch.ones(2, 12, dtype=torch.int64)),
            "position_ids": mode.from_tensor(torch.arange(12).expand(3, 2, 12)),
        }
        assert model(**given)[0].shape[:2] == (2, 12)


# --- stacks; tests/coverage/test_bits.py has their bits ---------------------------------------------

IDS = torch.tensor([[0, 1, 5, 63, 900, 4095, 100_000], [7, 6, 5, 4, 3, 2, 1]])


def test_tables_have_the_dtype_of_autocast() -> None:
    """There the hidden state may be float32, while the server's is bfloat16."""
    model = small_model("Llama")
    patch(model, stack="vllm")
    hidden = torch.zeros(1, 9, 64)
    wanted = model.model.rotary_emb(hidden.to(BF16), IDS)
    with torch.autocast("cpu", BF16):
        seen = model.model.rotary_emb(hidden, IDS)
    assert wanted[0].dtype == BF16
    assert_same_bits(seen, wanted)


def with_rope(rope: dict[str, Any]) -> Callable[[Any], None]:
    return lambda model: model.__init__(small_model("Llama", rope_parameters=rope).config)


# A server fixes the length for all rows, and the model does not know it; and it computes its tables from the
# configuration, so it would not have those of a model that holds others.
LENGTH, OTHER = "depend on the length, which stack 'vllm' fixes; call", "those of neither its conf"
REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "longrope": (LENGTH, with_rope(LONGROPE)),
    "dynamic": (LENGTH, with_rope(DYNAMIC)),
    "frequencies": (OTHER, lambda model: model.model.rotary_emb.inv_freq.mul_(0.5)),
    "factor": (OTHER, lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0)),
    "configuration": (OTHER, lambda m: m.config.rope_parameters.update(rope_theta=7e6)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_no_server_would_rotate_so_are_refused(what: str) -> None:
    words, change = REFUSED[what]
    model = small_model("Llama")
    change(model)
    with pytest.raises(ValueError, match=words):
        patch(model, stack="vllm")
    outputs(model)


def test_a_part_that_can_be_patched_alone_is_named() -> None:
    """The vision part takes positions of two axes, which no server's table has."""
    whole = torch.nn.ModuleDict({"text": small_model("Llama"), "vision": small_model("Phi-3")})
    words = r"Phi3RotaryEmbedding keeps its own .* or patch\(model.text, stack='vllm'\) for that part alone"
    with pytest.raises(ValueError, match=words):
        patch(whole, stack="vllm")
    assert patch(whole["text"], stack="vllm").replaced
    unpatch(whole)
