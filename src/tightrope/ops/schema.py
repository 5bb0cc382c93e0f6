"""The schema of the operator: the one place where its strings stand.

The dispatcher is the registry of backends. A backend registers kernels under these names for its
dispatch key, and may be absent.
"""

from __future__ import annotations

import torch

#: Layouts, in the order of the codes that cross the schema: which dimension of a tensor is which.
LAYOUTS = ("bhsd", "bshd", "sbhd", "thd", "bsd", "sd")

FORWARD, TRANSPOSE, INVERSE = 0, 1, 2

# xs          tensors that share their angles: q, or q and k, ...
# words, turns, positions, offset, ramp
#             the angle of every pair; see tightrope.angles.phases
# layout      index into LAYOUTS
# start       first rotated channel; words say how many pairs rotate
# direction   FORWARD y = a·R(φ)x, TRANSPOSE x = a·R(-φ)y, INVERSE x = R(-φ)y / a
# amplitude   a, on the rotated channels only
# act, gate   reserved: f and P of the equation; 0 stands for none
# weights, gates, eps
#             reserved: what f and P carry
# numerics    reserved: 0 is exact
_ARGUMENTS = (
    "Tensor words, Tensor? turns, Tensor? positions, SymInt offset, bool ramp, "
    "int layout, int start, bool interleaved, int direction, float amplitude, "
    "int act=0, Tensor[]? weights=None, float eps=0., int gate=0, Tensor[]? gates=None, "
    "int numerics=0"
)

ROTATE = f"rotate(Tensor[] xs, {_ARGUMENTS}) -> Tensor[]"
ROTATE_ = f"rotate_(Tensor(a!)[] xs, {_ARGUMENTS}) -> ()"

library = torch.library.Library("tightrope", "DEF")
library.define(ROTATE, tags=(torch.Tag.pt2_compliant_tag,))
library.define(ROTATE_, tags=(torch.Tag.pt2_compliant_tag,))

rotate = torch.ops.tightrope.rotate.default
rotate_ = torch.ops.tightrope.rotate_.default
