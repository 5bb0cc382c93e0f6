"""Frequency rules that depend on the length: each row of a batch is rotated as if it were alone."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import refused
from tests.support.matrix import every_backend
from tests.support.tolerances import (
    Result,
    assert_near,
    assert_rotated,
    assert_rotations,
    assert_same_bits,
    dynamic_drift,
)
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, Linear, LongRoPE, Rule, YaRN
from tightrope.functional import (
    apply_rotary_pos_emb,
    polar_scan,
    rerotate,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)

TRAINED = 4096
SHORT, LONG = (1.0, 1.05, 1.1, 2.0), (1.0, 3.0, 17.5, 64.0)
RULES: dict[str, Rule] = {
    "dynamic": DynamicNTK(2.0, TRAINED),
    "longrope": LongRoPE(SHORT, LONG, TRAINED, factor=32.0),
}
# Unequal mscales, like PhiMoE's.
UNEQUAL = LongRoPE(SHORT, LONG, TRAINED, short_mscale=1.25, long_mscale=1.5)

every_rule = pytest.mark.parametrize("rule", RULES)


def spec_of(rule: str | Rule, interleaved: bool = False) -> RopeSpec:
    """Return a spec of 12 channels; the 8 in the middle rotate."""
    made = RULES[rule] if isinstance(rule, str) else rule
    return RopeSpec(12, 10000.0, 8, 2, interleaved, made)


def omegas(rule: Rule | None, length: int) -> list[Any]:
    if isinstance(rule, DynamicNTK):
        return truth.dynamic_ntk(8, 10000.0, rule.factor, rule.original_max_position, length)
    if isinstance(rule, YaRN):
        return truth.yarn(8, 10000.0, rule.factor, rule.original_max_position)
    if isinstance(rule, LongRoPE):
        trained = rule.original_max_position
        return truth.longrope(8, 10000.0, rule.short_factor, rule.long_factor, trained, length)
    return truth.plain(8, 10000.0)


def amplitude(rule: Rule | None, length: int) -> float:
    if isinstance(rule, YaRN):
        return float(truth.yarn_attention(rule.factor, rule.attention_factor))
    if not isinstance(rule, LongRoPE):
        return 1.0
    if rule.factor is not None:
        return float(truth.longrope_attention(rule.factor, rule.original_max_position))
    mscale = rule.short_mscale if length <= rule.original_max_position else rule.long_mscale
    assert mscale is not None
    return mscale


def exact(
    x: torch.Tensor, spec: RopeSpec, ids: list[float], length: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one row rotated by the papers' formulas in float64, and the lengths of its rotated pairs."""
    place = {"start": spec.start, "interleaved": spec.interleaved}
    layout = "bhsd"[-x.dim() :]
    y = oracle.rotate(x, ids, omegas(spec.scaling, length), layout=layout, **place, **options)
    lengths = oracle.pair_lengths(x, 8, **place)
    scale = amplitude(spec.scaling, length)
    scale = 1 / scale if options.get("inverse") else scale
    return torch.where(lengths > 0, y * scale, y), lengths * scale


def assert_exact(
    got: torch.Tensor,
    x: torch.Tensor,
    spec: RopeSpec,
    ids: list[float],
    length: int,
    **options: Any,
) -> None:
    wanted, lengths = exact(x, spec, ids, length, **options)
    reach = max(map(abs, ids), default=0.0)
    assert_rotated([Result(got, wanted, lengths, reach, drift(spec.scaling, length))])


def drift(rule: Rule | None, length: int) -> float:
    if not isinstance(rule, DynamicNTK):
        return 0.0
    return dynamic_drift(rule.factor, rule.original_max_position, length)


# --- rows of 3,000 and 6,000 tokens ---------------------------------------------------------------

LENGTHS = (3000, 6000)
OWN = torch.tensor(LENGTHS)
TAIL = 3
LAST = OWN[:, None] - TAIL + torch.arange(TAIL)  # the last positions of each row

# Ways to give the positions of a batch, as (positions, seq_len). In all of them the last TAIL tokens of
# each row are at its last positions.
WAYS: dict[str, Callable[[], tuple[positions.PositionsLike, object]]] = {
    "ids per row": lambda: (LAST, None),
    "ids of 32 bits": lambda: (LAST.int(), None),
    "floating ids": lambda: (LAST.float(), None),
    "offsets per row": lambda: (positions.per_row(OWN - TAIL), None),
    "floating offsets": lambda: (positions.per_row((OWN - TAIL).double()), None),
    "padded by lengths": lambda: (positions.per_row(OWN - 6000), None),
    "padded by a mask": lambda: (
        positions.left_padded(torch.arange(6000) >= 6000 - OWN[:, None]),
        None,
    ),
    "padded with ones": lambda: (
        (torch.arange(6000) - (6000 - OWN[:, None])).masked_fill(
            torch.arange(6000) < 6000 - OWN[:, None], 1
        ),
        None,
    ),
    "a list": lambda: (positions.explicit(positions.per_row(OWN - TAIL), TAIL), [3000, 6000]),
    "a tensor": lambda: (positions.per_row(OWN - TAIL), OWN),
    "a tensor of 32 bits": lambda: (positions.per_row(OWN - TAIL), OWN.int()),
    "a fractional tensor": lambda: (positions.per_row(OWN - TAIL), OWN.double() - 0.5),
    "numbers of numpy": lambda: (LAST, list(numpy.array(LENGTHS))),
    "an iterator": lambda: (LAST, iter(LENGTHS)),
}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("way", WAYS)
@every_rule
def test_each_row_gets_what_it_would_get_alone(rule: str, way: str, prepared: bool) -> None:
    spec = spec_of(rule)
    where, seq_len = WAYS[way]()
    tokens = 6000 if "padded" in way else TAIL
    x = torch.randn(2, 2, tokens, 12, dtype=torch.float64)
    if prepared:
        y = rotate(x, spec.at(where, seq_len=seq_len))  # type: ignore[arg-type]
    else:
        y = rotate(x, spec, where, seq_len=seq_len)  # type: ignore[arg-type]
    fresh = spec_of(rule)  # no earlier calls
    for row, length in enumerate(LENGTHS):
        tail = x[row : row + 1, :, -TAIL:]
        assert_same_bits(y[row : row + 1, :, -TAIL:], rotate(tail, fresh, length - TAIL))
        assert_exact(y[row, :, -TAIL:], tail[0], spec, LAST[row].tolist(), length)


@every_rule
def test_earlier_calls_change_nothing(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 5, 12)
    first = {offset: rotate(x, spec_of(rule), offset) for offset in (2995, 5995, 4091, 4092, 0)}
    for offset in (5995, 2995, 0, 4092, 4091, 5995, 2995):
        assert_same_bits(rotate(x, spec, offset), first[offset])
    rotation = spec.at(2995)
    for tokens in (5, 3000, 1, 5):  # 3,000 tokens end at 5,995
        y = torch.randn(1, 1, tokens, 12)
        assert_same_bits(rotate(y, rotation), rotate(y, spec_of(rule), 2995))


