"""The phase words of specs with every rule and assignment of axes, for lengths that are read or not."""

import copy
import gc
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import in_threads
from tests.support.kept_tensors import tables_of
from tests.support.tolerances import assert_same_bits, dynamic_drift, value
from tightrope import RopeSpec, angles
from tightrope.axes import Axes
from tightrope.frequencies import (
    DynamicNTK,
    Given,
    LongRoPE,
    YaRN,
)

# Specs with every rule, as dictionaries of format 1.
ROWS = Path(__file__).with_name("specs.jsonl").read_text(encoding="utf-8").splitlines()
RULED = {row["name"]: RopeSpec.from_dict(row["spec"]) for row in map(json.loads, ROWS)}
every_spec = pytest.mark.parametrize("name", RULED)


def rows_of(spec: RopeSpec, dim: int, length: int | None) -> list[list[Any]]:
    """Return the papers' frequencies of a spec's rule for ``dim`` channels, [axes · heads][pairs]."""
    if not isinstance(spec.scaling, Given):
        return [truth.of(spec.scaling, dim, spec.base, length)]
    flat = spec.scaling.frequencies(dim, spec.base).inv_freq.flatten().tolist()
    omegas = [oracle.MP.mpf(omega) for omega in flat]
    return [omegas[at : at + dim // 2] for at in range(0, len(omegas), dim // 2)]


def expected(spec: RopeSpec, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact phase words and turns, [axes, 1, heads, pairs]; 0 on axes that do not rotate a pair."""
    rotary_dim, axes, zero = spec.rotary_dim, spec.axes, oracle.MP.mpf(0)
    if axes is None:
        rows = rows_of(spec, rotary_dim, length)
    else:
        own = {dim: rows_of(spec, dim, length) for _, _, dim in axes.pairs}
        rows = [
            [own[dim][head][index] if owner == axis else zero for owner, index, dim in axes.pairs]
            for axis in range(axes.count)
            for head in range(len(next(iter(own.values()), [0])))
        ]
    shape = spec.axis_count, 1, len(rows) // spec.axis_count, rotary_dim // 2, 2
    phases = torch.tensor([[oracle.phase(omega) for omega in row] for row in rows])
    phases = phases.long().reshape(shape)
    return phases[..., 0], phases[..., 1]


def assert_words(spec: RopeSpec, lengths: Sequence[int | None]) -> None:
    """Assert that words are exact; for dynamic NTK beyond its original length, within its bound."""
    words, turns = spec.words_for(lengths[0] if len(lengths) == 1 else lengths)  # type: ignore[arg-type]
    assert words.dtype == torch.int64
    words = words.expand(-1, len(lengths), -1, -1)
    turns = torch.zeros_like(words) if turns is None else turns.expand_as(words)
    for row, length in enumerate(lengths):
        wanted, wanted_turns = expected(spec, length)
        found, turned = words[:, row : row + 1], turns[:, row : row + 1]
        rule = spec.scaling
        if not isinstance(rule, DynamicNTK) or not length or length <= rule.original_max_position:
            assert torch.equal(found, wanted)
            assert torch.equal(turned, wanted_turns)
            continue
        relative = dynamic_drift(rule.factor, rule.original_max_position, length)
        whole = wanted.double() + wanted_turns.double() * 2.0**64
        bound = (relative + value("word of a float64")) * whole.abs() + 1
        gap = (found - wanted).double() + (turned - wanted_turns).double() * 2.0**64
        assert bool((gap.abs() <= bound).all())


@every_spec
def test_words(name: str) -> None:
    spec = RULED[name]
    for length in (None, 100, 101, 5000):
        assert_words(spec, [length])
        words, turns = spec.words_for(length)
        # frequencies() and phase words agree for each pair.
        inv_freq = spec.frequencies(length).inv_freq
        back = angles.inv_freq(words, turns, torch.float64)[:, 0]
        back = back if spec.axes is None else back.sum(0)
        torch.testing.assert_close(back.reshape(inv_freq.shape), inv_freq)


LONGEST = 2**31
FACTORS = st.sampled_from([1.0, 2.0, 8.0]) | st.floats(1e-6, 1e6)
LIMITS = st.sampled_from([1, 2048, 4096, 8192]) | st.integers(1, LONGEST)
BASES = st.sampled_from([1e4, 5e5, 1e6]) | st.floats(0.5, 1e12) | st.floats(1.0, 1.0 + 2.0**-40)
WIDTHS = st.sampled_from([2, 4, 6, 64, 96, 128, 256]) | st.integers(1, 100).map(lambda n: 2 * n)
# Lengths, or numbers of tokens above the original length.
BEYOND = st.integers(0, LONGEST) | st.integers(4090, 9000) | st.integers(0, 3)


@settings(deadline=None, max_examples=300)
@given(
    rule=st.builds(DynamicNTK, FACTORS, LIMITS),
    base=BASES,
    dim=WIDTHS,
    lengths=st.lists(BEYOND, min_size=1, max_size=4),
    above=st.booleans(),
)
def test_words_of_any_lengths_are_within_the_bound(
    rule: DynamicNTK, base: float, dim: int, lengths: list[int], above: bool
) -> None:
    more = rule.original_max_position if above else 0
    assert_words(RopeSpec(dim, base=base, scaling=rule), [more + length for length in lengths])


# --- rows -----------------------------------------------------------------------------------------


@every_spec
def test_rows_get_what_they_would_get_alone(name: str) -> None:
    spec = RULED[name]
    lengths = [5000, 3, 100, 101, 5000, 0, 2**31 - 1]
    wanted = [spec.words_for(length) for length in lengths]
    for rows in (lengths, torch.tensor(lengths), torch.tensor(lengths).double() - 0.5):
        words, turns = spec.words_for(rows)
        assert words.shape[1] == (len(lengths) if spec.by_length else 1)
        turns = torch.zeros_like(words) if turns is None else turns
        for row, (one, one_turns) in enumerate(wanted):
            own = slice(row, row + 1) if spec.by_length else slice(None)
            assert torch.equal(words[:, own], one)
            one_turns = torch.zeros_like(one) if one_turns is None else one_turns
            assert torch.equal(turns[:, own], one_turns)


def test_rows_of_one_regime_share_one_row() -> None:
    spec = RULED["longrope"]
    rows = {(101, 5000): 1, (1, 100): 1, (): 1, (1, 101): 2}
    for lengths, count in rows.items():
        assert spec.words_for(lengths)[0].shape == (1, count, 1, 4)


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
    grows = pickle.loads(pickle.dumps(spec))
    for length in LENGTHS[name]:
        alone = pickle.loads(pickle.dumps(spec)).words_for(length)
        for found, wanted in zip(grows.words_for(length), alone, strict=True):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                assert_same_bits(found, wanted)
                assert found.is_contiguous()
    assert len(tables_of(grows)) < 10  # lengths do not pile up


def test_words_in_many_threads() -> None:
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


def test_equal_specs_share_their_tensors_while_one_lives() -> None:
    specs = [RopeSpec(4096, base=base) for base in (12345.0, 12345.0, 12346.0)]
    words = [spec.at(1).angles.words for spec in [*specs, copy.deepcopy(specs[0])]]
    assert words[0] is words[1] is words[3] is not words[2]
    # Other channels have the same angles.
    moved = RopeSpec(4098, base=12345.0, rotary_dim=4096, start=2)
    assert moved.at(1).angles.words is words[0]
    del specs, words, moved
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (1, 1, 1, 2048)]
    assert not alive


# --- lengths that are not read --------------------------------------------------------------------


def unread(spec: RopeSpec, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return phase words from a compiled function, which must not read the tensor of lengths."""
    torch.compiler.reset()  # one function, many specs

    @torch.compile(fullgraph=True, backend="eager")
    def make(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return spec.words_for(lengths)

    return make(lengths)


BY_LENGTH = [name for name, spec in RULED.items() if spec.by_length]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
@pytest.mark.parametrize("name", [*BY_LENGTH, "linear", "sections"])
def test_lengths_that_are_not_read(name: str, dtype: torch.dtype) -> None:
    lengths = torch.tensor([5000, -3, 100, 101, 2**31 - 1, 0], dtype=dtype)
    for got, wanted in zip(unread(RULED[name], lengths), RULED[name].words_for(lengths)):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert_same_bits(got, wanted)


def test_lengths_on_another_device_are_not_read() -> None:
    lengths = torch.zeros(3, dtype=torch.int64, device="meta")
    for name in BY_LENGTH:
        words, _ = RULED[name].words_for(lengths, "meta")
        assert words.is_meta
        assert words.shape == (RULED[name].axis_count, 3, 1, RULED[name].rotary_dim // 2)
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
    def words(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return make().words_for()[0] + 0, make().words_for(lengths)[0] + 0

    lengths = torch.tensor([7, 150, 90])
    assert_same_bits(words(lengths), (make().words_for()[0], unread(make(), lengths)[0]))


# --- attention scaling ----------------------------------------------------------------------------


def test_attention_scaling() -> None:
    for spec, wanted in (
        (RopeSpec(8), 1.0),
        (RopeSpec(8, scaling=YaRN(4.0, 4096)), float(truth.yarn_attention(4.0))),
        (RULED["longrope sections"], 1.5),
        (RULED["dynamic"], 1.0),
    ):
        for length in (None, 10**6, [1, 2], [5, 5000]):
            assert spec.attention_scaling(length) == wanted
        assert spec.frequencies(5000).attention_scaling == wanted
    rule = LongRoPE((1.0,) * 4, (2.0,) * 4, 100, short_mscale=1.25, long_mscale=1.5)
    spec = RopeSpec(8, scaling=rule)
    for short in (None, 100, torch.tensor([7, 100]), []):
        assert spec.attention_scaling(short) == 1.25
    for long in (101, [101, 5000]):
        assert spec.attention_scaling(long) == 1.5
    for length in ([100, 101], torch.tensor([101], device="meta")):
        with pytest.raises(
            NotImplementedError, match=r"one attention scaling but got 1\.25, 1\.5; "
        ):
            spec.attention_scaling(length)
