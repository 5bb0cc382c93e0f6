"""The phase words of specs with every rule and assignment of axes, for lengths that are read or not."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import in_threads
from tests.support.kept_tensors import tables_of
from tests.support.tolerances import assert_same_bits, dynamic_drift, value
from tightrope import RopeSpec, angles
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

RULED: dict[str, RopeSpec] = {
    "plain": RopeSpec(12, base=5e5, rotary_dim=8, start=2, interleaved=True),
    "linear": RopeSpec(8, scaling=Linear(3.3)),
    "ntk": RopeSpec(8, scaling=NTK(8.0)),
    "dynamic": RopeSpec(8, scaling=DynamicNTK(2.0, 100)),
    "yarn": RopeSpec(8, scaling=YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)),
    "longrope": RopeSpec(8, scaling=LongRoPE((1.0,) * 4, (1.0, 1.1, 2.0, 32.0), 100, factor=32.0)),
    "llama3": RopeSpec(8, base=5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    "proportional": RopeSpec(8, scaling=Proportional(0.5)),
    "given": RopeSpec(8, scaling=Given((1.0, 1 / 3, -0.1, 7.0))),
    "given per head": RopeSpec(4, scaling=Given(((1.0, 0.1), (0.5, 9.0), (1e-3, 1e-5)))),
    "given per axis": RopeSpec(4, scaling=Given((((1.0, 0.1),), ((0.5, 9.0),)))),
    "given per axis and head": RopeSpec(
        4, scaling=Given((((1.0, 0.1), (2.0, 0.2)), ((0.5, 9.0), (-1.0, 0.0))))
    ),
    "sections": RopeSpec(12, axes=Axes.sections((1, 2, 3))),
    "blocks": RopeSpec(12, base=100.0, axes=Axes.blocks((4, 2))),
    "blocks, slice": RopeSpec(12, base=100.0, rotary_dim=8, start=1, axes=Axes.blocks((1, 3))),
    "strided": RopeSpec(16, axes=Axes.strided(2, 8)),
    "scaled sections": RopeSpec(12, axes=Axes.sections((2, 2, 2), True), scaling=YaRN(4.0, 4096)),
    "dynamic blocks": RopeSpec(16, axes=Axes.blocks((2, 6)), scaling=DynamicNTK(2.0, 100)),
    "longrope sections": RopeSpec(
        8,
        axes=Axes.sections((3, 1)),
        scaling=LongRoPE((1.0,) * 4, (1.0, 1.1, 2.0, 32.0), 100, attention_factor=1.5),
    ),
    "fast sections": RopeSpec(8, base=1e-3, axes=Axes.sections((2, 2))),
    "heads on sections": RopeSpec(
        8, axes=Axes.sections((1, 3)), scaling=Given(((1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 0.4)))
    ),
    "no pairs": RopeSpec(8, rotary_dim=0, axes=Axes(3, ())),
}


def rows_of(spec: RopeSpec, dim: int, length: int | None) -> list[list[Any]]:
    """Return the papers' frequencies of a spec's rule for ``dim`` channels, [axes · heads][pairs]."""
    if not isinstance(spec.scaling, Given):
        return [truth.of(spec.scaling, dim, spec.base, length)]
    flat = spec.scaling.frequencies(dim, spec.base).inv_freq.flatten().tolist()
    omegas = [oracle.MP.mpf(omega) for omega in flat]
    return [omegas[at : at + dim // 2] for at in range(0, len(omegas), dim // 2)]


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
    yarn, sections = RopeSpec(8, scaling=YaRN(4.0, 4096)), RULED["longrope sections"]
    for spec, wanted in (
        (RopeSpec(8), 1.0),
        (yarn, float(truth.yarn_attention(4.0))),
        (sections, 1.5),
    ):
        for length in (None, 10**6, [1, 2]):
            assert spec.attention_scaling(length) == wanted
        assert spec.frequencies(5000).attention_scaling == wanted
    assert RULED["dynamic"].attention_scaling([5, 5000]) == 1.0


def test_attention_scaling_by_length() -> None:
    rule = LongRoPE((1.0,) * 4, (2.0,) * 4, 100, short_mscale=1.25, long_mscale=1.5)
    spec = RopeSpec(8, scaling=rule)
    assert spec.attention_scaling() == spec.attention_scaling(100) == 1.25
    assert spec.attention_scaling(101) == 1.5
    assert spec.attention_scaling([101, 5000]) == 1.5
    assert spec.attention_scaling(torch.tensor([7, 100])) == 1.25
    assert spec.attention_scaling([]) == 1.25
    for lengths in ([100, 101], torch.tensor([101], device="meta")):
        with pytest.raises(
            NotImplementedError, match=r"one attention scaling but got 1\.25, 1\.5; "
        ):
            spec.attention_scaling(lengths)


LENGTHS = {
    "growing": [*range(95, 215)],
    "growing, then another sequence": [*range(150, 160), *range(120, 190), *range(130, 140)],
    "growing by two": [*range(101, 180, 2)],
    "back into a block": [*range(150, 190), 160, 159, 400, *range(401, 440), 170],
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    "spec", [RULED["dynamic"], RopeSpec(6, base=3.0, scaling=DynamicNTK(1.5, 90))]
)
def test_words_of_a_growing_sequence_are_those_of_each_length(name: str, spec: RopeSpec) -> None:
    grows, device = pickle.loads(pickle.dumps(spec)).words, torch.device("cpu")
    for length in LENGTHS[name]:
        alone = pickle.loads(pickle.dumps(spec)).words
        for found, wanted in zip(grows.of((length,), device), alone.of((length,), device)):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                assert_same_bits(found, wanted)
                assert found.is_contiguous()
    assert (grows._ahead is None) == (name == "growing by two")


def test_words_of_rules_in_many_threads() -> None:
    specs = [RopeSpec(8, scaling=DynamicNTK(1.5 + i, 100)) for i in range(4)]
    wanted = [
        [RopeSpec(8, scaling=spec.scaling).words_for(n)[0] for n in range(99, 115)]
        for spec in specs
    ]

    def work() -> None:
        for spec, words in zip(specs, wanted, strict=True):
            for n, one in enumerate(words, 99):
                assert torch.equal(spec.words_for(n)[0], one)

    in_threads(*[work] * 4)
