"""`out=`: write results directly into a cache."""

from functools import partial

import pytest
import torch

from tests.support import helpers
from tests.support.helpers import refusals
from tightrope import RopeSpec
from tightrope.functional import rotate, rotate_qk
from tightrope.ops import schema

noise = partial(helpers.noise, dtype=torch.float32)


SPEC = RopeSpec(12, rotary_dim=8, start=2)
BACKENDS = [None, "reference"]


def slots(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return result tensors for x (2, 3, 5, 12), with the strides of different kinds of caches."""
    full = {"dtype": x.dtype}
    return {
        "contiguous": torch.full((2, 3, 5, 12), 7.0, **full),
        "slot of (batch, heads, seq, dim)": torch.full((4, 3, 50, 12), 7.0, **full)[1:3, :, 20:25],
        "slot of (batch, seq, heads, dim)": torch.full((2, 50, 3, 12), 7.0, **full)[
            :, 20:25
        ].transpose(1, 2),
        "slot of (seq, batch, heads, dim)": torch.full((50, 2, 3, 12), 7.0, **full)[20:25].permute(
            1, 2, 0, 3
        ),
        "every second channel": torch.full((2, 3, 5, 24), 7.0, **full)[..., ::2],
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_out_is_the_result_and_nothing_else_changes(dtype, inverse, backend) -> None:
    x = noise(2, 3, 5, 12, dtype=dtype)
    before = x.clone()
    want = rotate(x, SPEC, 1000, inverse=inverse, backend=backend)
    for name, slot in slots(x).items():
        base = slot if slot._base is None else slot._base
        mark = torch.zeros_like(base, dtype=torch.bool)
        mark.as_strided(slot.shape, slot.stride(), slot.storage_offset()).fill_(True)
        version = slot._version
        got = rotate(x, SPEC, 1000, inverse=inverse, out=slot, backend=backend)
        assert got is slot, name
        assert torch.equal(slot, want), name
        assert torch.equal(x, before), name
        assert (base[~mark] == 7.0).all(), name
        assert slot._version > version, name


def test_queries_and_keys() -> None:
    q, k = noise(2, 5, 6, 12).transpose(1, 2), noise(2, 5, 2, 12, seed=1).transpose(1, 2)
    cache = torch.zeros(2, 2, 50, 12)
    out = torch.empty(2, 6, 5, 12)
    y, z = rotate_qk(q, k, SPEC, 20, out=(out, cache[:, :, 20:25]))
    assert y is out
    want = rotate_qk(q, k, SPEC, 20)
    assert torch.equal(y, want[0])
    assert torch.equal(z, want[1])
    assert torch.equal(cache[:, :, 20:25], want[1])
    y, none = rotate_qk(q, None, SPEC, 20, out=(torch.empty_like(out), None))
    assert none is None
    assert torch.equal(y, want[0])


def test_slices_of_one_buffer_may_be_in_and_out() -> None:
    buffer = noise(2, 5, 6, 12)
    x, out = buffer[:, :, :3], buffer[:, :, 3:]
    for backend in BACKENDS:
        want = rotate(x, SPEC, layout="bshd", backend=backend)
        rotate(x, SPEC, layout="bshd", out=out, backend=backend)
        assert torch.equal(out, want)


def test_under_inference_mode_compile_and_vmap() -> None:
    x = noise(2, 3, 5, 12)
    want = rotate(x, SPEC, 9)

    def function(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return rotate(x, SPEC, 9, out=cache[:, :, 2:7])

    with torch.inference_mode():
        assert torch.equal(function(x, torch.zeros(2, 3, 9, 12)), want)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    cache = torch.zeros(2, 3, 9, 12)
    assert torch.equal(compiled(x, cache), want)
    assert torch.equal(cache[:, :, 2:7], want)
    outs = torch.zeros(2, 3, 5, 12)
    torch.vmap(lambda x, out: rotate(x, SPEC, 9, layout="bsd", out=out))(x, outs)
    assert torch.equal(outs, want)
    raw = torch.zeros(2, 3, 5, 12)
    rotation = SPEC.at(9)
    arguments = (
        rotation.angles.words,
        None,
        None,
        9,
        schema.Options(layout=4, start=2).pack(),
        1.0,
    )
    torch.vmap(lambda x, out: schema.rotate_into(x, None, out, None, *arguments) or out)(x, raw)
    assert torch.equal(raw, want)
    call = (x[0].clone(), None, raw[0].clone(), None, *arguments)
    torch.library.opcheck(schema.rotate_into, call)


def test_the_raw_operator_refuses_what_it_cannot_do() -> None:
    x = noise(2, 3, 5, 12)
    arguments = (SPEC.at().angles.words, None, None, 0, schema.Options(start=2).pack(), 1.0)
    with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
        schema.rotate_into(x.clone().requires_grad_(), None, x.clone(), None, *arguments)
    with pytest.raises(RuntimeError, match="memory overlaps"):
        schema.rotate_into(x[:, :, :4], None, x[:, :, 1:], None, *arguments)


X, Y, OUT = torch.zeros(2, 3, 5, 12), torch.zeros(2, 3, 5, 12), torch.zeros(2, 3, 5, 12)
LIKE_X = "[rotate] out must have the shape, dtype and device of x"
IS_X = "x: float32[2, 3, 5, 12]"
OVERLAP = "out must not overlap itself or the input in memory; to rotate in place call"
PAIR = (
    "[rotate_qk] out must be a pair of tensors for q and k, with None for a k that is None, but got"
)
VALUES = {
    f"{LIKE_X} ({IS_X}, out: float32[2, 3, 4, 12]).": lambda: rotate(X, SPEC, out=OUT[:, :, :4]),
    f"{LIKE_X} ({IS_X}, out: float64[2, 3, 5, 12]).": lambda: rotate(X, SPEC, out=OUT.double()),
    f"{LIKE_X}; to write float8, pass scale= ({IS_X}, out: float8_e4m3fn[2, 3, 5, 12]).": (
        lambda: rotate(X, SPEC, out=OUT.to(torch.float8_e4m3fn))
    ),
    f"{LIKE_X} but is on meta, not cpu ({IS_X}, out: float32[2, 3, 5, 12]).": (
        lambda: rotate(X, SPEC, out=X.to("meta"))
    ),
    "[rotate_qk] out must hold one tensor for each of q, k but got 1.": (
        lambda: rotate_qk(X, X.clone(), SPEC, out=(OUT, None))
    ),
    "[rotate_qk] out must hold one tensor for each of q, k but got 3.": (
        lambda: rotate_qk(X, X.clone(), SPEC, out=(OUT, OUT.clone(), OUT.clone()))
    ),
    "[rotate] a result written to out has no gradient, but x or out requires one; use "
    f"torch.no_grad(), or omit out ({IS_X}, out: float32[2, 3, 5, 12]).": [
        lambda: rotate(X.clone().requires_grad_(), SPEC, out=OUT),
        lambda: rotate(X, SPEC, out=OUT.clone().requires_grad_()),
    ],
    f"[rotate] {OVERLAP} rotate_ (out[0]: float32[2, 3, 5, 12]).": [
        lambda: rotate(X, SPEC, out=X.view(-1).view(3, 2, 5, 12).transpose(0, 1)),
        lambda: rotate(X, SPEC, out=torch.zeros(1, 1, 1, 12).expand(2, 3, 5, 12)),
    ],
    f"[rotate_qk] {OVERLAP} rotate_qk_ (out[0]: float32[2, 3, 5, 12], "
    "out[1]: float32[2, 3, 5, 12]).": [
        lambda: rotate_qk(X, X.clone(), SPEC, out=(OUT, OUT)),
        lambda: rotate_qk(X, Y, SPEC, out=(Y, X)),
    ],
}
TYPES = {
    "[rotate] out must be a tensor for x but got 3.": lambda: rotate(X, SPEC, out=3),
    f"{PAIR} 3.": lambda: rotate_qk(X, X.clone(), SPEC, out=3),
    f"{PAIR} None for q; pass torch.empty_like(q).": (
        lambda: rotate_qk(X, None, SPEC, out=(None, 3))
    ),
    "[rotate] out must be a dense tensor but got one that is sparse_coo.": (
        lambda: rotate(X, SPEC, out=X.to_sparse())
    ),
}
test_sentence = refusals(ValueError=VALUES, TypeError=TYPES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_an_input_may_be_its_own_out(backend: str | None, layout: str) -> None:
    """q is rotated in place while k goes to a slot of a cache, also with an act; the bits are those of new tensors."""
    q, k, cache = noise(2, 3, 5, 12), noise(2, 3, 5, 12), noise(2, 3, 9, 12)
    out = cache[:, :, 2:7]
    for act in (None, "silu"):
        want = rotate_qk(q, k, SPEC, 3, act=act, layout=layout, backend=backend)
        written = q.clone(), out
        found = rotate_qk(
            written[0], k, SPEC, 3, act=act, layout=layout, out=written, backend=backend
        )
        for x, y, z in zip(want, found, written):
            assert y is z
            assert torch.equal(x, y)


def test_compiled_code_may_drop_the_copy_of_an_input() -> None:
    """Inductor drops a clone whose only use is to be rotated into the tensor that it copies."""
    x = noise(2, 3, 5, 12)
    want = rotate(x, SPEC, 3)

    @torch.compile
    def through_a_copy(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.clone(), SPEC, 3, out=x)

    assert torch.equal(through_a_copy(x), want)
    assert torch.equal(x, want)


def test_partial_overlap_is_refused_unchanged() -> None:
    buffer = noise(2, 3, 9, 12)
    before = buffer.clone()
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=r"\[rotate\] out must not overlap"):
            rotate(buffer[:, :, :5], SPEC, out=buffer[:, :, 3:8], backend=backend)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_negated_views_are_refused_before_anything_is_written(backend: str | None) -> None:
    x, out = noise(2, 3, 5, 12), torch.full((2, 3, 5, 12), 7.0)
    negated = torch.complex(x, x).conj().imag
    before = negated.clone()
    text = (
        "out must not be a negated view (such as the imaginary part of a conjugate); call "
        "out.resolve_neg() first (out: float32[2, 3, 5, 12])."
    )
    with helpers.refused(ValueError, f"[rotate] {text}"):
        rotate(x, SPEC, out=negated, backend=backend)
    with helpers.refused(ValueError, f"[rotate_qk] {text}"):
        rotate_qk(x, x.clone(), SPEC, out=(out, negated), backend=backend)
    assert (out == 7.0).all()
    assert torch.equal(negated, before)
