"""Error sentences for invalid specs, positions, tensors and layouts."""

from functools import partial

import pytest
import torch

from tests.support.helpers import refusals, refused
from tightrope import RopeSpec, backends, nn, positions
from tightrope.functional import (
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)

SPEC = RopeSpec(8)
X = torch.zeros(2, 3, 5, 8)
FLOATING = "float32, float64, bfloat16 or float16"
REAL = "int32, int64, float32 or float64"
IS_X = "x: float32[2, 3, 5, 8]"
LAYOUT = "layout must be one of bhsd, bshd, sbhd, thd, bsd, sd but got"
ONE_EACH = "positions must hold one position for each of"
NOT_REAL = f"positions must be {REAL} (positions:"
NO_OFFSET = "[Positions] offset must be an int but got"
FAR = "offset must fit in 64 bits but got"
TOKENS = "q and k must have the same number of tokens but got 5 and 4; rotate them one by one"
IDS = "[rotary_pos_embedding] position_ids must have shape (5,) (position_ids:"
SEQ_DIM = "[RotaryPositionalEmbedding] seq_dim must"


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


TENSORS = {
    f"[rotate] {LAYOUT} 'bhds'.": lambda: rotate(X, SPEC, layout="bhds"),
    f"[rotate] {LAYOUT} ['sd'].": lambda: rotate(X, SPEC, layout=["sd"]),
    "[rotate] x must have 3 dimensions for layout 'bsd' but got 4; layouts with 4 dimensions: "
    f"'bhsd', 'bshd', 'sbhd' ({IS_X}).": lambda: rotate(X, SPEC, layout="bsd"),
    "[rotate] x must have 4 dimensions for layout 'bhsd' but got 5 "
    "(x: float32[1, 2, 3, 5, 8]).": lambda: rotate(X[None], SPEC),
    f"[rotate] x must have head_dim 16 in its last dimension but got 8 ({IS_X}).": lambda: rotate(
        X, RopeSpec(16)
    ),
    "[rotate] x must have head_dim 4 in its last dimension but got 8; to rotate 4 of 8 channels, "
    f"make the spec with head_dim=8 and rotary_dim=4 ({IS_X}).": lambda: rotate(X, RopeSpec(4)),
    "[rotate] the prepared rotation is on meta but x is on cpu; call spec.at(positions, "
    "device='cpu').": lambda: rotate(X, SPEC.at(3, device="meta")),
    f"[rotate_qk] {TOKENS}, or pass layout='bshd' if their tokens are in dimension 1 "
    "(q: float32[2, 3, 5, 8], k: float32[2, 3, 4, 8]).": [
        lambda: rotate_qk(X, X[:, :, :4], SPEC),
        lambda: rotate_qk(X, X[:, :, :4], SPEC.at(0), layout="bhsd"),
    ],
    f"[rotate_qk] {TOKENS} (q: float32[2, 3, 5, 8], k: float32[2, 1, 4, 8]).": (
        lambda: rotate_qk(X, X[:, :1, :4], SPEC)
    ),
    "[rotate_qk_] q and k must have the same number of rows but got 2 and 1; rotate them one by "
    "one (q: float32[2, 3, 5, 8], k: float32[1, 3, 5, 8]).": lambda: rotate_qk_(X, X[:1], SPEC),
    "[rotate_qk] q and k must share dtype and device but got torch.float32 on cpu and "
    "torch.float64 on cpu; rotate them one by one, or pass k.to(q) (q: float32[2, 3, 5, 8], "
    "k: float64[2, 3, 5, 8]).": lambda: rotate_qk(X, X.double(), SPEC),
    "[rotate_qk] k must have head_dim 8 in its last dimension but got 16 "
    "(k: float32[2, 3, 5, 16]).": lambda: rotate_qk(X, torch.zeros(2, 3, 5, 16), SPEC),
    "[rotate] backend must be one of cpu, triton, reference but got 'cuda'.": (
        lambda: rotate(X, SPEC, backend="cuda")
    ),
    "[rotate_] x must not overlap itself in memory (an expanded tensor?); rotate a clone of it "
    f"({IS_X}).": lambda: rotate_(torch.zeros(1, 1, 1, 8).expand(2, 3, 5, 8), SPEC),
}
POSITIONS = {
    f"[rotate] {ONE_EACH} 5 tokens but got 4 (layout 'bhsd' has its tokens in dimension 2) "
    f"({IS_X}, positions: int64[4]).": lambda: rotate(X, SPEC, ids(4)),
    f"[rotate] {ONE_EACH} 3 tokens but got 5 (layout 'bshd' has its tokens in dimension 1) "
    f"({IS_X}, positions: int64[5]).": lambda: rotate(X, SPEC, ids(5), layout="bshd"),
    f"[rotate] {ONE_EACH} 5 tokens but got 3 (layout 'thd' has its tokens in dimension 0); for sequences packed "
    "one after the other pass positions.packed(cu_seqlens) (x: float32[5, 3, 8], positions: int64[3]).": (
        lambda: rotate(X[0].transpose(0, 1), SPEC, ids(3), layout="thd")
    ),
    f"[rotate] {ONE_EACH} 5 tokens but got 1 (layout 'bhsd' has its tokens in dimension 2) "
    f"({IS_X}, positions: int64[1]).": lambda: rotate(X, SPEC, ids(1)),
    f"[rotate] {ONE_EACH} 5 tokens but got 2 (layout 'bhsd' has its tokens in dimension 2); for "
    "one offset per row pass positions.per_row(ids), ids of shape (2,) "
    f"({IS_X}, positions: int64[2]).": lambda: rotate(X, SPEC, ids(2)),
    f"[rotate] positions must have 1 or 2 rows but got 3 ({IS_X}, positions: int64[3, 5]).": (
        lambda: rotate(X, SPEC, ids(3, 5))
    ),
    "[rotate] positions must have 1 row but got 3 (layout 'sd' has no rows) (x: float32[5, 8], "
    "positions: int64[3, 5]).": lambda: rotate(X[0, 0], SPEC, ids(3, 5), layout="sd"),
    f"[rotate] positions must have 1 or 2 rows but got 3 ({IS_X}, positions: int64[3, 1]).": (
        lambda: rotate(X, SPEC, positions.per_row(ids(3)))
    ),
    "[rotate] positions must be None with a prepared rotation, which has its own; call "
    "spec.at(positions).": lambda: rotate(X, SPEC.at(3), 4),
    f"[Positions] {FAR} {2**64}.": lambda: positions.Positions(offset=2**64),
    f"[Positions] {FAR} {2**63 + 2}.": lambda: positions.shard(2**63 - 2, 1, 2, tokens=8),
    "[Positions] ids must have shape (axes, rows, tokens) or (axes, rows, tokens, heads) (ids: int64[2, 5]).": (
        lambda: positions.Positions(ids(2, 5), add_index=False)
    ),
    "[Positions] ids must have shape (axes, rows, 1) with add_index=True (ids: int64[1, 2, 5]).": (
        lambda: positions.Positions(ids(1, 2, 5))
    ),
}
OTHERS = {
    "[rotary_pos_embedding] embed_dim must be even but got 63 (input_: float32[2, 8, 63]).": (
        lambda: rotary_pos_embedding(torch.zeros(2, 8, 63))
    ),
    "[rotary_pos_embedding] input_ must have shape (..., seq_len, embed_dim) "
    "(input_: float32[8]).": lambda: rotary_pos_embedding(torch.zeros(8)),
    f"{IDS} int64[4], input_: float32[2, 3, 5, 8]).": lambda: rotary_pos_embedding(X, ids(4)),
    f"{IDS} int64[2, 5], input_: float32[2, 3, 5, 8]).": lambda: rotary_pos_embedding(X, ids(2, 5)),
    **{
        f"{SEQ_DIM} name a dimension of x other than the last but got {dim} ({IS_X}).": partial(
            nn.RotaryPositionalEmbedding(8), X, seq_dim=dim
        )
        for dim in (4, -1)
    },
    "[RotaryPositionalEmbedding] x must have at least 16 channels in its last dimension but got 8 "
    f"({IS_X}).": lambda: nn.RotaryPositionalEmbedding(16)(X),
}
TYPES = {
    f"[rotate_] x must be {FLOATING} but got int32 (x: int32[2, 3, 5, 8]).": (
        lambda: rotate_(X.int(), SPEC)
    ),
    f"[rotate] x must be {FLOATING} but got complex64 (x: complex64[2, 3, 5, 8]).": (
        lambda: rotate(X.to(torch.complex64), SPEC)
    ),
    "[rotate] x must be a tensor but got [1.0].": lambda: rotate([1.0], SPEC),
    "[rotate_qk] k must be float32, float64, bfloat16 or float16 but got int64; pass ids as positions= (k: int64[5]).": (
        lambda: rotate_qk(X, torch.arange(5), SPEC)
    ),
    "[rotate] positions must be int32, int64, float32 or float64; positions.left_padded(mask) makes them from an "
    "attention mask (positions: bool[2, 5]).": lambda: rotate(X, SPEC, torch.ones(2, 5) > 0),
    "[rotate] positions must be int32, int64, float32 or float64; pass positions.long() (positions: int16[5]).": (
        lambda: rotate(X, SPEC, torch.ones(5).short())
    ),
    "[rotate] spec must be a RopeSpec or a prepared rotation (RopeSpec.at), before the positions, but got 8.": (
        lambda: rotate(X, 8)
    ),
    **{
        f"{NO_OFFSET} {shown}; give fractions and tensors as ids.": partial(
            positions.Positions, offset=offset
        )
        for shown, offset in (("1.5", 1.5), ("int64[]", torch.tensor(3)), ("True", True))
    },
    "[Positions] add_index must be a bool but got 'no'.": (
        lambda: positions.Positions(add_index="no")
    ),
    f"[rotary_pos_embedding] positions must be {REAL}; make them in int64, as narrow floats do not hold all integers above 256 or 2048 (positions: float16[5]).": (
        lambda: rotary_pos_embedding(X, ids(5, dtype=torch.float16))
    ),
    f"[rotary_pos_embedding] input_ must be {FLOATING} but got int64 "
    "(input_: int64[2, 3, 5, 8]).": lambda: rotary_pos_embedding(X.long()),
    "[rotary_pos_embedding] input_ must be a tensor but got None.": (
        lambda: rotary_pos_embedding(None)
    ),
    "[RotaryPositionalEmbedding] x must be a tensor but got 3.": (
        lambda: nn.RotaryPositionalEmbedding(16)(3)
    ),
    **{
        f"{SEQ_DIM} be an int but got {dim!r}.": partial(nn.RotaryPositionalEmbedding(8), X, dim)
        for dim in ("a", None, 1.5, True)
    },
}
test_sentence = refusals(ValueError=TENSORS | POSITIONS | OTHERS, TypeError=TYPES)


def test_bad_input_loses_nothing() -> None:
    x = torch.arange(240.0).reshape(2, 3, 5, 8)
    before = x.clone()
    for arguments in ((RopeSpec(16),), (SPEC, ids(4)), (SPEC, True), (SPEC.at(1), 2), (8,)):
        with pytest.raises((ValueError, TypeError)):
            rotate_(x, *arguments)
    with pytest.raises(ValueError, match="same number of tokens"):
        rotate_qk_(x, x[:, :, :4].clone(), SPEC)
    assert torch.equal(x, before)


def test_a_forced_backend_that_cannot_run_raises_with_the_reason() -> None:
    reason = backends.why_not()["cpu"] or "the tensor is on meta"
    text = f"[rotate] backend 'cpu' cannot run: {reason} (tensor: float32[2, 3, 5, 8])."
    with refused(NotImplementedError, text):
        rotate(X.to("meta"), SPEC, backend="cpu")