@every_rule
def test_all_four_functions_and_every_layout(rule: str) -> None:
    spec, where = spec_of(rule), positions.per_row(OWN - TAIL)
    q, k = torch.randn(2, 4, TAIL, 12), torch.randn(2, 2, TAIL, 12)
    wanted = rotate(q, spec, where), rotate(k, spec, where)
    for made in (
        rotate_qk(q, k, spec, where, seq_len=OWN),
        rotate_qk_(q.clone(), k.clone(), spec, where, seq_len=[3000, 6000]),
        (rotate_(q.clone(), spec, where), rotate_(k.clone(), spec, where, seq_len=OWN)),
        (rotate(q, spec, where, out=torch.empty_like(q)), wanted[1]),
        rotate_qk(q, k, spec.at(where)),
    ):
        for got, want in zip(made, wanted, strict=True):
            assert_same_bits(got, want)
    for layout, dims in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))):
        y = rotate(q.permute(dims), spec, where, layout=layout)
        assert_same_bits(y, wanted[0].permute(dims))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 3 * TRAINED), min_size=1, max_size=5),
    rule=st.sampled_from(sorted(RULES)),
    interleaved=st.booleans(),
    width=st.sampled_from([torch.int64, torch.int32, torch.float64]),
)
def test_any_rows(lengths: list[int], rule: str, interleaved: bool, width: torch.dtype) -> None:
    spec = spec_of(rule, interleaved)
    x = torch.randn(len(lengths), 1, 2, 12)
    own = torch.tensor(lengths)
    by_ids = rotate(x, spec, (own[:, None] - 2 + torch.arange(2)).to(width))
    by_offset = rotate(x, spec, positions.per_row((own - 2).to(width)))
    stated = rotate(x, spec, positions.per_row(own - 2), seq_len=lengths)
    for row, length in enumerate(lengths):
        alone = rotate(x[row : row + 1], spec_of(rule, interleaved), length - 2, seq_len=length)
        for batch in (by_ids, by_offset, stated):
            assert_same_bits(batch[row : row + 1], alone)


# --- the switch at the original length -----------------------------------------------------------------------------------


@every_rule
def test_the_original_length_is_short_and_one_more_is_long(rule: str) -> None:
    spec = spec_of(rule)
    x = torch.randn(3, 12, dtype=torch.float64)
    for last in (TRAINED - 1, TRAINED):
        ids = [float(last - 2 + token) for token in range(3)]
        length = last + 1
        forms: dict[str, torch.Tensor] = {
            "an offset": rotate(x, spec, last - 2, layout="sd"),
            "ids": rotate(x, spec, torch.tensor(ids).long(), layout="sd"),
            "an int": rotate(x, spec, last - 2, layout="sd", seq_len=length),
            "a number of no dimensions": rotate(
                x, spec, last - 2, layout="sd", seq_len=torch.tensor(length)
            ),
        }
        for y in forms.values():
            assert_exact(y, x, spec, ids, length)
            assert_same_bits(y, forms["an int"])
    assert not torch.equal(
        rotate(x, spec, layout="sd", seq_len=TRAINED),
        rotate(x, spec, layout="sd", seq_len=TRAINED + 1),
    )


@every_rule
def test_fractions_count_as_the_next_whole_length(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(2, 12, dtype=torch.float64)
    for last, length in ((TRAINED - 1.0, TRAINED), (TRAINED - 0.75, TRAINED + 1)):
        ids = torch.tensor([0.5, last], dtype=torch.float64)
        y = rotate(x, spec, ids, layout="sd")
        assert_exact(y, x, spec, ids.tolist(), length)
        assert_same_bits(y, rotate(x, spec, ids, layout="sd", seq_len=length))


@every_rule
def test_negative_positions_are_short(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(2, 1, 2, 12, dtype=torch.float64)
    for where in (-9000, torch.tensor([-9000, -8999]), positions.per_row(torch.tensor([-9000]))):
        y = rotate(x, spec, where)
        assert_exact(y[0, 0], x[0, 0], spec, [-9000, -8999], 0)
    y = rotate(x, spec, torch.tensor([[-9000, 5], [-9000, 5000]]))
    assert_exact(y[0, 0], x[0, 0], spec, [-9000, 5], 6)
    assert_exact(y[1, 0], x[1, 0], spec, [-9000, 5000], 5001)


@every_rule
def test_lost_positions_spoil_nothing_but_their_token(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 4, 12)
    for lost in (float("nan"), float("inf"), -float("inf")):
        y = rotate(x, spec, torch.tensor([[4999.0, lost, 5000.0, 5001.0]]))
        wanted = rotate(x, spec, torch.tensor([[4999.0, 4999.0, 5000.0, 5001.0]]))
        assert y[:, :, 1, 2:10].isnan().all()
        keep = [0, 2, 3]
        assert_same_bits(y[:, :, keep], wanted[:, :, keep])


@every_rule
def test_last_positions_are_taken_in_64_bits(rule: str) -> None:
    """The length, last position + 1, does not overflow int32 and is not rounded to float32."""
    trained = 2**24
    kind = DynamicNTK(2.0, trained)
    spec = RopeSpec(8, scaling=kind if rule == "dynamic" else LongRoPE(SHORT, LONG, trained, 2.0))
    kept = None if rule == "dynamic" else LongRoPE(SHORT, SHORT, trained, 2.0)
    x = torch.randn(1, 1, 1, 8)
    for ids in (torch.tensor([[2.0**24]]), torch.tensor([[2**31 - 1]], dtype=torch.int32)):
        last = int(ids)
        wanted = rotate(x, spec, last, seq_len=last + 1)
        assert not torch.equal(wanted, rotate(x, RopeSpec(8, scaling=kept), last))
        assert_same_bits(rotate(x, spec, ids), wanted)
        assert_same_bits(rotate(x, spec, positions.per_row(ids[0])), wanted)
    far = positions.Positions(torch.tensor([[[2**31 - 1]]], dtype=torch.int32), 10, add_index=False)
    last = 2**31 + 9
    assert_same_bits(rotate(x, spec, far), rotate(x, spec, last, seq_len=last + 1))


@every_rule
def test_nothing_to_rotate(rule: str) -> None:
    spec = spec_of(rule)
    for shape, where in (
        ((0, 1, 3, 12), torch.zeros(0, 3, dtype=torch.int64)),
        ((0, 1, 3, 12), positions.per_row(torch.zeros(0, dtype=torch.int64))),
        ((0, 1, 3, 12), 5000),
        ((2, 1, 0, 12), None),
        ((2, 1, 0, 12), torch.zeros(2, 0)),
        ((2, 1, 0, 12), positions.per_row(OWN)),
        ((2, 0, 3, 12), 5000),
    ):
        assert rotate(torch.zeros(shape), spec, where).shape == shape  # type: ignore[arg-type]
    assert rotate(torch.zeros(0, 1, 3, 12), spec, seq_len=[]).shape == (0, 1, 3, 12)
    still = RopeSpec(8, rotary_dim=0, scaling=DynamicNTK(2.0, TRAINED))
    x = torch.randn(2, 8)
    assert_same_bits(rotate(x, still, 9000, layout="sd"), x)


# --- several axes ---------------------------------------------------------------------------------


@every_rule
def test_the_largest_coordinate_is_the_last_position(rule: str) -> None:
    spec = RopeSpec(8, scaling=RULES[rule], axes=Axes.sections((2, 1, 1)))
    assert spec.axis_count == 3
    x = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    ids = torch.tensor([[0, 1], [5000, 5999], [7, 8]])
    y = rotate(x, spec, positions.multi_axis(ids))
    rates = omegas(spec.scaling, 6000)
    still = oracle.MP.mpf(0)
    per_axis = [
        [rate if owner == axis else still for rate, (owner, _, _) in zip(rates, spec.axes.pairs)]  # type: ignore[union-attr]
        for axis in range(3)
    ]
    wanted = oracle.rotate(x, ids[:, None], per_axis) * amplitude(spec.scaling, 6000)
    lengths = oracle.pair_lengths(x, 8) * amplitude(spec.scaling, 6000)
    assert_rotated([Result(y, wanted, lengths, 3 * 6000.0)])
    offset = positions.text(positions.per_row(torch.tensor([5998])), axes=3)
    text = positions.text(torch.tensor([5998, 5999]), axes=3)
    assert_same_bits(rotate(x, spec, offset), rotate(x, spec, text))


def test_coordinates_of_an_image_start_no_new_sequence() -> None:
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 16), axes=Axes.sections((2, 1, 1)))
    where = positions.mrope([10, (1, 4, 6), 5])
    tokens = where.ids.shape[2]  # type: ignore[union-attr]
    x = torch.randn(1, 1, tokens, 8)
    last = int(where.ids.max())  # type: ignore[union-attr]
    assert last > 16
    assert_same_bits(rotate(x, spec, where), rotate(x, spec, where, seq_len=last + 1))
    twice = positions.concatenate([where, where])
    with pytest.raises(ValueError, match="start again"):
        rotate(torch.cat((x, x), 2), spec, twice)


