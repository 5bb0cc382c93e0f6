"""What activations, gates and axes refuse."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.support.helpers import refusals
from tightrope import RopeSpec
from tightrope._errors import public
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.functional import rotate, rotate_qk
from tightrope.gates import Channels, Exp, Given, Scalar, Slope, XPos, pair, total

X, HEADS = torch.zeros(1, 2, 3, 8), torch.zeros(2, 3, 5, 8)
LONG, MODULE = torch.ones(8).long(), torch.nn.RMSNorm(8)
CHANNELS = Channels(8, 0, 8, True)
FAR = torch.tensor([[0, 100_000]])


def turn(**options: Any) -> Callable[[], object]:
    return lambda: rotate(X, RopeSpec(8), **options)


def fit(name: str, gate: Any) -> Callable[[], object]:
    return lambda: public("rotate")(total)(name, HEADS, [gate], CHANNELS)


test_activations = refusals(
    ValueError={
        "[rotate] act must be one of none, relu": turn(act="swish"),
        "[rotate] act must be given as RMSNorm(weight), or RMSNorm()": [
            turn(act="rms_norm"),
            turn(act="rmsnorm"),
        ],
        "[rotate_qk] act must be one activation, or a pair for q and k, but got 3": (
            lambda: rotate_qk(X, X, RopeSpec(8), act=("silu",) * 3)
        ),
        "[rotate] inverse must be False with an act": turn(act="exp", inverse=True),
        "[rotate] the weight of RMSNorm for x must have shape (8,) or (2, 8)": [
            turn(act=RMSNorm(torch.ones(7))),
            turn(act=RMSNorm(torch.ones(3, 8))),
        ],
        "[rotate] the weight of RMSNorm is on meta but x is on cpu": (
            turn(act=RMSNorm(torch.ones(8, device="meta")))
        ),
        "[RMSNorm] weight must have shape": lambda: RMSNorm(torch.ones(1, 2, 3)),
        "[RMSNorm] eps must be finite and at least 0": lambda: RMSNorm(eps=-1.0),
        "[rotate] a result written to out has no gradient, but act or gate require one": (
            turn(gate=Exp(torch.zeros(8, requires_grad=True)), out=torch.empty_like(X))
        ),
    },
    TypeError={
        "[rotate] act must be a single value for one tensor": turn(act=("silu", None)),
        "[rotate] gate must be a single value for one tensor": turn(gate=(None, None)),
        "[rotate] act must be None, one of none": turn(act=3),
        "pass the module's weight: RMSNorm(module.weight, eps=...)": [
            turn(act=MODULE),
            lambda: RMSNorm(MODULE),
        ],
        "[rotate] gate must be None, a gate": turn(gate=2.0),
        "[RMSNorm] weight must be a floating tensor": lambda: RMSNorm(LONG),
        "[RMSNorm] eps must be a number": lambda: RMSNorm(eps="1"),
        "[RMSNorm] eps must be a number but got None; None of torch.nn.RMSNorm is": (
            lambda: RMSNorm(eps=None)
        ),
        "[RMSNorm] unit_offset must be a bool": lambda: RMSNorm(unit_offset=1),
    },
)
test_gates = refusals(
    ValueError={
        "[Scalar] value must be positive": lambda: Scalar(0.0),
        "[Scalar] value must be finite": lambda: Scalar(-(10**400)),
        "[Scalar] value must have shape ()": lambda: Scalar(torch.zeros(2)),
        "[Exp] gamma must have shape (channels,)": lambda: Exp(torch.zeros(1, 2, 8)),
        "[Exp] gamma must have 1 or 8 channels but got 7": (
            lambda: Exp(torch.zeros(7)).factor(CHANNELS)
        ),
        "[Exp] gamma must have 1 or 4 pairs but got 8": (
            lambda: Exp(torch.zeros(8), tied="pair").factor(CHANNELS)
        ),
        "[Slope] tied must be None or 'pair'": lambda: Slope(torch.zeros(8), tied="head"),
        "[Slope] positions must be given": lambda: Slope(torch.zeros(8)).factor(CHANNELS),
        "[Given] log must have shape (tokens, heads, channels) or": lambda: Given(X[0, 0]),
        "[XPos] scale_base must be positive": lambda: XPos(0, scale_base=0),
        "[XPos] smoothing must be positive": lambda: XPos(0, smoothing=-1),
        "[XPos] centre must be finite": lambda: XPos(math.inf),
        "[XPos] positions must lie within 36260 of the centre 0, or the factor overflows float32": (
            lambda: XPos(centre=0).factor(CHANNELS, FAR)
        ),
        "within 4532 of the centre 0, or the factor overflows float16": (
            lambda: XPos(centre=0).factor(CHANNELS, FAR // 10, torch.float16)
        ),
        "[rotate] the gate Exp must have 1 or 3 heads for q but got 2": (
            fit("q", Exp(torch.zeros(2, 8)))
        ),
        "[rotate] the gate Given must have 1 or 5 tokens for k but got 4": (
            fit("k", Given(torch.zeros(4, 1, 1)))
        ),
        "[rotate] the gate Given must have 1 or 2 rows": fit("k", Given(torch.zeros(3, 1, 1, 1))),
        "[rotate] gamma of the gate Exp is on meta but q is on cpu": (
            fit("q", Exp(torch.zeros(8, device="meta")))
        ),
    },
    TypeError={
        "[Scalar] value must be a number": lambda: Scalar("1"),
        "[Exp] gamma must be a floating tensor": lambda: Exp(LONG),
        "[rotate] gate must be None, a gate of tightrope.gates, or a pair": (
            lambda: public("rotate")(pair)("silu")
        ),
    },
)
TRIPLES = "[Axes] pairs must be a sequence of (axis, index, dim)"
test_axes = refusals(
    ValueError={
        "[Axes] count must be at least 1": lambda: Axes(0, ()),
        TRIPLES: lambda: Axes(1, ((0, 0),)),
        "[Axes] axis must lie in [0, 2) but got 2 in (2, 0, 4)": lambda: Axes(2, ((2, 0, 4),)),
        "[Axes] axis must lie in [0, 2) but got -1": lambda: Axes(2, ((-1, 0, 4),)),
        "[Axes] dim must be even and positive": [
            lambda: Axes(1, ((0, 0, 3),)),
            lambda: Axes(1, ((0, 0, 0),)),
        ],
        "[Axes] index must lie in [0, 2), the frequencies of 4 channels": [
            lambda: Axes(1, ((0, 2, 4),)),
            lambda: Axes(1, ((0, -1, 4),)),
        ],
        "[Axes.sections] sizes must hold at least one number of pairs": lambda: Axes.sections(()),
        "[Axes.blocks] sizes must hold at least one number of pairs, none negative": (
            lambda: Axes.blocks((4, -1))
        ),
        "[Axes.sections] sizes must fit pairs 0 to 63 when interleaved but axis 1 would reach pair 70": (
            lambda: Axes.sections((16, 24, 24), interleaved=True)
        ),
        "[Axes.strided] count must be at least 1": lambda: Axes.strided(0, 4),
        "[Axes.strided] pairs must be at least 0 and a multiple of count": [
            lambda: Axes.strided(3, 32),
            lambda: Axes.strided(2, -2),
        ],
    },
    TypeError={
        "[Axes] count must be an int": [lambda: Axes(True, ()), lambda: Axes(2.0, ())],
        TRIPLES: [lambda: Axes(1, 7), lambda: Axes(1, (5,))],
        "[Axes] each of axis, index and dim must be an int": lambda: Axes(1, ((0, 0.5, 4),)),
        "[Axes.sections] sizes must be a sequence of ints, one per axis": [
            lambda: Axes.sections(16),
            lambda: Axes.sections("16"),
        ],
        "[Axes.blocks] a size must be an int": lambda: Axes.blocks((4, 2.5)),
        "[Axes.sections] interleaved must be a bool": lambda: Axes.sections((4,), interleaved=1),
        "[Axes.strided] pairs must be an int": lambda: Axes.strided(2, "32"),
    },
)
