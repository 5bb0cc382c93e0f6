"""The phase words of specs with every rule and assignment of axes, for lengths that are read or not.

Lengths are not read while compiling, while exporting, or on a device.
"""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import oracle, oracle_frequencies as truth
from tests.support.by_length import LONG, RULES, SHORT, UNEQUAL, rule_of, spec_of
from tests.support.helpers import in_threads, noise
from tests.support.kept_tensors import tensors_of
from tests.support.matrix import every_pair
from tests.support.tolerances import assert_rotations, assert_same_bits, dynamic_drift, value
from tests.support.written_calls import rows_of
from tightrope import RopeSpec, angles, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, LongRoPE, YaRN
from tightrope.functional import rotate

# Specs with every rule, as dictionaries of format 1.
ROWS = rows_of(Path(__file__).with_name("specs.jsonl"))
RULED = {row["name"]: RopeSpec.from_dict(row["spec"]) for row in ROWS}
every_spec = pytest.mark.parametrize("name", RULED)


def omegas_of(spec: RopeSpec, dim: int, length: int | None) -> list[list[Any]]:
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
        rows = omegas_of(spec, rotary_dim, length)
    else:
        own = {dim: omegas_of(spec, dim, length) for _, _, dim in axes.pairs}
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


@settings(deadline=None, max_examples=150)
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
    assert len(tensors_of(grows)) < 10  # lengths do not pile up


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


BY_LENGTH = [name for name, spec in RULED.items() if spec.by_length]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*BY_LENGTH, "linear", "sections"])
def test_lengths_that_are_not_read(name: str) -> None:
    """A compiled function must not read a tensor of them."""
    spec, lengths = RULED[name], torch.tensor([5000, -3, 100, 101, 2**31 - 1, 0])
    torch.compiler.reset()  # one function, many specs
    unread = torch.compile(lambda n: spec.words_for(n), fullgraph=True, backend="eager")
    for got, wanted in zip(unread(lengths), spec.words_for(lengths)):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert_same_bits(got, wanted)


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
    assert_same_bits(words(lengths), (make().words_for()[0], make().words_for(lengths)[0]))


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


# --- rotations by lengths that are not read -------------------------------------------------------

OF_INTS = "offset", "seq_len", "tokens"
UNREAD = (*OF_INTS, "a tensor of lengths", "offsets per row", "ids per row")


def steps(kind: str) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """Yield x, positions and seq_len of calls with lengths below and above 100."""
    for number in (3, 4, 94, 95, 96, 97, 250, 1000):
        tokens = {"tokens": number, "seq_len": 5, "a tensor of lengths": 5}.get(kind, 1)
        rows = torch.tensor([number, 5])
        where, seq_len = {
            "offset": (number, None),
            "seq_len": (-2, number),
            "a tensor of lengths": (-2, rows),
            "offsets per row": (positions.per_row(rows), None),
            "ids per row": (rows[:, None], None),
            "tokens": (0, None),
        }[kind]
        yield noise(2, 1, tokens, 12, dtype=torch.float32), where, seq_len


def assert_one_turn(got: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor) -> None:
    """Assert closeness: a graph computes phase words in float64, with an error below float32's resolution."""
    assert_rotations(got, wanted, oracle.pair_lengths(x, 8, start=2), 2, 1000.0)


@pytest.mark.one_in(4)
@every_pair(
    lambda case: (
        case.get("rule") != "unequal"
        or (case.get("kind") in (None, *OF_INTS) and case.get("dynamic", True))
    ),
    rule=(*RULES, "unequal"),
    dynamic=(True, None),
    kind=UNREAD,
)
def test_one_graph_for_all_lengths(rule: str, dynamic: bool | None, kind: str) -> None:
    """Or one for short and one for long rows, where their factors differ."""
    unequal = LongRoPE(SHORT, LONG, 100, short_mscale=1.25, long_mscale=1.5)
    spec = spec_of(unequal if rule == "unequal" else rule_of(rule, 100, 4.0))
    by_row = "row" in kind or "tensor" in kind

    def turn(x: torch.Tensor, where: Any, seq_len: Any) -> torch.Tensor:
        return rotate(x, spec.at(where, seq_len=seq_len))

    torch.compiler.reset()
    graphs = CompileCounterWithBackend("eager")
    run = torch.compile(turn, fullgraph=True, backend=graphs, dynamic=dynamic)
    for call in steps(kind):
        got, wanted = run(*call), turn(*call)
        if rule == "dynamic":
            assert_one_turn(got, wanted, call[0])
        else:
            assert_same_bits(got, wanted)
    # Unless dynamic=True, the first graph is for the first int or size only, and the second for all others.
    assert graphs.frame_count == (1 if (dynamic and rule != "unequal") or by_row else 2)


@pytest.mark.one_in(2)
@every_pair(
    rule=tuple(RULES), kind=("offset", "an offset that is read", "seq_len"), strict=(False, True)
)
def test_an_exported_program_takes_all_lengths(rule: str, kind: str, strict: bool) -> None:
    """Eager code refuses several tokens after position 0 without their length; a program cannot see them."""
    spec, read = spec_of(rule_of(rule, 100, 4.0)), kind == "an offset that is read"

    class Turn(torch.nn.Module):
        def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
            if kind == "seq_len":
                return rotate(x, spec.at(-2, seq_len=number))
            return rotate(x, spec, number.item() if read else number)

    def number(value: int) -> Any:
        return torch.tensor(value) if read else value

    dynamic = torch.export.Dim.DYNAMIC
    shapes = {"x": {2: dynamic}, "number": None if read else dynamic}
    call = (noise(2, 1, 5, 12, dtype=torch.float32), number(7))
    program = torch.export.export(Turn(), call, dynamic_shapes=shapes, strict=strict).module()
    for tokens, start in ((5, 7), (5, 500), (200, 300)) if kind != "seq_len" else ((5, 300),):
        x = noise(2, 1, tokens, 12, dtype=torch.float32)
        where, end = (-2, start) if kind == "seq_len" else (start, start + tokens)
        assert_one_turn(program(x, number(start)), rotate(x, spec.at(where, seq_len=end)), x)


@pytest.mark.parametrize("rule", [*RULES, "unequal"])
def test_lengths_on_a_device_are_not_read(rule: str) -> None:
    spec = spec_of(UNEQUAL if rule == "unequal" else rule)
    with torch.device("meta"):
        x, ids = torch.empty(2, 1, 3, 12), torch.empty(2, 3, dtype=torch.int64)
    for where, seq_len in ((ids, None), (positions.per_row(ids[:, 0]), None), (0, ids[:, 0])):
        if rule != "unequal":
            assert rotate(x, spec.at(where, device=x.device, seq_len=seq_len)).shape == x.shape
            continue
        with pytest.raises(NotImplementedError, match="a length that is traced or on a device"):
            rotate(x, spec.at(where, device=x.device, seq_len=seq_len))
    assert rotate(x, spec.at(ids, device=x.device, seq_len=6000)).shape == x.shape
    assert rotate(x[:, :, :1], spec, 5000).shape == (2, 1, 1, 12)
    if rule != "unequal":
        with FakeTensorMode():
            y = rotate(torch.empty(2, 1, 3, 12), spec, torch.empty(2, 3, dtype=torch.int64))
            assert y.shape == x.shape
