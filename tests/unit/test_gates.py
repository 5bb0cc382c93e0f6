"""Gates: the factor of each channel, and the errors."""

import math

import pytest
import torch

from tests.support.helpers import noise, refusals
from tests.support.tolerances import assert_near
from tightrope import gates
from tightrope._errors import public
from tightrope.gates import Channels, Exp, Given, Scalar, Slope, XPos

CHANNELS = Channels(8, 0, 8, True)
HALF = Channels(8, 2, 4, False)
WHERE = torch.tensor([[0, 1, 5], [7, -3, 2]])


def pair_of(channels: Channels, channel: int) -> int | None:
    """Return the pair of a channel, or None if it does not rotate."""
    i = channel - channels.start
    if not 0 <= i < channels.rotary_dim:
        return None
    return i // 2 if channels.interleaved else i % (channels.rotary_dim // 2)


def tied(channels: Channels, values: torch.Tensor) -> torch.Tensor:
    """Expand values of pairs (..., pairs) to channels; 0 for channels that do not rotate."""
    columns = []
    for channel in range(channels.head_dim):
        pair = pair_of(channels, channel)
        columns.append(torch.zeros_like(values[..., 0]) if pair is None else values[..., pair])
    return torch.stack(columns, -1)


@pytest.mark.parametrize(
    "channels", [CHANNELS, HALF, Channels(8, 0, 6, True), Channels(8, 2, 6, False)]
)
def test_tied_gives_both_channels_of_a_pair_one_value(channels: Channels) -> None:
    values = noise(3, channels.pairs)
    wanted = tied(channels, values)[None, :, None]
    got = Exp(values, tied="pair").log_factor(channels, dtype=torch.float64)
    assert torch.equal(got, wanted)
    where = WHERE.double()[:, None, :, None]
    got = Slope(values, tied="pair").log_factor(channels, WHERE, torch.float64)
    assert_near(got, wanted * where, "float64 ways")
    got = Given(values[:, None], tied="pair").log_factor(channels, dtype=torch.float64)
    assert torch.equal(got, tied(channels, values)[None, None])


def test_given_is_positions_by_heads_by_channels() -> None:
    log = noise(2, 5, 3, 8)
    got = Given(log).log_factor(CHANNELS, dtype=torch.float64)
    assert torch.equal(got, log.transpose(1, 2))
    assert torch.equal(
        Given(log[0]).log_factor(CHANNELS, dtype=torch.float64), log[:1].transpose(1, 2)
    )
    assert Given(noise(1, 1, 1)).factor(CHANNELS).shape == (1, 1, 1, 1)


def test_scalar() -> None:
    assert_near(
        Scalar(3.0).factor(CHANNELS, dtype=torch.float64),
        torch.full((1, 1, 1, 1), 3.0, dtype=torch.float64),
        "float64 ways",
    )
    value = torch.tensor(3.0, requires_grad=True)
    Scalar(value).factor(CHANNELS).sum().backward()
    assert_near(value.grad, torch.tensor(1.0), "float32 ways")


def test_xpos_is_the_formula_of_the_paper() -> None:
    gate = XPos(centre=4, scale_base=32.0, smoothing=0.4)
    got = gate.factor(HALF, WHERE, torch.float64)
    for row in range(2):
        for token in range(3):
            for channel in range(8):
                pair = pair_of(HALF, channel)
                zeta = 1.0 if pair is None else (2 * pair / 4 + 0.4) / 1.4
                wanted = zeta ** ((WHERE[row, token].item() - 4) / 32)
                assert math.isclose(got[row, 0, token, channel].item(), wanted, rel_tol=1e-12)
    opposite = gate.for_keys().factor(HALF, WHERE, torch.float64)
    assert_near(got * opposite, torch.ones_like(got), "float64 ways")
    assert gates.pair(gate)[1].log_factor(HALF, WHERE)[0, 0, 2, 2] > 0
    assert gate.for_keys().for_keys().log_factor(HALF, WHERE).equal(gate.log_factor(HALF, WHERE))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float64])
@pytest.mark.parametrize("centre", [0.3, 2.0**24 + 0.25, 1e9, 2.0**31])
def test_xpos_has_all_digits_of_a_position(kind: torch.dtype, centre: float) -> None:
    """The distance of a position from the centre is exact, even far from 0."""
    near = [int(centre) - 70, int(centre) - 1]
    where = torch.tensor([near], dtype=kind)
    for dtype, digits in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        got = XPos(centre=centre, scale_base=32.0).factor(HALF, where, dtype)
        for token in range(2):
            wanted = (0.4 / 1.4) ** ((near[token] - centre) / 32)
            assert math.isclose(got[0, 0, token, HALF.start].item(), wanted, rel_tol=digits)


