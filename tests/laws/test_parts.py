"""Laws of parts of a call: rows and heads do not affect each other, whatever the options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.support.calls import CASES, HEADS, ROWS, Call, is_defined
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_same_bits, value

SIZES = {"b": ROWS, "h": HEADS}


@needs_kernel
@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("axis", SIZES)
def test_a_row_or_a_head_is_rotated_as_if_alone(axis: str, case: Mapping[str, Any]) -> None:
    """With its own positions, frequencies, phases, length, norm and gate, where these differ."""
    case = {**case, "verb": "rotate"}
    if axis not in case["layout"]:
        case["layout"] = "bhsd"
    call, dim = Call(case), case["layout"].index(axis)
    (whole,) = call()
    parts = torch.cat([call.part(axis, index)()[0] for index in range(SIZES[axis])], dim)
    if not is_defined(case):
        assert_same_bits(parts, whole)
        return
    size = whole.double().abs().amax(-1, keepdim=True)
    error = (parts.double() - whole.double()).abs()
    assert bool((error <= 2 * value(f"f and P, {str(whole.dtype)[6:]}") * size).all())
