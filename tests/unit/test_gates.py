"""Gates: the factor of each channel. What they refuse is in test_refusals.py."""

import math

import pytest
import torch

from tests.support.helpers import noise
from tests.support.tolerances import assert_near
from tightrope import gates
from tightrope.gates import Channels, Exp, Given, Scalar, Slope, XPos

CHANNELS, HALF, F64 = Channels(8, 0, 8, True), Channels(8, 2, 4, False), torch.float64
WHERE = torch.tensor([[0, 1, 5], [7, -3, 2]])


def pair_of(channels: Channels, channel: int) -> int | None:
    """Return the pair of a channel, or None if it does not rotate."""
    i = channel - channels.start
    if not 0 <= i < channels.rotary_dim:
        return None
    return i // 2 if channels.interleaved else i % (channels.rotary_dim // 2)


@pytest.mark.parametrize(
    "channels", [CHANNELS, HALF, Channels(8, 0, 6, True), Channels(8, 2, 6, False)]
)
def test_tied_gives_both_channels_of_a_pair_one_value(channels: Channels) -> None:
    """And channels that do not rotate the factor 1."""
    values = noise(3, channels.pairs)
    owners = [pair_of(channels, channel) for channel in range(8)]
    still = torch.zeros(3, dtype=F64)
    wide = torch.stack([still if pair is None else values[:, pair] for pair in owners], -1)
    wanted = wide[None, :, None]
    assert torch.equal(Exp(values, tied="pair").log_factor(channels, dtype=F64), wanted)
    got = Slope(values, tied="pair").log_factor(channels, WHERE, F64)
    assert_near(got, wanted * WHERE[:, None, :, None], "float64 ways")
    got = Given(values[:, None], tied="pair").log_factor(channels, dtype=F64)
    assert torch.equal(got, wide[None, None])


def test_given_is_positions_by_heads_by_channels() -> None:
    log = noise(2, 5, 3, 8)
    assert torch.equal(Given(log).log_factor(CHANNELS, dtype=F64), log.transpose(1, 2))
    assert torch.equal(Given(log[0]).log_factor(CHANNELS, dtype=F64), log[:1].transpose(1, 2))
    assert Given(noise(1, 1, 1)).factor(CHANNELS).shape == (1, 1, 1, 1)


def test_scalar_and_products() -> None:
    factor = Scalar(3.0).factor(CHANNELS, dtype=F64)
    assert_near(factor, torch.full((1, 1, 1, 1), 3.0, dtype=F64), "float64 ways")
    value = torch.tensor(3.0, requires_grad=True)
    (grad,) = torch.autograd.grad(Scalar(value).factor(CHANNELS).sum(), value)
    assert_near(grad, torch.tensor(1.0), "float32 ways")
    x, gamma = noise(2, 3, 5, 8), noise(3, 8)
    log = gates.total("x", x, [Exp(gamma), Scalar(2.0)], CHANNELS)
    assert_near(log.exp(), gamma.exp()[None, :, None] * 2, "float64 ways")  # type: ignore[union-attr]
    assert gates.total("x", x, [], CHANNELS) is None


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float64])
@pytest.mark.parametrize("centre", [4, 0.3, 2.0**24 + 0.25, 1e9, 2.0**31])
def test_xpos_is_the_formula_of_the_paper(kind: torch.dtype, centre: float) -> None:
    """For any token alone; the distance of a position from the centre is exact, even far from 0."""
    gate = XPos(centre=centre, scale_base=32.0, smoothing=0.4)
    near = [int(centre) - 70, int(centre) - 1]
    for dtype, digits in ((F64, 1e-12), (torch.float32, 1e-6)):
        got = gate.factor(HALF, torch.tensor([near], dtype=kind), dtype)
        for token, position in enumerate(near):
            for channel in range(8):
                pair = pair_of(HALF, channel)
                zeta = 1.0 if pair is None else (2 * pair / 4 + 0.4) / 1.4
                wanted = zeta ** ((position - centre) / 32)
                assert math.isclose(got[0, 0, token, channel].item(), wanted, rel_tol=digits)
        alone = gate.factor(HALF, torch.tensor([near[1:]], dtype=kind), dtype)
        assert torch.equal(alone[:, :, 0], got[:, :, 1])
    opposite = gate.for_keys().factor(HALF, torch.tensor([near], dtype=kind), torch.float32)
    assert_near(got * opposite, torch.ones_like(got), "float32 ways")
    assert gates.pair((gate, gate))[1] == gate
    assert gates.pair(gate)[1] == gate.for_keys() != gate == gate.for_keys().for_keys()


def test_xpos_up_to_the_last_position_that_fits() -> None:
    """Beyond it is an error, or NaN where positions cannot be read."""
    gate, last = XPos(centre=0), 36260  # floor(ln(largest float32) · 512 / ln(1.4 / 0.4))
    got = gate.factor(CHANNELS, torch.tensor([[-last, last]]))
    assert (got.isfinite() & (got > 0)).all()
    with pytest.raises(ValueError, match="overflows float32"):
        gate.factor(CHANNELS, torch.tensor([[last + 1]]))
    where = torch.tensor([[1.0, 1e9]])
    got = torch.func.vmap(lambda w: gate.factor(CHANNELS, w[None]))(where)
    assert got[..., 0, :].isfinite().all()
    assert got[..., 1, 0].isnan().all()
