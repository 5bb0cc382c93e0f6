"""`out=`: particular calls that write to given tensors; tests/laws/test_slots.py has what holds for every call."""

import pytest
import torch

from tests.support.helpers import noise, on
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.functional import rotate, rotate_qk
from tightrope.ops import schema

SPEC = RopeSpec(12, rotary_dim=8, start=2)


def x_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return noise(*(shape or (2, 3, 5, 12)), seed=seed, dtype=torch.float32)


@every_backend
def test_slices_of_one_buffer_may_be_in_and_out(backend: str) -> None:
    buffer = x_of(2, 5, 6, 12)
    x, out = buffer[:, :, :3], buffer[:, :, 3:]
    wanted = on(backend, rotate, x, SPEC, layout="bshd")
    on(backend, rotate, x, SPEC, layout="bshd", out=out)
    assert_same_bits(out, wanted)


@every_backend
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("act", [None, "silu"])
def test_an_input_may_be_its_own_out(act: str | None, layout: str, backend: str) -> None:
    """q is rotated in place while k goes to a part of a cache, also with an act; there may be no k."""
    q, k, options = x_of(), x_of(seed=1), {"layout": layout, "act": act}
    wanted = on(backend, rotate_qk, q, k, SPEC, 3, **options)
    for given in (k, None):
        out = q.clone(), None if given is None else x_of(2, 3, 9, 12)[:, :, 2:7]
        found = on(backend, rotate_qk, out[0], given, SPEC, 3, out=out, **options)
        assert found[0] is out[0]
        assert found[1] is out[1]
        assert_same_bits([y for y in found if y is not None], wanted if given is k else wanted[:1])


def test_compiled_code_may_drop_the_copy_of_an_input() -> None:
    """Inductor drops a clone whose only use is to be rotated into the tensor that it copies."""
    x = x_of()
    wanted = rotate(x, SPEC, 3)

    @torch.compile
    def through_a_copy(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.clone(), SPEC, 3, out=x)

    assert_same_bits([through_a_copy(x), x], [wanted, wanted])


def test_the_raw_operator() -> None:
    x, raw = x_of(), torch.zeros(2, 3, 5, 12)
    options = schema.Options(layout=4, start=2).pack()
    rest = (SPEC.at().angles.words, None, None, 9, options, 1.0)
    torch.vmap(lambda x, out: schema.rotate_into(x, None, out, None, *rest) or out)(x, raw)
    assert_same_bits(raw, rotate(x, SPEC, 9))
    torch.library.opcheck(schema.rotate_into, (x[0].clone(), None, raw[0].clone(), None, *rest))
    with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
        schema.rotate_into(x[0].clone().requires_grad_(), None, raw[0], None, *rest)
    with pytest.raises(RuntimeError, match="memory overlaps"):
        schema.rotate_into(x[0, :, :4], None, x[0, :, 1:], None, *rest)
