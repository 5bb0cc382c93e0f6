"""The schema of the operator: the one place where its strings stand.

The dispatcher is the registry of backends. A backend registers kernels under these names for its
dispatch key, and may be absent.
"""

from __future__ import annotations

import torch

#: Layouts, in the order of the codes that cross the schema: which dimension of a tensor is which.
LAYOUTS = ("bhsd", "bshd", "sbhd", "thd", "bsd", "sd")

FORWARD, TRANSPOSE, INVERSE = 0, 1, 2

#: Formats of tables: halves duplicated, pairs duplicated, one value per pair.
TABLES = ("cat", "repeat", "half")

# xs          tensors that share their angles: q, or q and k, ...
# outs        where their rotations go: of the same shapes, dtype and device, any strides
# words, turns, positions, offset, ramp
#             the angle of every pair; see tightrope.angles.phases
# layout      index into LAYOUTS
# start       first rotated channel; words say how many pairs rotate
# direction   FORWARD y = a·R(φ)x, TRANSPOSE x = a·R(-φ)y, INVERSE x = R(-φ)y / a
# amplitude   a, on the rotated channels only
# inv_freq    reserved: frequencies that require grad, of which words were made
# cos, sin    tables as the angle source in place of words: any floating dtype,
#             [rows|1, heads|1, length, width]; a position is a row of them
# tables      the format of cos and sin: 0 for none, else one more than the index into TABLES
#
# The rest is reserved, so that no later feature needs another schema; anything but the defaults is
# refused.
# act, weights, eps
#             f of the equation by code, and what it carries
# gate, gates P of the equation by code, and what it carries
# numerics    0 is exact
_ARGUMENTS = (
    "Tensor? words, Tensor? turns, Tensor? positions, SymInt offset, bool ramp, "
    "int layout, int start, bool interleaved, int direction, float amplitude, "
    "Tensor? inv_freq=None, Tensor? cos=None, Tensor? sin=None, int tables=0, "
    "int act=0, Tensor[]? weights=None, float eps=0., int gate=0, Tensor[]? gates=None, "
    "int numerics=0"
)

ROTATE = f"rotate(Tensor[] xs, {_ARGUMENTS}) -> Tensor[]"
ROTATE_ = f"rotate_(Tensor(a!)[] xs, {_ARGUMENTS}) -> ()"
ROTATE_INTO = f"rotate_into(Tensor[] xs, Tensor(a!)[] outs, {_ARGUMENTS}) -> ()"

library = torch.library.Library("tightrope", "DEF")
library.define(ROTATE, tags=(torch.Tag.pt2_compliant_tag,))
library.define(ROTATE_, tags=(torch.Tag.pt2_compliant_tag,))
library.define(ROTATE_INTO, tags=(torch.Tag.pt2_compliant_tag,))

rotate = torch.ops.tightrope.rotate.default
rotate_ = torch.ops.tightrope.rotate_.default
rotate_into = torch.ops.tightrope.rotate_into.default


def scale(direction: int, amplitude: float) -> float:
    """The factor on the rotated channels: an inverse divides by the amplitude."""
    return 1.0 / amplitude if direction == INVERSE else amplitude