def test_xpos_does_not_depend_on_other_tokens() -> None:
    """The factor of a token does not depend on the other tokens of the call.

    All calls share one centre, so that cached and new keys agree. Other implementations use the
    middle of each call as the centre.
    """
    gate = XPos(centre=0)
    alone = gate.factor(CHANNELS, torch.tensor([[9]]))
    among = gate.factor(CHANNELS, torch.arange(32)[None])
    assert torch.equal(alone[0, 0, 0], among[0, 0, 9])


def test_xpos_up_to_the_last_position_that_fits() -> None:
    gate = XPos(centre=0)
    last = 36260  # floor(ln(largest float32) · 512 / ln(1.4 / 0.4))
    for sign in (1, -1):
        got = gate.factor(CHANNELS, torch.tensor([[sign * last]]))
        assert got.isfinite().all()
        assert (got > 0).all()
    with pytest.raises(ValueError, match="overflows float32"):
        gate.factor(CHANNELS, torch.tensor([[last + 1]]))


def test_xpos_without_a_look_gives_nan_where_it_would_overflow() -> None:
    gate = XPos(centre=0)
    where = torch.tensor([[1.0, 1e9]])
    got = torch.func.vmap(lambda w: gate.factor(CHANNELS, w[None]))(where)
    assert got[..., 0, :].isfinite().all()
    assert got[..., 1, 0].isnan().all()


def test_factors_multiply() -> None:
    x, gamma = noise(2, 3, 5, 8), noise(3, 8)
    log = gates.total("x", x, [Exp(gamma), Scalar(2.0)], CHANNELS)
    assert_near(log.exp(), gamma.exp()[None, :, None] * 2, "float64 ways")
    assert gates.total("x", x, [], CHANNELS) is None


X = torch.zeros(2, 3, 5, 8)
FAR = torch.tensor([[0, 100_000]])


test_errors = refusals(
    ValueError={
        "[Scalar] value must be positive but got 0.0.": lambda: Scalar(0.0),
        "[Scalar] value must have shape () (value: float32[2]).": lambda: Scalar(torch.zeros(2)),
        "[Exp] gamma must have shape (channels,) or (heads, channels) (gamma: float32[1, 2, "
        "8]).": lambda: Exp(torch.zeros(1, 2, 8)),
        "[Exp] gamma must have 1 or 8 channels but got 7 (gamma: float32[7]).": lambda: Exp(
            torch.zeros(7)
        ).factor(CHANNELS),
        "[Exp] gamma must have 1 or 4 pairs but got 8 (gamma: float32[8]).": lambda: Exp(
            torch.zeros(8), tied="pair"
        ).factor(CHANNELS),
        "[Slope] tied must be None or 'pair' but got 'head'.": lambda: Slope(
            torch.zeros(8), tied="head"
        ),
        "[Slope] positions must be given but got None.": lambda: Slope(torch.zeros(8)).factor(
            CHANNELS
        ),
        "[Given] log must have shape (tokens, heads, channels) or (rows, tokens, heads, "
        "channels) (log: float32[5, 8]).": lambda: Given(torch.zeros(5, 8)),
        "[XPos] scale_base must be positive but got 0.0.": lambda: XPos(0, scale_base=0),
        "[XPos] centre must be finite but got inf.": lambda: XPos(math.inf),
        "[Scalar] value must be finite but got -inf.": lambda: Scalar(-(10**400)),
        "[XPos] positions must lie within 36260 of the centre 0, or the factor overflows "
        "float32, but they reach from 0 to 100000; choose another centre or a larger "
        "scale_base.": lambda: XPos(centre=0).factor(CHANNELS, FAR, torch.float32),
        "[XPos] positions must lie within 4532 of the centre 0, or the factor overflows "
        "float16, but they reach from 0 to 10000; choose another centre or a larger scale_base.": lambda: (
            XPos(centre=0).factor(CHANNELS, FAR // 10, torch.float16)
        ),
        "[demo] the gate Exp must have 1 or 3 heads for q but got 2 (q: float32[2, 3, 5, 8]).": lambda: (
            public("demo")(gates.total)("q", X, [Exp(torch.zeros(2, 8))], CHANNELS)
        ),
        "[demo] the gate Given must have 1 or 5 tokens for k but got 4 (k: float32[2, 3, 5, "
        "8]).": lambda: public("demo")(gates.total)(
            "k", X, [Given(torch.zeros(4, 1, 1))], CHANNELS
        ),
    },
    TypeError={
        "[Scalar] value must be a number but got '1'.": lambda: Scalar("1"),
        "[Exp] gamma must be a floating tensor but got int64[8].": lambda: Exp(
            torch.zeros(8, dtype=torch.int64)
        ),
        "[demo] gate must be None, a gate of tightrope.gates, or a pair of them for q and k, "
        "but got 'silu'.": lambda: public("demo")(gates.pair)("silu"),
    },
)