# --- packed sequences -----------------------------------------------------------------------------

AGAIN = (
    "positions must not start again within a row (packed sequences?) because the frequencies of "
    "DynamicNTK depend on the length; pass one seq_len for all sequences, or rotate them separately"
)
# Sequences packed in one row, one of them longer than 100.
PACKED: dict[str, positions.PositionsLike] = {
    "two": positions.packed(torch.tensor([0, 5, 125])),
    "decoding, one token each": positions.packed(
        torch.tensor([0, 1, 2, 3]), torch.tensor([30, 35, 600])
    ),
    "one and many": positions.packed(torch.tensor([0, 1, 121])),
    "an offset": positions.packed(torch.tensor([0, 3, 6]), 120),
    "written out": positions.explicit(
        positions.packed(torch.tensor([0, 1, 2]), torch.tensor([30, 600]))
    ),
    "joined": positions.concatenate(
        [positions.packed(torch.tensor([0, 1, 2]), torch.tensor([30, 600])), torch.tensor([601])]
    ),
    "a share": positions.shard(
        positions.packed(torch.tensor([0, 1, 2]), torch.tensor([30, 600])), 0, 1
    ),
    "ids": torch.cat((torch.arange(5), torch.arange(120))),
    "ids, two tokens first": torch.cat((torch.arange(2), torch.arange(120))),
    "ids, backwards": torch.arange(120).flip(0),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name: str) -> None:
    where = positions.as_positions(PACKED[name])
    assert where.ids is not None
    tokens = where.ids.shape[2]
    x = torch.randn(tokens, 1, 8)
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 100))
    ids = f"(positions: int64[1, 1, {tokens}])"
    with refused(ValueError, f"[rotate] {AGAIN} {ids}."):
        rotate(x, spec, where, layout="thd")
    with refused(ValueError, f"[at] {AGAIN} {ids}."):
        spec.at(where)
    with refused(ValueError, f"[rotate_qk_] {AGAIN} {ids}."):
        rotate_qk_(x.clone(), x.clone(), spec, where, layout="thd")
    # With one length for all sequences, each token is rotated as it would be alone.
    stated = rotate(x, spec, where, layout="thd", seq_len=700)
    flat = (where.ids + where.offset).flatten()
    for token in (0, tokens - 1):
        alone = rotate(x[token : token + 1], spec, int(flat[token]), layout="thd", seq_len=700)
        assert_same_bits(stated[token : token + 1], alone)
    # If all sequences are short, they have the same frequencies.
    plain = rotate(x, RopeSpec(8), where, layout="thd")
    assert_same_bits(
        rotate(x, RopeSpec(8, scaling=DynamicNTK(2.0, 9999)), where, layout="thd"), plain
    )


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ids", [None, 30, torch.arange(8) + 600], ids=["none", "offset", "ids"])
def test_the_positions_of_one_rank_do_not_tell_the_length(
    kind: str, ids: positions.PositionsLike
) -> None:
    spec, x = RopeSpec(8, scaling=DynamicNTK(2.0, 100)), torch.randn(1, 1, 4, 8)
    where = positions.explicit(positions.shard(ids, 1, 2, kind=kind, tokens=8), 4)
    text = (
        "seq_len must be given with the positions of one rank's tokens, as the frequencies depend on "
        "the length of the whole sequence (positions: int64[1, 1, 4])."
    )
    with refused(ValueError, f"[rotate] {text}"):
        rotate(x, spec, where)
    with refused(ValueError, f"[at] {text}"):
        spec.at(where, stack="transformers")
    own = rotate(x, spec, where, seq_len=700)
    each = where.ids.flatten().tolist()
    for token, at in enumerate(each):
        alone = rotate(x[:, :, token : token + 1], spec, at, seq_len=700)
        assert_same_bits(own[:, :, token : token + 1], alone)


def test_one_sequence_is_no_pack() -> None:
    spec, x = RopeSpec(8, scaling=DynamicNTK(2.0, 100)), torch.randn(120, 1, 8)
    where = positions.packed(torch.tensor([0, 120]))
    assert_same_bits(rotate(x, spec, where, layout="thd"), rotate(x, spec, layout="thd"))


def test_packed_positions_that_cannot_be_read_are_refused() -> None:
    """Several sequences packed on a device need seq_len, as their lengths are not read there."""
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 100))
    x = torch.empty(6, 1, 8, device="meta")
    where = positions.packed(torch.tensor([0, 3, 6], device="meta"), total=6)
    with refused(ValueError, f"[rotate] {AGAIN} (positions: int64[1, 1, 6])."):
        rotate(x, spec, where, layout="thd")
    assert rotate(x, spec, where, layout="thd", seq_len=700).shape == x.shape
    one = positions.packed(torch.tensor([0, 6], device="meta"), total=6)
    assert rotate(x, spec, one, layout="thd").shape == x.shape


# --- lengths that cannot be read -------------------------------------------------------------------


