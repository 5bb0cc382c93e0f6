"""Frequencies that a checkpoint stores, compared with those of its configuration."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tightrope.frequencies import Linear, Rule
from tightrope.spec import RopeSpec

from ..convert.files import open_checkpoint

if TYPE_CHECKING:
    from .subject import Part

_NAME = re.compile(r"(?:^|\.|(?<!original)_)inv_freq$")
_LAYER = re.compile(r"\.(\d+)\.")
# Parts with a rotation of their own, by the names of their modules and sections.
_APART = re.compile(r"vision|visual|vit|audio|speech|sound|image|video")
# Dtype -> relative error: its rounding, and that of a power computed in float32.
_POWER = 4e-6
_ROUNDING = {"F64": 0.0, "F32": 0.0, "BF16": 2.0**-8, "F16": 2.0**-11}
# The steps below the normal numbers of float16.
_LEAST = {"F16": 2.0**-25}
_MOST = 65536


@dataclass(frozen=True)
class Stored:
    """The frequencies of one buffer: its name, its dtype in safetensors, and its values."""

    name: str
    dtype: str
    inv_freq: tuple[float, ...]

    def wanted(self, spec: RopeSpec) -> tuple[float, ...]:
        """The frequencies of a spec that a model stores: of short sequences, and of one axis if that is their number."""
        found = tuple(map(float, spec.frequencies(1).exact))
        if spec.axes is None or len(found) == len(self.inv_freq):
            return found
        owned = zip(found, spec.axes.pairs, strict=True)
        return tuple(omega for omega, (axis, *_) in owned if axis == 0)

    def is_of(self, spec: RopeSpec) -> bool:
        """Return True if these are the frequencies of a spec, rounded to the dtype."""
        return self.is_near(self.wanted(spec))

    def is_near(self, wanted: tuple[float, ...]) -> bool:
        """Return True if these are the wanted frequencies, rounded to the dtype."""
        if len(wanted) != len(self.inv_freq):
            return False
        relative, least = _POWER + _ROUNDING[self.dtype], _LEAST.get(self.dtype, 0.0)
        pairs = zip(self.inv_freq, wanted, strict=True)
        return all(math.isclose(a, b, rel_tol=relative, abs_tol=least) for a, b in pairs)


def stored_in(folder: Path) -> list[Stored]:
    """Read the buffers of frequencies of a folder's checkpoint; none if it has no readable one."""
    try:
        entries = open_checkpoint(folder).entries
        return [
            Stored(one.name, one.dtype, tuple(one.rows(0, 1, 1).flatten().tolist()))
            for one in entries
            if _NAME.search(one.name) and one.dtype in _ROUNDING and len(one.shape) == 1
            if 0 < one.numel <= _MOST
        ]
    except (OSError, ValueError):
        return []


def shared_out(stored: Iterable[Stored], parts: list[Part]) -> list[Part]:
    """Give each buffer to the part of the model that rotates by it, as its name or its frequencies tell."""
    own: dict[int, list[Stored]] = {}
    for one in stored:
        layer, apart = _LAYER.search(one.name), _APART.search(one.name) is not None
        able = [
            (number, part.spec, part.name.rpartition(": ")[2])
            for number, part in enumerate(parts)
            if part.spec is not None and apart == (_APART.search(part.name) is not None)
            if layer is None or not part.at or int(layer[1]) in part.at
        ]
        named = [number for number, _, kind in able if kind and kind in one.name]
        equal = [number for number, spec, _ in able if one.is_of(spec)]
        for number in [*named, *equal, *(number for number, *_ in able)][:1]:
            own.setdefault(number, []).append(one)
    return [dataclasses.replace(part, stored=tuple(own.get(n, ()))) for n, part in enumerate(parts)]


def contradictions(spec: RopeSpec, stored: Iterable[Stored]) -> Iterator[str]:
    """Yield a sentence for each set of stored frequencies that are not those of the spec."""
    told: dict[tuple[float, ...], list[Stored]] = {}
    for one in sorted(stored, key=lambda one: (len(one.name), one.name)):
        # Programs that scale positions, not frequencies, store the unscaled ones.
        unscaled = isinstance(spec.scaling, Linear) and one.is_of(
            dataclasses.replace(spec, scaling=None)
        )
        if not one.is_of(spec) and not unscaled:
            told.setdefault(one.inv_freq, []).append(one)
    for one, *others in told.values():
        more = f" and {len(others)} more" if others else ""
        yield f"The checkpoint stores other frequencies in {one.name}{more}: {_meant(spec, one)}."


def _meant(spec: RopeSpec, one: Stored) -> str:
    """Name the number that the stored frequencies lead to."""
    count, wanted = len(one.inv_freq), one.wanted(spec)
    if count != len(wanted):
        return f"{count}, where the configuration gives {len(wanted)}"
    if dataclasses.replace(one, dtype="BF16").is_of(spec):
        return "those of the configuration, rounded to bfloat16"
    for rule in dict.fromkeys((spec.scaling, None)):
        base = _base(spec, rule, one)
        if base is not None:
            how = "" if rule is spec.scaling else ", without scaling"
            meant = f", probably the right one, not {spec.base:,.10g}" if base != spec.base else ""
            return f"those of base {base:,.10g}{meant}{how}"
    at = max(range(count), key=lambda k: abs(one.inv_freq[k] - wanted[k]) / (wanted[k] or 1.0))
    ratio = wanted[-1] / (one.inv_freq[-1] or math.inf)
    if ratio > 0 and one.is_near(tuple(omega / ratio for omega in wanted)):
        return f"those of the configuration divided by {ratio:.4g}, as by linear scaling"
    return (
        f"they look like another scaling, or learned ones: pair {at} turns by {one.inv_freq[at]:.6g} radians per "
        f"position there, by {wanted[at]:.6g} in the configuration"
    )


def _base(spec: RopeSpec, rule: Rule | None, one: Stored) -> float | None:
    """The base that gives the stored frequencies by a rule, with the fewest digits; None without one."""
    count = len(one.inv_freq)
    tried = set()
    for k in {1, count // 4, count - 1} & {*range(1, count)}:
        if one.inv_freq[k] <= 0:
            continue
        exact = one.inv_freq[k] ** (-spec.rotary_dim / (2 * k))
        if not 0 < exact < math.inf:
            continue
        tried |= {(digits, float(f"{exact:.{digits}e}")) for digits in range(6)}
    for _, base in sorted(tried):
        if one.is_of(dataclasses.replace(spec, scaling=rule, base=base)):
            return base
    return None
