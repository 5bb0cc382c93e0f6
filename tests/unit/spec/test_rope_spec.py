"""RopeSpec: an immutable value, whose cached tensors stay valid under every mode of torch."""

import copy
import dataclasses
import json
import math
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import refused
from tests.support.tolerances import dynamic_drift, value
from tightrope import RopeSpec, angles, positions
from tightrope.axes import Axes
from tightrope.frequencies import (
    NTK,
    DynamicNTK,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from tightrope.functional import rotate, rotate_
from tightrope.spec import PreparedRotation
from tightrope.spec._words import OnDevice, Words

CPU = torch.device("cpu")

# --- equality, hash, copies --------------------------------------------------------------------------------------


def test_defaults() -> None:
    spec = RopeSpec(64)
    assert (spec.head_dim, spec.base, spec.rotary_dim, spec.start) == (64, 10000.0, 64, 0)
    assert spec.interleaved is False
    assert RopeSpec(64, start=16).rotary_dim == 48
    assert spec.axis_count == 1


def test_numbers_take_one_form() -> None:
    spec = RopeSpec(numpy.int64(64), base=500000, rotary_dim=numpy.int32(32))  # type: ignore[arg-type]
    assert type(spec.head_dim) is int
    assert type(spec.rotary_dim) is int
    assert type(spec.base) is float
    assert spec == RopeSpec(64, 5e5, 32)


def test_frozen() -> None:
    spec = RopeSpec(64)
    for field in dataclasses.fields(spec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec, field.name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.inv_freq = torch.ones(32)  # type: ignore[attr-defined]


def test_equality_and_hash() -> None:
    spec = RopeSpec(64)
    assert spec == RopeSpec(64, 10000.0, 64, 0, False)
    assert hash(spec) == hash(RopeSpec(64, 10000, 64))
    others = [
        RopeSpec(66),
        RopeSpec(64, 10001.0),
        RopeSpec(64, rotary_dim=32),
        RopeSpec(64, rotary_dim=32, start=2),
        RopeSpec(64, interleaved=True),
        RopeSpec(64, scaling=Linear(1.0)),  # rotates like None, but is not equal to it
        RopeSpec(64, scaling=Linear(2.0)),
        RopeSpec(64, scaling=NTK(2.0)),
        RopeSpec(64, axes=Axes.blocks((16, 16))),
        RopeSpec(64, axes=Axes.strided(2, 32)),
    ]
    assert all(spec != other for other in others)
    assert len({spec, RopeSpec(64), *others}) == 1 + len(others)


def test_the_hash_is_computed_once() -> None:
    spec = RopeSpec(64)
    before = hash(spec)
    # A hash computed again would use this base.
    object.__setattr__(spec, "base", 5.0)
    assert hash(spec) == before
    assert hash(RopeSpec(64, 5.0)) != before


def test_frequencies() -> None:
    made = RopeSpec(64, base=5e5, rotary_dim=32, start=8).frequencies()
    assert made.inv_freq.tolist() == [float(omega) for omega in oracle.frequencies(5e5, 32)]
    assert made.attention_scaling == 1.0
    assert RopeSpec(64).frequencies(100) == RopeSpec(64).frequencies()


COPIES: list[Callable[[RopeSpec], RopeSpec]] = [
    copy.copy,
    copy.deepcopy,
    dataclasses.replace,
    *(lambda spec, n=n: pickle.loads(pickle.dumps(spec, n)) for n in range(2, 6)),  # type: ignore[misc]
]


@pytest.mark.parametrize("make", COPIES)
def test_copies_are_equal_and_rotate_equally(make: Callable[[RopeSpec], RopeSpec]) -> None:
    spec = RopeSpec(20, 5e5, 12, 3, True, YaRN(4.0, 4096), Axes.sections((2, 4)))
    other = make(spec)
    assert other == spec
    assert repr(other) == repr(spec)
    spec, other = dataclasses.replace(spec, axes=None), dataclasses.replace(other, axes=None)
    assert hash(other) == hash(spec)
    x = torch.randn(7, 20)
    assert torch.equal(rotate(x, other, 99, layout="sd"), rotate(x, spec, 99, layout="sd"))


def test_replace_derives_anew() -> None:
    spec = RopeSpec(20)
    other = dataclasses.replace(spec, base=5e5)
    assert other == RopeSpec(20, 5e5)
    assert not torch.equal(other.at().angles.words, spec.at().angles.words)
    assert hash(other) == hash(RopeSpec(20, 5e5))


def test_replace_hands_over_the_resolved_rotary_dim() -> None:
    """dataclasses.replace copies the resolved rotary_dim: a narrower head raises an error, and
    rotary_dim=None computes it anew."""
    spec = RopeSpec(64)
    with pytest.raises(ValueError, match="must lie in"):
        dataclasses.replace(spec, head_dim=32)
    assert dataclasses.replace(spec, head_dim=32, rotary_dim=None) == RopeSpec(32)  # type: ignore[arg-type]
    assert dataclasses.replace(spec, head_dim=128) == RopeSpec(128, rotary_dim=64)
    assert dataclasses.replace(spec, scaling=Linear(2.0)) == RopeSpec(64, scaling=Linear(2.0))


def test_a_pickle_carries_no_tensor() -> None:
    spec = RopeSpec(4096)
    spec.at(5)
    assert len(pickle.dumps(spec)) < 300


# --- scaling and axes -----------------------------------------------------------------------------

REPRS = {
    "RopeSpec(head_dim=64)": RopeSpec(64, 10000, 64, 0, False, None, None),
    "RopeSpec(head_dim=64, start=16)": RopeSpec(64, start=16),
    "RopeSpec(head_dim=64, rotary_dim=16, start=16)": RopeSpec(64, rotary_dim=16, start=16),
    "RopeSpec(head_dim=64, base=500000.0, interleaved=True)": RopeSpec(64, 5e5, interleaved=True),
    "RopeSpec(head_dim=64, scaling=YaRN(factor=4.0, original_max_position=4096, truncate=False))": (
        RopeSpec(64, scaling=YaRN(4.0, 4096, truncate=False))
    ),
    "RopeSpec(head_dim=128, axes=Axes.sections((16, 24, 24)))": RopeSpec(
        128, axes=Axes.sections((16, 24, 24))
    ),
}


def test_repr_of_a_prepared_rotation_shows_what_was_given() -> None:
    shown = repr(RopeSpec(16).at(torch.arange(3)))
    assert "spec=RopeSpec(head_dim=16)" in shown
    assert "ids=tensor([[[0, 1, 2]]])" in shown
    assert "words" not in shown


@pytest.mark.parametrize("text", REPRS)
def test_repr_shows_values_other_than_the_defaults(text: str) -> None:
    assert repr(REPRS[text]) == text
    assert eval(text) == REPRS[text]


RULED: dict[str, RopeSpec] = {
    "plain": RopeSpec(12, 5e5, 8, 2, True),
    "linear": RopeSpec(8, scaling=Linear(3.3)),
    "ntk": RopeSpec(8, scaling=NTK(8.0)),
    "dynamic": RopeSpec(8, scaling=DynamicNTK(2.0, 100)),
    "yarn": RopeSpec(8, scaling=YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)),
    "longrope": RopeSpec(8, scaling=LongRoPE((1.0,) * 4, (1.0, 1.1, 2.0, 32.0), 100, factor=32.0)),
    "llama3": RopeSpec(8, 5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    "proportional": RopeSpec(8, scaling=Proportional(0.5)),
    "given": RopeSpec(8, scaling=Given((1.0, 1 / 3, -0.1, 7.0))),
    "given per head": RopeSpec(4, scaling=Given(((1.0, 0.1), (0.5, 9.0), (1e-3, 1e-5)))),
    "given per axis": RopeSpec(4, scaling=Given((((1.0, 0.1),), ((0.5, 9.0),)))),
    "given per axis and head": RopeSpec(
        4, scaling=Given((((1.0, 0.1), (2.0, 0.2)), ((0.5, 9.0), (-1.0, 0.0))))
    ),
    "sections": RopeSpec(12, axes=Axes.sections((1, 2, 3))),
    "blocks": RopeSpec(12, 100.0, axes=Axes.blocks((4, 2))),
    "blocks, slice": RopeSpec(12, 100.0, 8, 1, axes=Axes.blocks((1, 3))),
    "strided": RopeSpec(16, axes=Axes.strided(2, 8)),
    "scaled sections": RopeSpec(12, axes=Axes.sections((2, 2, 2), True), scaling=YaRN(4.0, 4096)),
    "dynamic blocks": RopeSpec(16, axes=Axes.blocks((2, 6)), scaling=DynamicNTK(2.0, 100)),
    "longrope sections": RopeSpec(
        8,
        axes=Axes.sections((3, 1)),
        scaling=LongRoPE((1.0,) * 4, (1.0, 1.1, 2.0, 32.0), 100, attention_factor=1.5),
    ),
    "fast sections": RopeSpec(8, 1e-3, axes=Axes.sections((2, 2))),
    "heads on sections": RopeSpec(
        8, axes=Axes.sections((1, 3)), scaling=Given(((1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 0.4)))
    ),
    "no pairs": RopeSpec(8, rotary_dim=0, axes=Axes(3, ())),
}


def rows_of(spec: RopeSpec, dim: int, length: int | None) -> list[list[Any]]:
    """Return the papers' frequencies of a spec's rule for ``dim`` channels, [axes · heads][pairs]."""
    rule, base = spec.scaling, spec.base
    if rule is None:
        return [truth.plain(dim, base)]
    if isinstance(rule, Given):
        flat = [
            oracle.MP.mpf(omega)
            for omega in rule.frequencies(dim, base).inv_freq.flatten().tolist()
        ]
        return [flat[at : at + dim // 2] for at in range(0, len(flat), dim // 2)]
    if isinstance(rule, Linear):
        return [truth.linear(dim, base, rule.factor)]
    if isinstance(rule, NTK):
        return [truth.ntk(dim, base, rule.factor)]
    if isinstance(rule, DynamicNTK):
        return [truth.dynamic_ntk(dim, base, rule.factor, rule.original_max_position, length)]
    if isinstance(rule, YaRN):
        return [truth.yarn(dim, base, rule.factor, rule.original_max_position)]
    if isinstance(rule, Llama3):
        return [truth.llama3(dim, base, 8.0, 1.0, 4.0, 8192)]
    if isinstance(rule, Proportional):
        return [truth.proportional(dim, base, rule.rotary_fraction, rule.factor)]
    assert isinstance(rule, LongRoPE)
    short, long = rule.short_factor, rule.long_factor
    return [truth.longrope(dim, base, short, long, rule.original_max_position, length)]


def phases_of(spec: RopeSpec, length: int | None) -> list[list[list[oracle.Phase]]]:
    """Return phase word and turns of every [axis][head][pair]; zeros if the axis does not rotate the pair."""
    axes = spec.axes
    if axes is None:
        rows = rows_of(spec, spec.rotary_dim, length)
        heads = len(rows) // spec.axis_count
        return [
            [[oracle.phase(omega) for omega in row] for row in rows[at : at + heads]]
            for at in range(0, len(rows), heads)
        ]
    still = oracle.Phase(0, 0)
    heads = len(rows_of(spec, axes.pairs[0][2], length)) if axes.pairs else 1
    return [
        [
            [
                oracle.phase(rows_of(spec, dim, length)[head][index]) if owner == axis else still
                for owner, index, dim in axes.pairs
            ]
            for head in range(heads)
        ]
        for axis in range(axes.count)
    ]


def expected(spec: RopeSpec, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact phase words and turns, [axes, 1, heads, pairs]."""
    phases = phases_of(spec, length)
    words, turns = (
        torch.tensor([[[phase[i] for phase in row] for row in axis] for axis in phases])
        for i in (0, 1)
    )
    return words.to(torch.int64)[:, None], turns.to(torch.int64)[:, None]


@pytest.mark.parametrize("name", RULED)
def test_a_dictionary_brings_a_spec_back(name: str) -> None:
    spec = RULED[name]
    made = spec.to_dict()
    assert made["version"] == 1
    again = RopeSpec.from_dict(json.loads(json.dumps(made)))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.to_dict() == made
    assert torch.equal(again.words_for()[0], spec.words_for()[0])
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_the_form_of_a_dictionary() -> None:
    """`to_dict` writes version 1 of the format, which saved files contain."""
    spec = RopeSpec(12, 5e5, 8, 2, True, Linear(3.3), Axes.sections((1, 3)))
    assert spec.to_dict() == {
        "version": 1,
        "head_dim": 12,
        "base": 500000.0,
        "rotary_dim": 8,
        "start": 2,
        "interleaved": True,
        "scaling": {"rule": "linear", "factor": 3.3},
        "axes": {"count": 2, "pairs": [[0, 0, 8], [1, 1, 8], [1, 2, 8], [1, 3, 8]]},
    }
    assert RopeSpec.from_dict({"version": 1, "head_dim": 64}) == RopeSpec(64)


def assert_words(
    spec: RopeSpec, length: int | None, words: torch.Tensor, wanted: torch.Tensor
) -> None:
    """Assert that words are exact; for dynamic NTK beyond its original length, within its bound."""
    rule = spec.scaling
    if not isinstance(rule, DynamicNTK) or length is None or length <= rule.original_max_position:
        assert torch.equal(words, wanted)
        return
    relative = dynamic_drift(rule.factor, rule.original_max_position, length)
    bound = (relative + value("word of a float64")) * wanted.double().abs() + 1
    assert bool(((words - wanted).abs().double() <= bound).all())


@pytest.mark.parametrize("length", [None, 100, 101, 5000])
@pytest.mark.parametrize("name", RULED)
def test_words(name: str, length: int | None) -> None:
    spec = RULED[name]
    words, turns = spec.words_for(length)
    wanted_words, wanted_turns = expected(spec, length)
    assert words.dtype == torch.int64
    assert_words(spec, length, words, wanted_words)
    if turns is None:
        assert not wanted_turns.any()
    else:
        assert torch.equal(turns, wanted_turns)
    assert words.shape[0] == spec.axis_count
    # frequencies() and phase words agree for each pair.
    inv_freq = spec.frequencies(length).inv_freq
    back = angles.inv_freq(words, turns, torch.float64)[:, 0]
    if spec.axes is None:
        torch.testing.assert_close(back.reshape(inv_freq.shape), inv_freq)
    else:
        torch.testing.assert_close(back.sum(0).reshape(inv_freq.shape), inv_freq)


@pytest.mark.parametrize("name", RULED)
def test_rows_get_what_they_would_get_alone(name: str) -> None:
    spec = RULED[name]
    lengths = [5000, 3, 100, 101, 5000, 0, 2**31 - 1]
    wanted = [spec.words_for(length) for length in lengths]
    for rows in (lengths, torch.tensor(lengths), torch.tensor(lengths).double() - 0.5):
        words, turns = spec.words_for(rows)
        if not spec.by_length:
            assert words is spec.words_for()[0]
            continue
        assert words.shape[1] == len(lengths)
        for row, (one, one_turns) in enumerate(wanted):
            assert torch.equal(words[:, row : row + 1], one)
            mine = torch.zeros_like(one) if turns is None else turns[:, row : row + 1]
            assert torch.equal(mine, torch.zeros_like(one) if one_turns is None else one_turns)


def test_rows_of_one_regime_share_one_row() -> None:
    spec = RULED["longrope"]
    assert spec.words_for([101, 5000])[0] is spec.words_for(101)[0]
    assert spec.words_for([1, 100])[0] is spec.words_for()[0]
    assert spec.words_for([])[0] is spec.words_for()[0]
    assert spec.words_for([1, 101])[0].shape == (1, 2, 1, 4)


def test_words_of_many_lengths_do_not_pile_up() -> None:
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 100))
    for length in range(100, 400):
        spec.words_for(length)
    assert len(tables_of(spec)) < 10
    assert_words(spec, 250, spec.words_for(250)[0], expected(spec, 250)[0])


def unread(spec: RopeSpec, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return phase words from a compiled function, which must not read the tensor of lengths."""
    torch.compiler.reset()  # one function, many specs

    @torch.compile(fullgraph=True, backend="eager")
    def make(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return spec.words_for(lengths)

    return make(lengths)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
@pytest.mark.parametrize(
    "name",
    ["dynamic", "longrope", "dynamic blocks", "longrope sections", "linear", "sections"],
)
def test_lengths_that_are_not_read(name: str, dtype: torch.dtype) -> None:
    spec = RULED[name]
    lengths = torch.tensor([5000, -3, 100, 101, 2**31 - 1, 0], dtype=dtype)
    words, turns = unread(spec, lengths)
    exact, exact_turns = spec.words_for(lengths)
    assert turns is None
    assert exact_turns is None
    assert words.shape == exact.shape
    assert torch.equal(words, exact)


def test_lengths_that_are_not_read_and_whole_turns() -> None:
    rule = LongRoPE((0.125,) * 2, (1.0,) * 2, 100, factor=2.0)
    spec = RopeSpec(4, scaling=rule)  # 8 radians per position up to 100 tokens
    lengths = torch.tensor([100, 101])
    words, turns = unread(spec, lengths)
    exact, exact_turns = spec.words_for(lengths)
    assert turns is not None
    assert exact_turns is not None
    assert torch.equal(words, exact)
    assert torch.equal(turns, exact_turns)
    assert turns.flatten().tolist() == [1, 0, 0, 0]


def test_lengths_on_another_device_are_not_read() -> None:
    lengths = torch.zeros(3, dtype=torch.int64, device="meta")
    for name, pairs in (("dynamic", 4), ("longrope", 4), ("dynamic blocks", 8)):
        words, turns = RULED[name].words_for(lengths, "meta")
        assert words.device.type == "meta"
        assert words.shape == (RULED[name].axis_count, 3, 1, pairs)
        assert turns is None
    with FakeTensorMode():
        assert isinstance(RULED["dynamic"].words_for(torch.tensor([5]))[0], FakeTensor)
    assert not any(isinstance(tensor, FakeTensor) for tensor in tables_of(RULED["dynamic"]))


def test_rows_made_in_inference_mode_can_be_saved_by_autograd() -> None:
    with torch.inference_mode():
        words, _ = RopeSpec(8, scaling=DynamicNTK(2.0, 100)).words_for([50, 200])
    assert not words.is_inference()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda: RopeSpec(8, scaling=YaRN(4.0, 4096)),
        lambda: RopeSpec(8, scaling=Given((1.0, 0.5, 0.25, 9.0))),
        lambda: RopeSpec(8, scaling=RULED["longrope"].scaling),
        lambda: RopeSpec(8, axes=RULED["longrope sections"].axes),
        lambda: RopeSpec(8, scaling=LongRoPE((1.0,) * 4, (1.0, 1.1, 2.0, 32.0), 100, factor=32.0)),
        lambda: RopeSpec(8, scaling=DynamicNTK(2.0, 100), axes=Axes.sections((2, 1, 1))),
    ],
)
def test_a_spec_made_inside_a_compiled_function(make: Callable[[], RopeSpec]) -> None:
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def words() -> torch.Tensor:
        return make().words_for()[0] + 0

    assert torch.equal(words(), make().words_for()[0])
    lengths = torch.tensor([7, 150, 90])

    @torch.compile(fullgraph=True, backend="eager")
    def words_of_lengths(lengths: torch.Tensor) -> torch.Tensor:
        return make().words_for(lengths)[0] + 0

    assert torch.equal(words_of_lengths(lengths), unread(make(), lengths)[0])


def test_attention_scaling() -> None:
    assert RopeSpec(8).attention_scaling() == 1.0
    assert RopeSpec(8).attention_scaling() == 1.0
    yarn = RopeSpec(8, scaling=YaRN(4.0, 4096))
    wanted = float(truth.yarn_attention(4.0))
    assert (
        yarn.attention_scaling()
        == yarn.attention_scaling(10**6)
        == yarn.attention_scaling([1, 2])
        == wanted
    )
    assert yarn.frequencies().attention_scaling == wanted
    sections = RULED["longrope sections"]
    assert sections.attention_scaling() == sections.attention_scaling(5000) == 1.5
    assert sections.frequencies(5000).attention_scaling == 1.5
    assert RULED["dynamic"].attention_scaling([5, 5000]) == 1.0


def test_attention_scaling_by_length() -> None:
    rule = LongRoPE((1.0,) * 4, (2.0,) * 4, 100, short_mscale=1.25, long_mscale=1.5)
    spec = RopeSpec(8, scaling=rule)
    assert spec.attention_scaling() == spec.attention_scaling(100) == 1.25
    assert spec.attention_scaling(101) == 1.5
    assert spec.attention_scaling([101, 5000]) == 1.5
    assert spec.attention_scaling(torch.tensor([7, 100])) == 1.25
    assert spec.attention_scaling([]) == 1.25
    text = (
        "[RopeSpec] all rows of one call must have one attention scaling but got 1.25, 1.5; rotate "
        "short and long rows separately."
    )
    with refused(NotImplementedError, text):
        spec.attention_scaling([100, 101])
    text = (
        "[RopeSpec] all rows of one call must have one attention scaling but got 1.25, 1.5; a length "
        "that is traced or on a device may have either, so give seq_len as an int."
    )
    with refused(NotImplementedError, text):
        spec.attention_scaling(torch.tensor([101], device="meta"))


def test_softmax_scaling_is_the_rules() -> None:
    assert RopeSpec(8).softmax_scaling == 1.0
    rule = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert RopeSpec(8, scaling=rule).softmax_scaling == rule.softmax_scaling > 1.8


def test_history_and_neighbours_change_nothing() -> None:
    """A call or a batch with length 6,000 does not change the phase words of length 3,000."""
    for rule in (DynamicNTK(2.0, 2048), LongRoPE((1.0,) * 4, (2.0,) * 4, 2048, factor=2.0)):
        spec = RopeSpec(8, scaling=rule)
        first = spec.words_for(3000)[0].clone()
        spec.words_for(6000)
        assert torch.equal(spec.words_for(3000)[0], first)
        assert torch.equal(spec.words_for([6000, 3000, 1])[0][:, 1:2], first)
        assert torch.equal(RopeSpec(8, scaling=rule).words_for(3000)[0], first)


def test_words_of_rules_in_many_threads() -> None:
    specs = [RopeSpec(8, scaling=DynamicNTK(1.5 + i, 100)) for i in range(4)]
    wanted = {
        (i, n): RopeSpec(8, scaling=spec.scaling).words_for(n)[0]
        for i, spec in enumerate(specs)
        for n in range(99, 115)
    }
    start = threading.Barrier(4)
    failures: list[object] = []

    def work() -> None:
        start.wait()
        for (i, n), words in wanted.items():
            if not torch.equal(specs[i].words_for(n)[0], words):
                failures.append((i, n))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- prepared rotations ---------------------------------------------------------------------------


def test_at_gives_words_and_positions() -> None:
    rotation = RopeSpec(8).at(5)
    assert isinstance(rotation, PreparedRotation)
    assert rotation.angles.words.dtype == torch.int64
    assert rotation.angles.words.shape == (1, 1, 1, 4)
    assert rotation.angles.words.flatten().tolist() == [
        oracle.phase(omega).word for omega in oracle.frequencies(10000.0, 8)
    ]
    assert rotation.angles.turns is None
    assert (rotation.ids, rotation.where.offset, rotation.where.add_index) == (None, 5, True)
    assert rotation.device == CPU
    with pytest.raises(dataclasses.FrozenInstanceError):
        rotation.offset = 6  # type: ignore[misc]


def test_turns_are_there_where_a_frequency_passes_half_a_turn() -> None:
    turns = RopeSpec(8, base=1e-3).at().angles.turns
    assert turns is not None
    assert turns.shape == (1, 1, 1, 4)
    assert turns.flatten().tolist() == [
        oracle.phase(omega).turns for omega in oracle.frequencies(1e-3, 8)
    ]


def test_at_goes_where_the_ids_are() -> None:
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    assert RopeSpec(8).at(ids).device.type == "meta"
    assert RopeSpec(8).at(torch.arange(3)).device == CPU
    assert RopeSpec(8).at(None).device == CPU
    moved = RopeSpec(8).at(torch.arange(3), device="meta")
    assert moved.device.type == "meta"
    assert moved.ids is not None
    assert moved.ids.device.type == "meta"


WHERE: dict[str, positions.PositionsLike] = {
    "none": None,
    "offset": 5,
    "negative": -5,
    "ids": torch.tensor([4, 2, 0]),
    "ids per row": torch.tensor([[4, 2, 0], [9, 9, 9]]),
    "fractional": torch.tensor([0.25, 7.3, -1e5]),
    "offset per row": positions.per_row(torch.tensor([3, 8191])),
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_a_prepared_rotation_gives_the_same_bits(where: positions.PositionsLike) -> None:
    spec = RopeSpec(6)
    x = torch.randn(2, 3, 6)
    wanted = rotate(x, spec, where, layout="bsd")
    rotation = spec.at(where)
    assert torch.equal(rotate(x, rotation, layout="bsd"), wanted)
    assert torch.equal(rotate(x, rotation, layout="bsd"), wanted)


# --- cached tensors stay valid -----------------------------------------------------------------------

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "FakeTensorMode": FakeTensorMode,
    "meta device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "default float64": nullcontext,  # the test sets the default dtype
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def tables_of(spec: RopeSpec) -> list[torch.Tensor]:
    """Return every tensor that a spec keeps, found by walking its attributes."""
    found: list[torch.Tensor] = []

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, (tuple, list)):
            for item in value:
                walk(item)
        elif isinstance(value, (Words, OnDevice)):
            walk(vars(value))

    walk(vars(spec))
    return found


@pytest.mark.parametrize("used_inside", [False, True])
@pytest.mark.parametrize("base", [1e4, 1e-3])
@pytest.mark.parametrize("name", MODES)
def test_a_spec_made_in_a_mode_works_after_it(name: str, base: float, used_inside: bool) -> None:
    wanted_spec = RopeSpec(10, base=base)
    x, ids = torch.randn(4, 10), torch.tensor([3.5, 0.0, 1e6, -2.25])
    wanted = rotate(x, wanted_spec, ids, layout="sd")
    default = torch.get_default_dtype()
    try:
        if name == "default float64":
            torch.set_default_dtype(torch.float64)
        with MODES[name]():
            spec = RopeSpec(10, base=base)
            if used_inside:
                rotate(torch.ones(4, 10), spec, 7, layout="sd")
                spec.at(3)
    finally:
        torch.set_default_dtype(default)
    assert spec == wanted_spec
    rotation = spec.at(ids)
    for tensor in (rotation.angles.words, *tables_of(spec)):
        assert not isinstance(tensor, FakeTensor)
        assert not tensor.is_inference()
        assert tensor.dtype == torch.int64
    assert rotation.angles.words.device == CPU
    assert torch.equal(rotation.angles.words, wanted_spec.at().angles.words)
    assert torch.equal(rotate(x, spec, ids, layout="sd"), wanted)
    # Autograd can save the spec's tensors, which it cannot do with inference tensors.
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(rotate(leaf, spec, ids, layout="sd").sum(), leaf)
    assert grad.shape == x.shape


@pytest.mark.parametrize("name", MODES)
def test_a_spec_from_outside_used_in_a_mode_stays_as_it_was(name: str) -> None:
    spec = RopeSpec(10)
    with MODES[name]():
        x = torch.ones(4, 10)
        y = rotate(x, spec, 7, layout="sd")
        assert y.device == x.device
        rotate_(x, spec.at(3, device=x.device), layout="sd")
    for tensor in tables_of(spec):
        assert not isinstance(tensor, FakeTensor)
        assert not tensor.is_inference()
    assert torch.equal(spec.at().angles.words, RopeSpec(10).at().angles.words)


def test_a_table_is_kept_per_device() -> None:
    spec = RopeSpec(8)
    assert spec.at(1).angles.words is spec.at(2).angles.words
    assert spec.at(1, device="meta").angles.words is spec.at(2, device="meta").angles.words
    assert spec.at(1, device="meta").device.type == "meta"
    assert spec.at(1).device == CPU


def test_words_outside_of_a_fake_mode_are_not_fake_ones_of_it() -> None:
    spec = RopeSpec(8)
    with FakeTensorMode():
        inside = spec.at(1).angles.words
    assert isinstance(inside, FakeTensor)
    assert not isinstance(spec.at(1).angles.words, FakeTensor)


def test_a_cpu_table_survives_a_compiled_first_use() -> None:
    """Tensors that a spec caches while its first use is compiled are real, not fake."""
    spec = RopeSpec(8)

    @torch.compile(fullgraph=True, backend="eager")
    def turn(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, 5, layout="sd")

    x = torch.randn(3, 8)
    assert torch.equal(turn(x), rotate(x, spec, 5, layout="sd"))
    assert not any(isinstance(tensor, FakeTensor) for tensor in tables_of(spec))


def test_one_spec_in_many_threads() -> None:
    x = torch.randn(4, 16)
    wanted = rotate(x, RopeSpec(16, base=777.0), 11, layout="sd")
    wanted_meta = torch.Size([4, 16])
    spec = RopeSpec(16, base=777.0)
    start = threading.Barrier(8)
    failures: list[object] = []

    def work(device: str) -> None:
        start.wait()
        for _ in range(50):
            if device == "meta":
                y = rotate(x.to("meta"), spec, 11, layout="sd")
                if y.shape != wanted_meta or y.device.type != "meta":
                    failures.append(y)
            elif not torch.equal(rotate(x, spec, 11, layout="sd"), wanted):
                failures.append("other bits")

    threads = [threading.Thread(target=work, args=(("cpu", "meta")[i % 2],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_many_specs_made_in_many_threads() -> None:
    """Threads that share the caches of rules and phase words get correct words."""
    bases = [1000.0 + i for i in range(24)]
    wanted = {base: [oracle.phase(w).word for w in oracle.frequencies(base, 8)] for base in bases}
    start = threading.Barrier(4)
    failures: list[float] = []

    def work() -> None:
        start.wait()
        for base in bases:
            if RopeSpec(8, base=base).at().angles.words.flatten().tolist() != wanted[base]:
                failures.append(base)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dims, default",
    [
        ({"head_dim": 7}, ", its default of head_dim - start"),
        ({"head_dim": 8, "rotary_dim": 7}, ""),
    ],
)
def test_odd_dims(dims: dict[str, int], default: str) -> None:
    with refused(ValueError, f"[RopeSpec] rotary_dim must be even but got 7{default}."):
        RopeSpec(**dims)


@pytest.mark.parametrize(
    "rotary_dim, start, got",
    [(10, 0, "[0, 10)"), (4, 6, "[6, 10)"), (4, -2, "[-2, 2)"), (-2, 4, "[4, 2)")],
)
def test_a_slice_outside_the_head(rotary_dim: int, start: int, got: str) -> None:
    rule = "channels [start, start + rotary_dim) must lie in [0, 8) but got"
    with refused(ValueError, f"[RopeSpec] {rule} {got}."):
        RopeSpec(8, rotary_dim=rotary_dim, start=start)


@pytest.mark.parametrize("start", [-1, 9])
def test_a_start_outside_the_head(start: int) -> None:
    with refused(ValueError, f"[RopeSpec] start must lie in [0, 8] but got {start}."):
        RopeSpec(8, start=start)


@pytest.mark.parametrize("base", [0, -1.0, math.nan, math.inf, -math.inf])
def test_a_base_out_of_range(base: float) -> None:
    with refused(
        ValueError,
        f"[RopeSpec] base must be positive and finite, above 1e-18 and below 1e300, but got {base}.",
    ):
        RopeSpec(8, base=base)


def test_a_base_may_be_any_real_number() -> None:
    for base in (Fraction(3, 2), numpy.float32(1.5), 1.5):
        assert RopeSpec(8, base=base) == RopeSpec(8, base=1.5)


@pytest.mark.parametrize("base", [True, "10000", None, 1j, torch.tensor(1e4)])
def test_a_base_that_is_not_a_number(base: object) -> None:
    with refused(TypeError, f"[RopeSpec] base must be a number but got {base!r}."):
        RopeSpec(8, base=base)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["head_dim", "rotary_dim", "start"])
@pytest.mark.parametrize("value", [True, 4.0, "4"])
def test_a_size_that_is_not_an_int(name: str, value: object) -> None:
    sizes: dict[str, object] = {"head_dim": 8, name: value}
    with refused(TypeError, f"[RopeSpec] {name} must be an int but got {value!r}."):
        RopeSpec(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_interleaved_that_is_not_a_bool(value: object) -> None:
    with refused(TypeError, f"[RopeSpec] interleaved must be a bool but got {value!r}."):
        RopeSpec(8, interleaved=value)  # type: ignore[arg-type]


def test_positions_of_another_number_of_axes() -> None:
    rule = (
        "positions must have 1 axis for this spec but got 2; pass axes= to RopeSpec, such as "
        "Axes.blocks(…) for 2 coordinates (positions: int64[2, 1, 9])."
    )
    with refused(ValueError, f"[at] {rule}"):
        RopeSpec(8).at(positions.multi_axis(torch.zeros(2, 9, dtype=torch.int64)))


def test_at_refuses_invalid_positions() -> None:
    with refused(TypeError, "[at] positions must not be a bool but got True."):
        RopeSpec(8).at(True)


def test_sizes_without_channels_are_fine() -> None:
    assert RopeSpec(0).rotary_dim == 0
    assert RopeSpec(5, rotary_dim=0).frequencies().exact == ()


def test_positions_of_too_few_axes() -> None:
    rule = (
        "positions must have 3 axes for this spec but got 1; call positions.multi_axis with ids "
        "(3, tokens) or (3, rows, tokens), or positions.text(…, axes=3) if all coordinates of a "
        "token are equal (positions: int64[1, 9])."
    )
    with refused(ValueError, f"[at] {rule}"):
        RopeSpec(12, axes=Axes.sections((2, 2, 2))).at(torch.zeros(9, dtype=torch.int64))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "scaling that is not a rule": (
        lambda: RopeSpec(8, scaling={"rope_type": "yarn"}),  # type: ignore[arg-type]
        TypeError,
        "[RopeSpec] scaling must be a rule of tightrope.frequencies but got {'rope_type': 'yarn'}.",
    ),
    "scaling that is a class": (
        lambda: RopeSpec(8, scaling=Linear),  # type: ignore[arg-type]
        TypeError,
        f"[RopeSpec] scaling must be a rule of tightrope.frequencies but got {Linear!r}.",
    ),
    "scaling for other pairs": (
        lambda: RopeSpec(8, scaling=Given((1.0,))),
        ValueError,
        "[Given] inv_freq must have one number per pair, 4, but got 1.",
    ),
    "axes that are a number": (
        lambda: RopeSpec(8, axes=2),  # type: ignore[arg-type]
        TypeError,
        "[RopeSpec] axes must be an Axes but got 2.",
    ),
    "axes of other pairs": (
        lambda: RopeSpec(8, axes=Axes.blocks((1, 1))),
        ValueError,
        "[RopeSpec] axes must have one entry for each of the 4 pairs that rotate but got 2; rotary_dim=4 would fit.",
    ),
    "axes twice": (
        lambda: RopeSpec(
            4, axes=Axes.blocks((1, 1)), scaling=Given((((1.0, 0.1),), ((0.5, 9.0),)))
        ),
        ValueError,
        "[RopeSpec] axes must be None if the given frequencies have axes of their own but got "
        "Axes.blocks((1, 1)).",
    ),
    "another version": (
        lambda: RopeSpec.from_dict({"version": 2, "head_dim": 8}),
        ValueError,
        "[from_dict] version must be 1 but got 2.",
    ),
    "no version": (
        lambda: RopeSpec.from_dict({"head_dim": 8}),
        ValueError,
        "[from_dict] version must be 1 but got None; pass the result of to_dict.",
    ),
    "an unknown key": (
        lambda: RopeSpec.from_dict({"version": 1, "head_dim": 8, "rope_theta": 1e4}),
        ValueError,
        "[from_dict] a spec must have only the keys head_dim, base, rotary_dim, start, interleaved, "
        "scaling, axes but got rope_theta.",
    ),
    "a missing key": (
        lambda: RopeSpec.from_dict({"version": 1}),
        ValueError,
        "[from_dict] a spec must have all required keys but lacks head_dim.",
    ),
    "axes with an unknown key": (
        lambda: RopeSpec.from_dict(
            {"version": 1, "head_dim": 2, "axes": {"count": 1, "pairs": [[0, 0, 2]], "names": "t"}}
        ),
        ValueError,
        "[from_dict] axes must have only the keys count, pairs but got names.",
    ),
    "axes with a missing key": (
        lambda: RopeSpec.from_dict({"version": 1, "head_dim": 2, "axes": {}}),
        ValueError,
        "[from_dict] axes must have all required keys but lacks count, pairs.",
    ),
    "not a dictionary": (
        lambda: RopeSpec.from_dict("{}"),  # type: ignore[arg-type]
        TypeError,
        "[from_dict] a spec must be a dictionary but got '{}'.",
    ),
    "scaling that is not a dictionary": (
        lambda: RopeSpec.from_dict({"version": 1, "head_dim": 2, "scaling": "yarn"}),
        TypeError,
        "[from_dict] scaling must be a dictionary but got 'yarn'.",
    ),
    "a negative length": (
        lambda: RULED["dynamic"].words_for(-1),
        ValueError,
        "[seq_len] a length must not be negative but got -1.",
    ),
    "a length of another type": (
        lambda: RULED["dynamic"].frequencies(5.0),  # type: ignore[arg-type]
        TypeError,
        "[seq_len] a length must be an int, or one per row, but got 5.0.",
    ),
    "a length that is a bool": (
        lambda: RULED["dynamic"].words_for([True]),
        TypeError,
        "[seq_len] a length must be an int, or one per row, but got True.",
    ),
    "lengths of another type": (
        lambda: RULED["dynamic"].words_for(torch.ones(2)),
        TypeError,
        "[seq_len] lengths must be int32, int64 or float64 (seq_len: float32[2]).",
    ),
    "lengths of another shape": (
        lambda: RULED["dynamic"].words_for(torch.ones(2, 2, dtype=torch.int64)),
        ValueError,
        "[seq_len] lengths must have shape (rows,) (seq_len: int64[2, 2]).",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors(case: str) -> None:
    make, kind, text = REFUSED[case]
    with refused(kind, text):
        make()


def test_a_copy_of_a_prepared_rotation_rotates_as_the_original() -> None:
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 4))
    ids = torch.tensor([[0, 1, 2], [5, 6, 7]])
    x, rope = torch.randn(2, 1, 3, 8), spec.at(ids)
    want = rotate(x, rope)
    for copied in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert torch.equal(rotate(x, copied), want)
        copied.ids[0] = torch.tensor([[1, 2, 3], [6, 7, 8]])
        assert torch.equal(rotate(x, copied), rotate(x, spec, copied.ids[0]))
        assert torch.equal(rotate(x, rope), want)


def test_a_replaced_prepared_rotation_keeps_nothing() -> None:
    rope, x = RopeSpec(8).at(3), torch.randn(1, 1, 3, 8)
    rotate(x, rope)
    moved = dataclasses.replace(rope, where=positions.as_positions(7))
    assert torch.equal(rotate(x, moved), rotate(x, RopeSpec(8), 7))


def test_what_a_prepared_rotation_takes_does_not_depend_on_its_past() -> None:
    rope, x = RopeSpec(8).at(3), torch.randn(1, 1, 3, 8)
    for _ in range(2):
        with pytest.raises(TypeError, match="inverse must be a bool"):
            rotate(x, rope, inverse=0)
        with pytest.raises(ValueError, match="layout must be one of"):
            rotate(x, rope, layout=["bhsd"])
        with pytest.raises(ValueError, match="x must have 4 dimensions"):
            rotate(torch.tensor(1.0), rope)
        rotate(x, rope)


def test_a_cast_of_the_ids_of_a_rotation_is_refused() -> None:
    """FSDP2 casts the floating tensors of dataclasses that are inputs of a module with mixed precision."""
    from torch.distributed.utils import _apply_to_tensors

    def cast(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: t.to(dtype) if t.is_floating_point() else t

    fractional = RopeSpec(8).at(torch.tensor([0.5, 1.5, 2.5]))
    x = torch.randn(1, 2, 3, 8)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        message = (
            "[Positions] ids must be int32, int64, float32 or float64; a wrapper of the model, such "
            f"as one for mixed precision, may have cast them (ids: {name}[1, 1, 3])."
        )
        with refused(TypeError, message):
            _apply_to_tensors(cast(dtype), fractional)
    whole = RopeSpec(8).at(torch.tensor([0, 1, 2]))
    for rope, dtype in ((whole, torch.bfloat16), (fractional, torch.float32)):
        again: Any = _apply_to_tensors(cast(dtype), rope)
        assert torch.equal(rotate(x, again), rotate(x, rope))