def compiled(
    function: Callable[..., torch.Tensor], dynamic: bool | None
) -> tuple[Callable[..., torch.Tensor], list[object]]:
    """Return a compiled function, and the list to which it appends its graphs."""
    torch.compiler.reset()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic), graphs


def steps(kind: str) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """Yield x, positions and seq_len of calls with lengths below and above 100."""
    for number in (3, 4, 94, 95, 96, 97, 250, 1000):
        x = torch.randn(2, 1, 5, 12)
        if kind == "offset":
            yield x, number, None
        elif kind == "seq_len":
            yield x, -2, number
        elif kind == "a tensor of lengths":
            yield x, -2, torch.tensor([number, 5])
        elif kind == "offsets per row":
            yield x, positions.per_row(torch.tensor([number, 5])), None
        elif kind == "ids per row":
            yield x, torch.arange(5) + torch.tensor([[number], [5]]), None
        else:
            yield torch.randn(2, 1, number, 12), 0, None


UNREAD = ["offset", "seq_len", "a tensor of lengths", "offsets per row", "ids per row", "tokens"]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", UNREAD)
@pytest.mark.parametrize("dynamic", [True, None])
@every_rule
def test_one_graph_for_all_lengths(rule: str, dynamic: bool | None, kind: str) -> None:
    short = DynamicNTK(2.0, 100) if rule == "dynamic" else LongRoPE(SHORT, LONG, 100, factor=4.0)
    spec = spec_of(short)

    def turn(x: torch.Tensor, where: Any, seq_len: Any) -> torch.Tensor:
        return rotate(x, spec, where, seq_len=seq_len)

    run, graphs = compiled(turn, dynamic)
    for x, where, seq_len in steps(kind):
        got, wanted = run(x, where, seq_len), turn(x, where, seq_len)
        if rule == "longrope":
            assert_same_bits(got, wanted)
        else:
            # The graph computes phase words in float64; their error is below float32's resolution.
            lengths = oracle.pair_lengths(x, 8, start=2)
            assert_rotations(got, wanted, lengths, 2, 1000.0)
    # Unless dynamic=True, the first graph is for the first int or size only, and the second for all others.
    assert len(graphs) == (1 if dynamic or "row" in kind or "tensor" in kind else 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["offset", "an offset that is read", "seq_len", "tokens"])
@every_rule
def test_an_exported_program_takes_all_lengths(rule: str, kind: str, strict: bool) -> None:
    short = DynamicNTK(2.0, 100) if rule == "dynamic" else LongRoPE(SHORT, LONG, 100, factor=4.0)
    spec = spec_of(short)

    class Turn(torch.nn.Module):
        def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
            if kind == "seq_len":
                return rotate(x, spec, -2, seq_len=number)
            return rotate(x, spec, number.item() if isinstance(number, torch.Tensor) else number)

    def number(value: int) -> Any:
        return torch.tensor(value) if kind == "an offset that is read" else value

    dynamic = torch.export.Dim.DYNAMIC
    shapes = {"x": {2: dynamic}, "number": None if "read" in kind else dynamic}
    call = (torch.randn(2, 1, 5, 12), number(7))
    program = torch.export.export(Turn(), call, dynamic_shapes=shapes, strict=strict).module()
    for tokens, value in ((5, 7), (5, 500), (200, 300)) if kind != "seq_len" else ((5, 300),):
        x = torch.randn(2, 1, tokens, 12)
        lengths = oracle.pair_lengths(x, 8, start=2)
        got, wanted = program(x, number(value)), Turn()(x, number(value))
        assert_rotations(got, wanted, lengths, 2, 1000.0)


def test_unequal_factors_take_a_graph_for_short_and_one_for_long_rows() -> None:
    short = LongRoPE(SHORT, LONG, 100, short_mscale=1.25, long_mscale=1.5)
    spec = spec_of(short)

    def turn(x: torch.Tensor, where: Any, seq_len: Any) -> torch.Tensor:
        return rotate(x, spec, where, seq_len=seq_len)

    for kind in ("offset", "seq_len", "tokens"):
        run, graphs = compiled(turn, True)
        for call in steps(kind):
            assert_same_bits(run(*call), turn(*call))
        assert len(graphs) == 2, kind


@pytest.mark.parametrize("rule", [*RULES, "unequal"])
def test_lengths_on_a_device_are_not_read(rule: str) -> None:
    spec = spec_of(UNEQUAL if rule == "unequal" else rule)
    x = torch.empty(2, 1, 3, 12, device="meta")
    ids = torch.empty(2, 3, dtype=torch.int64, device="meta")
    lengths = torch.empty(2, dtype=torch.int64, device="meta")

    def unread() -> None:
        for where, seq_len in ((ids, None), (positions.per_row(lengths), None), (0, lengths)):
            y = rotate(x, spec, where, seq_len=seq_len)
            assert y.shape == x.shape
            assert y.device.type == "meta"

    if rule == "unequal":
        text = (
            "[RopeSpec] all rows of one call must have one attention scaling but got 1.25, 1.5; "
            "a length that is traced or on a device may have either, so give seq_len as an int."
        )
        with refused(NotImplementedError, text):
            unread()
    else:
        unread()
    assert rotate(x, spec, ids, seq_len=6000).shape == x.shape
    assert rotate(x, spec, 5000).shape == x.shape
    if rule != "unequal":
        with FakeTensorMode():
            y = rotate(torch.empty(2, 1, 3, 12), spec, torch.empty(2, 3, dtype=torch.int64))
            assert y.shape == x.shape
    assert_same_bits(
        rotate(torch.ones(3, 12), spec, 5000, layout="sd"),
        rotate(
            torch.ones(3, 12), spec_of(UNEQUAL if rule == "unequal" else rule), 5000, layout="sd"
        ),
    )


def in_a_grad(make: Callable[[], RopeSpec]) -> RopeSpec:
    made: list[RopeSpec] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        made.append(make())
        return rotate(x, made[0], 5000, layout="sd").sum()

    torch.func.grad(loss)(torch.ones(3, 12))
    return made[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["fake", "inference", "meta", "grad"])
@pytest.mark.parametrize("rule", [*RULES, "unequal"])
def test_a_spec_made_in_a_mode_works_after_it(rule: str, mode: str) -> None:
    def make() -> RopeSpec:
        return spec_of(UNEQUAL if rule == "unequal" else rule)

    modes = {"fake": FakeTensorMode, "inference": torch.inference_mode}
    if mode == "grad":
        spec = in_a_grad(make)
    else:
        with modes.get(mode, lambda: torch.device("meta"))():  # type: ignore[operator]
            spec = make()
            rotate(torch.ones(3, 12), spec, 5000, layout="sd")

    def turn(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, 5000, layout="sd")

    x = torch.randn(3, 12)
    wanted = rotate(x, make(), 5000, layout="sd")
    assert_same_bits(turn(x), wanted)
    leaf = x.clone().requires_grad_()
    turn(leaf).sum().backward()
    run, _ = compiled(turn, True)
    assert_rotations(run(x), wanted, oracle.pair_lengths(x, 8, start=2) * 1.5, 2, 5000.0)


