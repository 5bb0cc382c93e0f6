"""Error sentences for invalid specs, positions, tensors and layouts."""

import re
from functools import partial

import pytest
import torch

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


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


# Name -> (call, type of the error, its whole sentence).
CASES = {
    "odd rotary_dim": (
        lambda: RopeSpec(8, rotary_dim=7),
        ValueError,
        "[RopeSpec] rotary_dim must be even but got 7.",
    ),
    "odd head": (
        lambda: RopeSpec(7),
        ValueError,
        "[RopeSpec] rotary_dim must be even but got 7, its default of head_dim - start.",
    ),
    "negative head": (
        lambda: RopeSpec(-4),
        ValueError,
        "[RopeSpec] head_dim must not be negative but got -4.",
    ),
    "slice outside the head": (
        lambda: RopeSpec(8, rotary_dim=6, start=4),
        ValueError,
        "[RopeSpec] channels [start, start + rotary_dim) must lie in [0, 8) but got [4, 10).",
    ),
    "negative start": (
        lambda: RopeSpec(8, rotary_dim=4, start=-2),
        ValueError,
        "[RopeSpec] channels [start, start + rotary_dim) must lie in [0, 8) but got [-2, 2).",
    ),
    "NaN base": (
        lambda: RopeSpec(8, base=float("nan")),
        ValueError,
        "[RopeSpec] base must be positive and finite, above 1e-18 and below 1e300, but got nan.",
    ),
    "infinite base": (
        lambda: RopeSpec(8, base=float("inf")),
        ValueError,
        "[RopeSpec] base must be positive and finite, above 1e-18 and below 1e300, but got inf.",
    ),
    "zero base": (
        lambda: RopeSpec(8, base=0),
        ValueError,
        "[RopeSpec] base must be positive and finite, above 1e-18 and below 1e300, but got 0.",
    ),
    "negative base": (
        lambda: RopeSpec(8, base=-1.0),
        ValueError,
        "[RopeSpec] base must be positive and finite, above 1e-18 and below 1e300, but got -1.0.",
    ),
    "huge base": (
        lambda: RopeSpec(8, base=10**305),
        ValueError,
        "[RopeSpec] base must be positive and finite, above 1e-18 and below 1e300, but got "
        f"{10**305}.",
    ),
    "tiny base": (
        lambda: RopeSpec(8, base=1e-30),
        ValueError,
        "[RopeSpec] base must be positive and finite, above 1e-18 and below 1e300, but got 1e-30.",
    ),
    "base that is a string": (
        lambda: RopeSpec(8, base="1e4"),
        TypeError,
        "[RopeSpec] base must be a number but got '1e4'.",
    ),
    "fractional head": (
        lambda: RopeSpec(8.0),
        TypeError,
        "[RopeSpec] head_dim must be an int but got 8.0.",
    ),
    "head of bool": (
        lambda: RopeSpec(True),
        TypeError,
        "[RopeSpec] head_dim must be an int but got True.",
    ),
    "interleaved by name": (
        lambda: RopeSpec(8, interleaved="neox"),
        TypeError,
        "[RopeSpec] interleaved must be a bool but got 'neox'.",
    ),
    "unknown layout": (
        lambda: rotate(X, SPEC, layout="bhds"),
        ValueError,
        "[rotate] layout must be one of bhsd, bshd, sbhd, thd, bsd, sd but got 'bhds'.",
    ),
    "layout that is not a string": (
        lambda: rotate(X, SPEC, layout=["sd"]),
        ValueError,
        "[rotate] layout must be one of bhsd, bshd, sbhd, thd, bsd, sd but got ['sd'].",
    ),
    "layout of another rank": (
        lambda: rotate(X, SPEC, layout="bsd"),
        ValueError,
        "[rotate] x must have 3 dimensions for layout 'bsd' but got 4; layouts with 4 dimensions: "
        "'bhsd', 'bshd', 'sbhd' (x: float32[2, 3, 5, 8]).",
    ),
    "rank of no layout": (
        lambda: rotate(X[None], SPEC),
        ValueError,
        "[rotate] x must have 4 dimensions for layout 'bhsd' but got 5 "
        "(x: float32[1, 2, 3, 5, 8]).",
    ),
    "integer x": (
        lambda: rotate_(X.int(), SPEC),
        TypeError,
        f"[rotate_] x must be {FLOATING} but got int32 (x: int32[2, 3, 5, 8]).",
    ),
    "complex x": (
        lambda: rotate(X.to(torch.complex64), SPEC),
        TypeError,
        f"[rotate] x must be {FLOATING} but got complex64 (x: complex64[2, 3, 5, 8]).",
    ),
    "x that is not a tensor": (
        lambda: rotate([1.0], SPEC),
        TypeError,
        "[rotate] x must be a tensor but got [1.0].",
    ),
    "head_dim": (
        lambda: rotate(X, RopeSpec(16)),
        ValueError,
        "[rotate] x must have head_dim 16 in its last dimension but got 8 "
        "(x: float32[2, 3, 5, 8]).",
    ),
    "head_dim of a part": (
        lambda: rotate(X, RopeSpec(4)),
        ValueError,
        "[rotate] x must have head_dim 4 in its last dimension but got 8; to rotate 4 of 8 channels, "
        "make the spec with head_dim=8 and rotary_dim=4 (x: float32[2, 3, 5, 8]).",
    ),
    "no spec": (
        lambda: rotate(X, 8),
        TypeError,
        "[rotate] spec must be a RopeSpec or a prepared rotation (RopeSpec.at) but got int.",
    ),
    "too few ids": (
        lambda: rotate(X, SPEC, ids(4)),
        ValueError,
        "[rotate] positions must hold one position for each of 5 tokens but got 4 (layout 'bhsd' "
        "has its tokens in dimension 2) (x: float32[2, 3, 5, 8], positions: int64[4]).",
    ),
    "ids for another layout": (
        lambda: rotate(X, SPEC, ids(5), layout="bshd"),
        ValueError,
        "[rotate] positions must hold one position for each of 3 tokens but got 5 (layout 'bshd' "
        "has its tokens in dimension 1) (x: float32[2, 3, 5, 8], positions: int64[5]).",
    ),
    "one id for many tokens": (
        lambda: rotate(X, SPEC, ids(1)),
        ValueError,
        "[rotate] positions must hold one position for each of 5 tokens but got 1 (layout 'bhsd' "
        "has its tokens in dimension 2) (x: float32[2, 3, 5, 8], positions: int64[1]).",
    ),
    "one offset per row as ids": (
        lambda: rotate(X, SPEC, ids(2)),
        ValueError,
        "[rotate] positions must hold one position for each of 5 tokens but got 2 (layout 'bhsd' "
        "has its tokens in dimension 2); for one offset per row pass positions.per_row(…) "
        "(x: float32[2, 3, 5, 8], positions: int64[2]).",
    ),
    "rows of ids": (
        lambda: rotate(X, SPEC, ids(3, 5)),
        ValueError,
        "[rotate] positions must have 1 or 2 rows but got 3 "
        "(x: float32[2, 3, 5, 8], positions: int64[1, 3, 5]).",
    ),
    "rows of ids without rows": (
        lambda: rotate(X[0, 0], SPEC, ids(3, 5), layout="sd"),
        ValueError,
        "[rotate] positions must have 1 row but got 3 (layout 'sd' has no rows) "
        "(x: float32[5, 8], positions: int64[1, 3, 5]).",
    ),
    "rows of offsets": (
        lambda: rotate(X, SPEC, positions.per_row(ids(3))),
        ValueError,
        "[rotate] positions must have 1 or 2 rows but got 3 "
        "(x: float32[2, 3, 5, 8], positions: int64[1, 3, 1]).",
    ),
    "float16 ids": (
        lambda: rotate(X, SPEC, ids(5, dtype=torch.float16)),
        TypeError,
        "[rotate] positions must be int32, int64, float32 or float64 (positions: float16[5]).",
    ),
    "bfloat16 ids": (
        lambda: rotate(X, SPEC, ids(5, dtype=torch.bfloat16)),
        TypeError,
        "[rotate] positions must be int32, int64, float32 or float64 (positions: bfloat16[5]).",
    ),
    "bool ids": (
        lambda: SPEC.at(ids(5, dtype=torch.bool)),
        TypeError,
        "[at] positions must be int32, int64, float32 or float64 (positions: bool[5]).",
    ),
    "int16 ids": (
        lambda: rotate(X, SPEC, ids(5, dtype=torch.int16)),
        TypeError,
        "[rotate] positions must be int32, int64, float32 or float64 (positions: int16[5]).",
    ),
    "ids of rank 0": (
        lambda: rotate(X, SPEC, torch.tensor(3)),
        ValueError,
        "[rotate] positions must have shape (tokens,) or (rows, tokens); pass one offset as an int, "
        "or a tensor x of one as positions.per_row(x[None]) (positions: int64[]).",
    ),
    "ids of rank 3": (
        lambda: rotate(X, SPEC, ids(3, 2, 5)),
        ValueError,
        "[rotate] positions must have shape (tokens,) or (rows, tokens); see "
        "positions.multi_axis (positions: int64[3, 2, 5]).",
    ),
    "axes of ids": (
        lambda: rotate(X, SPEC, positions.multi_axis(ids(3, 5))),
        ValueError,
        "[rotate] positions must have 1 axis for this spec but got 3; pass axes= to RopeSpec, such as "
        "Axes.blocks(…) for 3 coordinates (positions: int64[3, 1, 5]).",
    ),
    "bool offset": (
        lambda: rotate(X, SPEC, True),
        TypeError,
        "[rotate] positions must not be a bool but got True.",
    ),
    "float offset": (
        lambda: rotate(X, SPEC, 0.5),
        TypeError,
        "[rotate] positions must be None, an int offset, a tensor of ids or a Positions but got "
        "float.",
    ),
    "huge offset": (
        lambda: rotate(X, SPEC, 2**63),
        ValueError,
        "[rotate] an offset must fit in 64 bits but got 9223372036854775808.",
    ),
    "offsets of rank 2": (
        lambda: positions.per_row(ids(2, 5)),
        ValueError,
        "[per_row] offsets must have shape (rows,) (offsets: int64[2, 5]).",
    ),
    "offset of rank 0": (
        lambda: positions.per_row(torch.tensor(7)),
        ValueError,
        "[per_row] offsets must have shape (rows,); one offset for all rows has shape (1,) "
        "(offsets: int64[]).",
    ),
    "offsets that are not a tensor": (
        lambda: positions.per_row([1, 2]),
        TypeError,
        "[per_row] offsets must be a tensor but got [1, 2].",
    ),
    "axes of rank 1": (
        lambda: positions.multi_axis(ids(5)),
        ValueError,
        "[multi_axis] ids must have shape (axes, tokens) or (axes, rows, tokens) (ids: int64[5]).",
    ),
    "Positions with a fractional offset": (
        lambda: positions.Positions(offset=1.5),
        TypeError,
        "[Positions] offset must be an int but got 1.5; give fractions and tensors as ids.",
    ),
    "Positions with a tensor as offset": (
        lambda: positions.Positions(offset=torch.tensor(3)),
        TypeError,
        "[Positions] offset must be an int but got int64[]; give fractions and tensors as ids.",
    ),
    "Positions with a bool as offset": (
        lambda: positions.Positions(offset=True),
        TypeError,
        "[Positions] offset must be an int but got True; give fractions and tensors as ids.",
    ),
    "Positions with a huge offset": (
        lambda: positions.Positions(offset=2**64),
        ValueError,
        "[Positions] offset must fit in 64 bits but got 18446744073709551616.",
    ),
    "Positions with a huge negative offset": (
        lambda: positions.Positions(offset=-(2**63) - 1),
        ValueError,
        "[Positions] offset must fit in 64 bits but got -9223372036854775809.",
    ),
    "a shard beyond 64 bits": (
        lambda: positions.shard(2**63 - 2, rank=1, size=2, tokens=8),
        ValueError,
        "[Positions] offset must fit in 64 bits but got 9223372036854775810.",
    ),
    "Positions with a string as add_index": (
        lambda: positions.Positions(add_index="no"),
        TypeError,
        "[Positions] add_index must be a bool but got 'no'.",
    ),
    "Positions of rank 2": (
        lambda: positions.Positions(ids(2, 5), add_index=False),
        ValueError,
        "[Positions] ids must have shape (axes, rows, tokens) (ids: int64[2, 5]).",
    ),
    "Positions with ids and add_index=True": (
        lambda: positions.Positions(ids(1, 2, 5)),
        ValueError,
        "[Positions] ids must have shape (axes, rows, 1) with add_index=True (ids: int64[1, 2, 5]).",
    ),
    "positions twice": (
        lambda: rotate(X, SPEC.at(3), 4),
        ValueError,
        "[rotate] positions must be None with a prepared rotation, which has its own; call "
        "spec.at(positions).",
    ),
    "prepared on another device": (
        lambda: rotate(X, SPEC.at(3, device="meta")),
        ValueError,
        "[rotate] the prepared rotation is on meta but x is on cpu; call "
        "spec.at(positions, device='cpu').",
    ),
    "tokens of q and k": (
        lambda: rotate_qk(X, X[:, :, :4], SPEC),
        ValueError,
        "[rotate_qk] q and k must have the same number of tokens but got 5 and 4; rotate them one "
        "by one, or pass layout='bshd' if their tokens are in dimension 1 "
        "(q: float32[2, 3, 5, 8], k: float32[2, 3, 4, 8]).",
    ),
    "layout of q and k": (
        lambda: rotate_qk(X, X[:, :, :4], SPEC.at(0), layout="bhsd"),
        ValueError,
        "[rotate_qk] q and k must have the same number of tokens but got 5 and 4; rotate them one "
        "by one, or pass layout='bshd' if their tokens are in dimension 1 "
        "(q: float32[2, 3, 5, 8], k: float32[2, 3, 4, 8]).",
    ),
    "tokens of q and k, other heads": (
        lambda: rotate_qk(X, X[:, :1, :4], SPEC),
        ValueError,
        "[rotate_qk] q and k must have the same number of tokens but got 5 and 4; rotate them one "
        "by one (q: float32[2, 3, 5, 8], k: float32[2, 1, 4, 8]).",
    ),
    "rows of q and k": (
        lambda: rotate_qk_(X, X[:1], SPEC),
        ValueError,
        "[rotate_qk_] q and k must have the same number of rows but got 2 and 1; rotate them one "
        "by one (q: float32[2, 3, 5, 8], k: float32[1, 3, 5, 8]).",
    ),
    "dtypes of q and k": (
        lambda: rotate_qk(X, X.double(), SPEC),
        ValueError,
        "[rotate_qk] q and k must share dtype and device but got torch.float32 on cpu and "
        "torch.float64 on cpu; rotate them one by one "
        "(q: float32[2, 3, 5, 8], k: float64[2, 3, 5, 8]).",
    ),
    "channels of k": (
        lambda: rotate_qk(X, torch.zeros(2, 3, 5, 16), SPEC),
        ValueError,
        "[rotate_qk] k must have head_dim 8 in its last dimension but got 16 "
        "(k: float32[2, 3, 5, 16]).",
    ),
    "unknown backend": (
        lambda: rotate(X, SPEC, backend="cuda"),
        ValueError,
        "[rotate] backend must be one of cpu, triton, reference but got 'cuda'.",
    ),
    "overlap": (
        lambda: rotate_(torch.zeros(1, 1, 1, 8).expand(2, 3, 5, 8), SPEC),
        ValueError,
        "[rotate_] x must not overlap itself in memory (an expanded tensor?); rotate a clone of it "
        "(x: float32[2, 3, 5, 8]).",
    ),
    "odd embed_dim": (
        lambda: rotary_pos_embedding(torch.zeros(2, 8, 63)),
        ValueError,
        "[rotary_pos_embedding] embed_dim must be even but got 63 (input_: float32[2, 8, 63]).",
    ),
    "one dimension": (
        lambda: rotary_pos_embedding(torch.zeros(8)),
        ValueError,
        "[rotary_pos_embedding] input_ must have shape (..., seq_len, embed_dim) "
        "(input_: float32[8]).",
    ),
    "position_ids of another length": (
        lambda: rotary_pos_embedding(X, ids(4)),
        ValueError,
        "[rotary_pos_embedding] position_ids must have shape (5,) "
        "(position_ids: int64[4], input_: float32[2, 3, 5, 8]).",
    ),
    "position_ids per row": (
        lambda: rotary_pos_embedding(X, ids(2, 5)),
        ValueError,
        "[rotary_pos_embedding] position_ids must have shape (5,) "
        "(position_ids: int64[2, 5], input_: float32[2, 3, 5, 8]).",
    ),
    "position_ids of float16": (
        lambda: rotary_pos_embedding(X, ids(5, dtype=torch.float16)),
        TypeError,
        "[rotary_pos_embedding] positions must be int32, int64, float32 or float64 "
        "(positions: float16[5]).",
    ),
    "integer input_": (
        lambda: rotary_pos_embedding(X.long()),
        TypeError,
        f"[rotary_pos_embedding] input_ must be {FLOATING} but got int64 "
        "(input_: int64[2, 3, 5, 8]).",
    ),
    "input_ that is not a tensor": (
        lambda: rotary_pos_embedding(None),
        TypeError,
        "[rotary_pos_embedding] input_ must be a tensor but got None.",
    ),
    "odd dim of the module": (
        lambda: nn.RotaryPositionalEmbedding(7),
        ValueError,
        "[RopeSpec] rotary_dim must be even but got 7, its default of head_dim - start.",
    ),
    "seq_dim outside x": (
        lambda: nn.RotaryPositionalEmbedding(8)(X, seq_dim=4),
        ValueError,
        "[RotaryPositionalEmbedding] seq_dim must name a dimension of x other than the last but "
        "got 4 (x: float32[2, 3, 5, 8]).",
    ),
    **{
        f"seq_dim {value!r}": (
            partial(nn.RotaryPositionalEmbedding(8), X, value),
            TypeError,
            f"[RotaryPositionalEmbedding] seq_dim must be an int but got {value!r}.",
        )
        for value in ("a", None, 1.5, True)
    },
    "seq_dim of the channels": (
        lambda: nn.RotaryPositionalEmbedding(8)(X, seq_dim=-1),
        ValueError,
        "[RotaryPositionalEmbedding] seq_dim must name a dimension of x other than the last but "
        "got -1 (x: float32[2, 3, 5, 8]).",
    ),
    "too few channels": (
        lambda: nn.RotaryPositionalEmbedding(16)(X),
        ValueError,
        "[RotaryPositionalEmbedding] x must have at least 16 channels in its last dimension but "
        "got 8 (x: float32[2, 3, 5, 8]).",
    ),
    "module without a tensor": (
        lambda: nn.RotaryPositionalEmbedding(16)(3),
        TypeError,
        "[RotaryPositionalEmbedding] x must be a tensor but got 3.",
    ),
}


@pytest.mark.parametrize("call, error, text", CASES.values(), ids=CASES)
def test_sentence(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()


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
    x = torch.zeros(2, 3, 5, 8, device="meta")
    missing = backends.why_not()["cpu"]
    reason = "the tensor is on meta" if missing is None else missing
    with pytest.raises(
        NotImplementedError,
        match=re.escape(
            f"[rotate] backend 'cpu' cannot run: {reason} (tensor: float32[2, 3, 5, 8])."
        ),
    ):
        rotate(x, SPEC, backend="cpu")