@every_rule
def test_transforms(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 3, 12, dtype=torch.float64)
    ids = torch.tensor([[5.0, 6.0, 7.0], [5997.0, 5998.0, 5999.0]], dtype=torch.float64)
    batch = torch.func.vmap(lambda where: rotate(x, spec, where))(ids)
    for got, where in zip(batch, ids, strict=True):
        assert_near(got, rotate(x, spec, where), "float64 ways")
    for where in ids:
        wanted = where.clone().requires_grad_()
        (rotate(x, spec, wanted) ** 3).sum().backward()
        grad = torch.func.grad(lambda p: (rotate(x, spec, p) ** 3).sum())(where)
        assert_near(grad, wanted.grad, "float64 ways, higher order")


# --- attention scaling ----------------------------------------------------------------------------

SCALED: dict[str, tuple[Rule, int]] = {
    "yarn": (YaRN(4.0, TRAINED), 12),
    "yarn, given": (YaRN(4.0, TRAINED, attention_factor=0.7), 12),
    "longrope": (RULES["longrope"], 12),
    "unequal, short": (UNEQUAL, 4096),
    "unequal, long": (UNEQUAL, 4097),
}


@every_backend
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_the_rotated_channels_are_scaled(name: str, interleaved: bool, backend: str) -> None:
    rule, length = SCALED[name]
    spec = spec_of(rule, interleaved)
    assert spec.attention_scaling(length) == amplitude(rule, length) != 1.0
    x = torch.randn(2, 3, 4, 12, dtype=torch.float64)
    ids = [float(length - 4 + token) for token in range(4)]
    where = length - 4
    still = [0, 1, 10, 11]
    y = rotate(x, spec, where, backend=backend)
    assert_exact(y, x, spec, ids, length)
    assert_same_bits(y[..., still], x[..., still])
    assert_same_bits(rotate_(x.clone(), spec, where, backend=backend), y)
    assert_same_bits(rotate(x, spec, where, out=torch.empty_like(x), backend=backend), y)
    assert_same_bits(rotate(x, spec.at(where), backend=backend), y)
    back = rotate(x, spec, where, inverse=True, backend=backend)
    assert_exact(back, x, spec, ids, length, inverse=True)
    assert_same_bits(rotate_(x.clone(), spec, where, inverse=True, backend=backend), back)
    assert_near(rotate(y, spec, where, inverse=True, backend=backend), x, "float64 ways")


@every_backend
@pytest.mark.parametrize("name", SCALED)
def test_gradients_are_scaled(name: str, backend: str) -> None:
    """The backward pass of a scaled rotation rotates back and also scales: it is not the inverse."""
    rule, length = SCALED[name]
    spec = spec_of(rule)
    x, weight = (torch.randn(4, 12, dtype=torch.float64) for _ in range(2))
    ids = [float(length - 4 + token) for token in range(4)]
    scale = amplitude(rule, length)
    wanted, lengths = exact(weight, spec, ids, length, inverse=True)
    wanted = torch.where(lengths > 0, wanted * scale**2, wanted)
    for change in (rotate, lambda y, *rest, **named: rotate_(y.clone(), *rest, **named)):
        leaf = x.clone().requires_grad_()
        y = change(leaf, spec, length - 4, layout="sd", backend=backend)  # type: ignore[operator]
        (grad,) = torch.autograd.grad(y, leaf, weight)
        assert_rotated([Result(grad, wanted, lengths * scale**2, float(length))])
    # Positions lie 0.25 below whole ones, so that no step of gradcheck exceeds the stated length.
    where = (torch.tensor(ids, dtype=torch.float64) - 0.25).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda p, z: rotate(z, spec, p, layout="sd", seq_len=length, backend=backend),
        (where, x.clone().requires_grad_()),
    )


def test_given_tables_are_not_scaled() -> None:
    """Given tables are applied without an amplitude, which they already contain."""
    q = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    angle = torch.randn(3, 4, dtype=torch.float64)
    cos, sin = 1.5 * angle.cos(), 1.5 * angle.sin()
    y, _ = apply_rotary_pos_emb(q, None, cos, sin, tables="half")
    u, v = q[..., :4], q[..., 4:]
    assert_near(y, torch.cat((u * cos - v * sin, u * sin + v * cos), -1), "float64 ways")


def test_rows_of_unequal_factors_are_refused_together() -> None:
    spec, x = spec_of(UNEQUAL), torch.randn(2, 1, 3, 12)
    text = (
        "[RopeSpec] all rows of one call must have one attention scaling but got 1.25, 1.5; rotate "
        "short and long rows separately."
    )
    for where, seq_len in (
        (positions.per_row(torch.tensor([0, 5000])), None),
        (torch.tensor([[1, 2, 3], [4094, 4095, 4096]]), None),
        (0, [4096, 4097]),
        (0, torch.tensor([4096, 4097])),
    ):
        with refused(NotImplementedError, text):
            rotate(x, spec, where, seq_len=seq_len)
    # Rows that are all short, or all long, can share a call.
    y = rotate(x, spec, positions.per_row(torch.tensor([4999, 5000])))
    assert_same_bits(y[1:], rotate(x[1:], spec, 5000))


# --- decoding -------------------------------------------------------------------------------------


@every_rule
def test_decoding_step_by_step(rule: str) -> None:
    """A new token is rotated for the length that includes it; cached keys are rotated again for that length."""
    trained = 6
    kind = DynamicNTK(2.0, trained) if rule == "dynamic" else LongRoPE(SHORT, LONG, trained, 2.0)
    spec = spec_of(kind)
    tokens = 12
    k = torch.randn(1, 1, tokens, 12, dtype=torch.float64)
    cache = torch.zeros_like(k)
    for step in range(tokens):
        new = k[:, :, step : step + 1]
        turned = rotate(new, spec, step)
        assert_exact(turned[0, 0], new[0, 0], spec, [float(step)], step + 1)
        held = cache[:, :, :step]
        # The keys in the cache were rotated for the length before this token.
        moved = rerotate(held, spec, spec, from_seq_len=step, to_seq_len=step + 1)
        cache[:, :, : step + 1] = torch.cat((moved, turned), 2)
        if step < trained:
            assert_same_bits(moved, held)
    wanted, lengths = exact(k[0, 0], spec, [float(at) for at in range(tokens)], tokens)
    assert_rotations(cache[0, 0], wanted, lengths, tokens, float(tokens))
    stale = torch.cat([rotate(k[:, :, at : at + 1], spec, at) for at in range(tokens)], 2)
    assert (stale - cache).abs().max() > 0.01  # without re-rotation the keys differ


# --- errors ------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "lengths of other rows": (
        lambda: rotate(torch.zeros(2, 1, 5, 12), spec_of("dynamic"), seq_len=[5000, 6000, 7000]),
        ValueError,
        "[rotate] seq_len must be one length, or one for each of 2 rows, but got 3 "
        "(x: float32[2, 1, 5, 12]).",
    ),
    "lengths of other rows that are all short": (
        lambda: rotate(torch.zeros(2, 1, 5, 12), spec_of("dynamic"), seq_len=[5, 6, 7]),
        ValueError,
        "[rotate] seq_len must be one length, or one for each of 2 rows, but got 3 "
        "(x: float32[2, 1, 5, 12]).",
    ),
    "a length for each sequence of a pack": (
        lambda: rotate(
            torch.zeros(5, 1, 12), spec_of("longrope"), seq_len=torch.tensor([2, 3]), layout="thd"
        ),
        ValueError,
        "[rotate] seq_len must be one length but got 2 (layout 'thd' has no rows) "
        "(x: float32[5, 1, 12]).",
    ),
    "a length beside a prepared rotation": (
        lambda: rotate(torch.zeros(5, 12), spec_of("dynamic").at(), seq_len=5, layout="sd"),
        ValueError,
        "[rotate] seq_len must be None with a prepared rotation, which has its own; call "
        "spec.at(positions, seq_len=…).",
    ),
    "an invalid length": (
        lambda: rotate(torch.zeros(5, 12), spec_of("dynamic"), seq_len="long", layout="sd"),  # type: ignore[arg-type]
        TypeError,
        "[seq_len] a length must be an int, or one per row, but got 'long'.",
    ),
    "lengths on the meta device": (
        lambda: rotate(
            torch.zeros(5, 12),
            spec_of("dynamic"),
            layout="sd",
            seq_len=torch.tensor(5, device="meta"),
        ),
        ValueError,
        "[seq_len] lengths must have data but are on the meta device while the rotated tensors are on cpu.",
    ),
    "a negative length": (
        lambda: spec_of("longrope").at(seq_len=[5, -5]),
        ValueError,
        "[seq_len] a length must not be negative but got -5.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors(case: str) -> None:
    make, kind, text = REFUSED[case]
    with refused(kind, text):
        make()


@pytest.mark.parametrize("kind", [numpy.int64, numpy.int32, numpy.float32, numpy.float64])
@pytest.mark.parametrize("inference", [False, True])
@every_rule
def test_ids_that_numpy_changes_take_effect(rule: str, inference: bool, kind: Any) -> None:
    """Every call reads the ids: numpy changes them, but not their version counter."""
    spec, x = spec_of(rule), torch.randn(1, 2, TAIL, 12)
    with torch.inference_mode(inference):
        shared = numpy.arange(TAIL, dtype=kind)
        ids = torch.from_numpy(shared)
        rotation = spec.at(ids)
        for _ in range(2):
            assert_same_bits(rotate(x, rotation), rotate(x, spec_of(rule), ids.clone()))
        shared += 6000
        wanted = rotate(x, spec_of(rule), 6000)
        assert_same_bits(rotate(x, rotation), rotate(x, spec_of(rule), ids.clone()))
        assert_same_bits(rotate_(x.clone(), rotation), rotate(x, spec_of(rule), ids.clone()))
        if kind is not numpy.float32 and kind is not numpy.float64:
            assert_same_bits(rotate(x, rotation), wanted)
        stated = spec.at(ids, seq_len=6000 + TAIL)
        rotate(x, stated)
        shared += 1
        with pytest.raises(ValueError, match="seq_len must be at least 6004"):
            rotate(x, stated)
        starts = numpy.array([3], dtype=kind)
        rows = spec.at(positions.per_row(torch.from_numpy(starts)))
        rotate(x, rows)
        starts += 6000
        assert_same_bits(rotate(x, rows), rotate(x, spec_of(rule), 6003))


def test_lost_ids_are_what_they_were() -> None:
    spec, ids = spec_of("dynamic"), torch.tensor([0.0, torch.nan, 6000.0])
    rotation = spec.at(ids)
    for _ in range(2):
        assert rotate(torch.ones(1, 1, 3, 12), rotation).isnan().any()


PLAIN: dict[str, Rule | None] = {
    "none": None,
    "yarn": YaRN(4.0, TRAINED),
    "linear": Linear(4.0),
    "given": Given((1.0, 0.3, 0.1, 0.01)),
}
INVALID: dict[str, tuple[Any, type[Exception], str]] = {
    "a word": ("long", TypeError, "a length must be an int, or one per row, but got 'long'."),
    "bytes": (b"ab", TypeError, "a length must be an int, or one per row, but got b'ab'."),
    "a dictionary": ({0: 9}, TypeError, "a length must be an int, or one per row, but got {0: 9}."),
    "a set": ({9}, TypeError, "a length must be an int, or one per row, but got {9}."),
    "a float of numpy": (
        numpy.array(5.0),
        TypeError,
        "a length must be an int, or one per row, but got array(5.).",
    ),
    "a bool of numpy": (
        numpy.array(True),
        TypeError,
        "a length must be an int, or one per row, but got array(True).",
    ),
    "nothing of numpy": (
        numpy.array(None),
        TypeError,
        "a length must be an int, or one per row, but got array(None, dtype=object).",
    ),
    "a negative int of numpy": (
        numpy.array(-3),
        ValueError,
        "a length must not be negative but got -3.",
    ),
    "a table of numpy": (
        numpy.ones((2, 2)),
        TypeError,
        "a length must be an int, or one per row, but got array([1., 1.]).",
    ),
    "a bool in a list": (
        [torch.tensor(True)],
        TypeError,
        "a length must be an int, or one per row, but got bool[].",
    ),
    "no number in a list": (
        [torch.tensor(5, device="meta")],
        TypeError,
        "a length must be an int, or one per row, but got int64[].",
    ),
    "a float": (5.0, TypeError, "a length must be an int, or one per row, but got 5.0."),
    "a bool": (True, TypeError, "a length must be an int, or one per row, but got True."),
    "floats": ([7, 5.5], TypeError, "a length must be an int, or one per row, but got 5.5."),
    "an object": (
        object,
        TypeError,
        f"a length must be an int, or one per row, but got {object!r}.",
    ),
    "narrow floats": (
        torch.zeros(2),
        TypeError,
        "lengths must be int32, int64 or float64 (seq_len: float32[2]).",
    ),
    "a mask": (
        torch.ones(2, dtype=torch.bool, device="meta"),
        TypeError,
        "lengths must be int32, int64 or float64 (seq_len: bool[2]).",
    ),
    "a table": (
        torch.ones(2, 2, dtype=torch.int64),
        ValueError,
        "lengths must have shape (rows,) (seq_len: int64[2, 2]).",
    ),
    "a negative int": (-3, ValueError, "a length must not be negative but got -3."),
}


def test_rules_that_do_not_depend_on_the_length_ignore_it() -> None:
    spec, x = spec_of(YaRN(4.0, TRAINED)), torch.randn(2, 1, 5, 12)
    for seq_len in (
        *(5, [5, 6, 7], iter([5, 6]), torch.tensor([5, 6]), torch.tensor(1)),
        *(numpy.array(5), numpy.uint8(5), numpy.array([5, 6])),
    ):
        assert_same_bits(rotate(x, spec, 3, seq_len=seq_len), rotate(x, spec, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seq_len",
    [numpy.array(6000), numpy.int32(6000), numpy.uint64(6000), numpy.array([6000])],
    ids=repr,
)
@every_rule
def test_one_number_of_numpy_is_a_length_for_all_rows(rule: str, seq_len: Any) -> None:
    spec, x = spec_of(rule), torch.randn(2, 2, TAIL, 12)
    want = rotate(x, spec_of(rule), 9, seq_len=6000)
    assert not torch.equal(want, rotate(x, spec_of(rule), 9))
    for made in (
        rotate(x, spec, 9, seq_len=seq_len),
        rotate_(x.clone(), spec, 9, seq_len=seq_len),
        *rotate_qk(x, x, spec, 9, seq_len=seq_len),
        rotate(x, spec.at(9, seq_len=seq_len)),
    ):
        assert_same_bits(made, want)
    assert spec.attention_scaling(seq_len) == spec.attention_scaling(6000)


@pytest.mark.parametrize(
    "seq_len", [numpy.array(6000), numpy.int64(6000), numpy.array([6000, 5000])], ids=repr
)
@pytest.mark.parametrize("rule", ["none", "dynamic"])
def test_numbers_of_numpy_compile(rule: str, seq_len: Any) -> None:
    spec, x = spec_of({**PLAIN, **RULES}[rule]), torch.randn(2, 2, TAIL, 12)  # type: ignore[arg-type]
    call = torch.compile(
        lambda x, n: rotate(x, spec, 9, seq_len=n), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(call(x, seq_len), rotate(x, spec, 9, seq_len=seq_len))


@pytest.mark.parametrize("case", INVALID)
@pytest.mark.parametrize("rule", [*PLAIN, *RULES])
def test_invalid_lengths_are_refused_by_every_rule(rule: str, case: str) -> None:
    seq_len, kind, text = INVALID[case]
    spec = spec_of({**PLAIN, **RULES}[rule])  # type: ignore[arg-type]
    x = torch.randn(2, 1, 3, 12)
    calls: list[Callable[[], object]] = [
        lambda: rotate(x, spec, seq_len=seq_len),
        lambda: rotate_(x.clone(), spec, seq_len=seq_len),
        lambda: rotate_qk(x, x, spec, seq_len=seq_len),
        lambda: rerotate(x, spec, spec, to_seq_len=seq_len),
        lambda: rerotate(x, spec, spec, from_seq_len=seq_len),
        lambda: polar_scan(x, x, x, spec, seq_len=seq_len),
        lambda: spec.at(seq_len=seq_len),
        lambda: spec.words_for(seq_len),
        lambda: spec.attention_scaling(seq_len),
    ]
    if not isinstance(seq_len, (torch.Tensor, list)) and numpy.ndim(seq_len) == 0:
        calls.append(lambda: spec.frequencies(seq_len))
        if spec.scaling is not None:
            calls.append(lambda: spec.scaling.frequencies(8, 10000.0, seq_len))  # type: ignore[union-attr]
    for call in calls:
        with refused(kind, f"[seq_len] {text}"):
            call()


# --- positions beyond the stated length ------------------------------------------------------------------

BEYOND = "give the length of the whole sequence"
# Positions of three tokens in two rows, a length that is too small, the error, and a length that is
# right. Most lengths are far below the original length of 4096.
PASSED: dict[str, tuple[positions.PositionsLike, Any, str, Any]] = {
    "nothing": (None, 2, "3, the largest position plus 1, but got 2", 3),
    "an offset": (9, 3, "12, the largest position plus 1, but got 3", 12),
    "an offset, one row of two": (
        9,
        [12, 11],
        "12, the largest position of row 1 plus 1, but got 11",
        [12, 12],
    ),
    "a tensor of lengths": (
        9,
        torch.tensor([11, 12]),
        "12, the largest position of row 0 plus 1, but got 11",
        torch.tensor([12, 12]),
    ),
    "a long one": (6000, 6002, "6003, the largest position plus 1, but got 6002", 6003),
    "ids": (
        torch.tensor([9, 11, 10]),
        11,
        "12, the largest position plus 1, but got 11; " + BEYOND + " (positions: int64[1, 1, 3])",
        12,
    ),
    "ids of rows": (
        torch.tensor([[0, 1, 2], [0, 11, 1]]),
        [9, 9],
        "12, the largest position of row 1 plus 1, but got 9; "
        + BEYOND
        + " (positions: int64[1, 2, 3])",
        [9, 12],
    ),
    "fractions": (
        torch.tensor([0.0, 1.0, 11.25]),
        12,
        "13, the largest position plus 1, but got 12; " + BEYOND + " (positions: float32[1, 1, 3])",
        13,
    ),
    "offsets of rows": (
        positions.per_row(torch.tensor([9, 0])),
        11,
        "12, the largest position of row 0 plus 1, but got 11; "
        + BEYOND
        + " (positions: int64[1, 2, 1])",
        [12, 3],
    ),
    "a pack": (
        positions.explicit(positions.packed(torch.tensor([0, 1, 3]), torch.tensor([3, 20]))),
        21,
        "22, the largest position plus 1, but got 21; " + BEYOND + " (positions: int64[1, 1, 3])",
        22,
    ),
    "far ids": (
        positions.Positions(
            torch.tensor([[[2**31 - 1] * 3]], dtype=torch.int32), 10, add_index=False
        ),
        5,
        f"{2**31 + 10}, the largest position plus 1, but got 5; "
        + BEYOND
        + " (positions: int32[1, 1, 3])",
        2**31 + 10,
    ),
}


@pytest.mark.parametrize("case", PASSED)
@every_rule
def test_positions_beyond_the_length_are_refused(rule: str, case: str) -> None:
    where, small, text, enough = PASSED[case]
    spec, x = spec_of(rule), torch.randn(2, 1, 3, 12)
    text = text if BEYOND in text else f"{text}; {BEYOND}"
    explicit = not (
        where is None or isinstance(where, int) or positions.as_positions(where).add_index
    )
    calls: dict[str, Callable[[], object]] = {
        "rotate": lambda: rotate(x, spec, where, seq_len=small),
        "rotate_": lambda: rotate_(x, spec, where, seq_len=small),
        "rotate_qk": lambda: rotate_qk(x, x, spec, where, seq_len=small),
        "rotate_qk_": lambda: rotate_qk_(x, x.clone(), spec, where, seq_len=small),
        "polar_scan": lambda: polar_scan(x, x, x, spec, positions=where, seq_len=small),
        "at" if explicit else "rotate ": lambda: rotate(x, spec.at(where, seq_len=small)),
    }
    kept = x.clone()
    for operation, call in calls.items():
        with refused(ValueError, f"[{operation.strip()}] seq_len must be at least {text}."):
            call()
    with refused(ValueError, f"[rerotate] from_seq_len must be at least {text}."):
        rerotate(x, spec, spec, where, from_seq_len=small, to_seq_len=2**40)
    with refused(ValueError, f"[rerotate] to_seq_len must be at least {text}."):
        rerotate(x, spec, spec, where, from_seq_len=2**40, to_seq_len=small)
    assert_same_bits(x, kept)
    # A rule that does not depend on the length accepts any valid length.
    assert rotate(x, spec_of(YaRN(4.0, TRAINED)), where, seq_len=small).shape == x.shape
    rotate(x, spec, where, seq_len=enough)
    rotate(x, spec.at(where, seq_len=enough))
    with torch.device("meta"):
        rotate(torch.empty(2, 1, 3, 12), spec, where, seq_len=enough)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
@every_rule
def test_a_prepared_rotation_checks_every_call(rule: str, layout: str) -> None:
    """Every call of a prepared rotation checks its length, also on the fast path of later calls."""
    spec = spec_of(rule)
    rope = spec.at(9, seq_len=12)

    def turn(tokens: int) -> torch.Tensor:
        x = torch.randn(2, 1, tokens, 12)
        return rotate_(x.permute(["bhsd".index(axis) for axis in layout]), rope, layout=layout)

    for tokens in (3, 3, 1, 0, 3):
        turn(tokens)
        for many in (4, 400):
            text = f"seq_len must be at least {9 + many}, the largest position plus 1, but got 12; {BEYOND}"
            with refused(ValueError, f"[rotate_] {text}."):
                turn(many)


@every_rule
def test_ids_that_change_are_compared_again(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(2, 1, 3, 12)
    starts, ids = torch.tensor([0, 9]), torch.tensor([0, 1, 2])
    ramps, written = spec.at(positions.per_row(starts), seq_len=12), spec.at(ids, seq_len=12)
    for _ in range(2):
        rotate(x, ramps)
        rotate(x, written)
    starts -= 1
    ids += 9
    assert_same_bits(rotate(x, ramps), rotate(x, spec, positions.per_row(starts), seq_len=12))
    assert_same_bits(rotate(x, written), rotate(x, spec, 9, seq_len=12))
    starts += 2
    ids += 1
    for _ in range(2):
        with refused(
            ValueError,
            "[rotate] seq_len must be at least 13, the largest position of row 1 plus 1, but got 12; "
            f"{BEYOND} (positions: int64[1, 2, 1]).",
        ):
            rotate(x, ramps)
        with refused(
            ValueError,
            f"[rotate] seq_len must be at least 13, the largest position plus 1, but got 12; {BEYOND} "
            "(positions: int64[1, 1, 3]).",
        ):
            rotate(x, written)


@every_rule
def test_lost_and_negative_positions_exceed_no_length(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 3, 12)
    nan, inf = float("nan"), float("inf")
    for ids in ([nan, 4.0, inf], [nan] * 3, [-9.0, -inf, 4.0]):
        rotate(x, spec, torch.tensor(ids), seq_len=5)
    rotate(x, spec, -9, seq_len=0)
    rotate(x[:, :, :0], spec, 9, seq_len=2)
    rotate(x[:, :, :0], spec, torch.zeros(0, dtype=torch.int64), seq_len=0)
    rotate(x[:0], spec, torch.zeros(0, 3, dtype=torch.int64), seq_len=0)


@every_rule
def test_checks_do_not_wait_for_a_device(rule: str) -> None:
    """Positions are not compared with seq_len if either is on a device: reading it would wait."""
    spec, x = spec_of(rule), torch.empty(2, 1, 3, 12, device="meta")
    ids = torch.tensor([9, 10, 11])
    rotate(x, spec, ids.to("meta"), seq_len=3)
    rotate(x, spec, 9, seq_len=torch.tensor(3, device="meta"))
    rotate(x, spec, positions.per_row(torch.tensor([9, 9], device="meta")), seq_len=3)
    text = f"seq_len must be at least 12, the largest position plus 1, but got 3; {BEYOND}"
    with refused(ValueError, f"[rotate] {text}."):
        rotate(x, spec, 9, seq_len=3)
    with refused(ValueError, f"[rotate] {text} (positions: int64[1, 1, 3])."):
        rotate(x, spec, ids, seq_len=3)
    # The copy on the device does not follow changes of the original.
    starts = torch.tensor([9])
    rope = spec.at(positions.per_row(starts), device="meta", seq_len=12)
    starts += 500
    rotate(x, rope)
    with refused(
        ValueError,
        "[rotate] seq_len must be at least 13, the largest position plus 1, but got 12; "
        f"{BEYOND} (positions: int64[1, 1, 1]).",
    ):
        rotate(torch.empty(2, 1, 4, 12, device="meta"), rope)


class Ids(torch.Tensor):
    """A subclass that holds its own data."""


@every_rule
def test_ids_of_a_subclass_are_compared_with_the_length(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 3, 12)
    ids = torch.tensor([9, 10, 11]).as_subclass(Ids)
    text = f"seq_len must be at least 12, the largest position plus 1, but got 3; {BEYOND}"
    with refused(ValueError, f"[rotate] {text} (positions: int64[1, 1, 3])."):
        rotate(x, spec, ids, seq_len=3)
    with refused(ValueError, f"[at] {text} (positions: int64[1, 1, 3])."):
        spec.at(ids, seq_len=3)
    rope = spec.at(positions.per_row(ids[:1]), seq_len=12)
    assert_same_bits(rotate(x, rope), rotate(x, spec, 9, seq_len=12))
    ids += 1
    with pytest.raises(ValueError, match="seq_len must be at least 13"):
        rotate(x, rope)


def test_frequencies_of_a_shorter_sequence_on_purpose() -> None:
    spec, x = spec_of("dynamic"), torch.randn(1, 1, 3, 12)
    kept = spec_of(Given.of(spec.frequencies(6000).inv_freq))
    y = rotate(x, kept, 9000)
    wanted = oracle.rotate(x, [9000, 9001, 9002], omegas(spec.scaling, 6000), start=2)
    assert_rotated([Result(y, wanted, oracle.pair_lengths(x, 8, start=2), 9002.0)])


def test_a_rotation_for_some_rows_refuses_others_the_second_time_too() -> None:
    """Phase words are equal for all rows here, so the kernel would not detect the mismatch."""
    rope = RopeSpec(8, scaling=DynamicNTK(2.0, 64)).at(seq_len=[10, 20])
    rotate_(torch.ones(2, 1, 5, 8), rope)
    sentence = "[rotate_] seq_len must be one length, or one for each of 3 rows, but got 2"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            rotate_(torch.ones(3, 1, 5, 8), rope)


@pytest.mark.parametrize("wrong", [None, [1, 2], torch.zeros(8, 64)], ids=["none", "list", "rank"])
def test_an_invalid_tensor_has_its_error_after_a_stated_length(wrong: Any) -> None:
    spec = RopeSpec(64, scaling=DynamicNTK(factor=2.0, original_max_position=16))
    rotation = spec.at(torch.arange(8), seq_len=64)
    rotate(torch.zeros(1, 2, 8, 64), rotation)
    with pytest.raises((TypeError, ValueError), match=r"^\[rotate\] x must "):
        rotate(wrong, rotation)
