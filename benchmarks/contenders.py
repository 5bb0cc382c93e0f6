"""The contenders of rotations: this library, memory floors, and the eager code of model files.

A contender is an implementation of a case's rotation. It is checked before it is timed: each element
of the results of one call is compared with the definition in float64. Contenders that do not compute
the case's rotation (floors, "copy_", "0..n-1", "rotation") have no results to compare.

All contenders of a case work on the same tensors, whose values are restored before each turn.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from tightrope import gates, phases, positions
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.backends import use
from tightrope.frequencies import Given, Proportional
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    rotate_qk,
    rotate_qk_,
)
from tightrope.spec import PreparedRotation, RopeSpec

from .cases import Case
from .measure import OURS, Built, Call, captured

Tensors = tuple[torch.Tensor, ...]

#: Largest error of an element, as a share of the largest channel of its head. Other libraries hold
#: their tables in the dtype of x and round several times: eager bfloat16 is off by up to 2^-5 after a
#: softmax and its backward. Some libraries compute their angles in float32.
TOLERANCE = {"float64": 1e-9, "float32": 2e-3, "bfloat16": 2.0**-4, "float16": 2.0**-7}

#: The same for this library, which by default rounds once.
OWN_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}

#: Elements compared at a time, in float64; elements of the largest case whose expected values are kept.
AT_A_TIME, KEPT = 2**24, 2**26

EPS = 1e-6

#: The torch functions that model files call, by the value of `act`.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in "relu exp sin cos sigmoid tanh".split()},
    **{name: getattr(torch.nn.functional, name) for name in "silu gelu elu softplus".split()},
    "softmax": lambda x: torch.softmax(x, -1),
}

#: What an implementation raises where it cannot run.
FAILURES = (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError)

_NAMES: tuple[str, ...] = ("q", "k", "the gradient of q", "the gradient of k")


class Rotate(NamedTuple):
    """A rotation: ``function(q, k, *given)``, without k if the case has none.

    Attributes:
        function: it returns the rotated tensors, in place if the case is in place.
        given: its other arguments.
        compared: whether the results are those of the case; then the tensors that the case learns get
            gradients in training.
    """

    function: Callable[..., Any]
    given: tuple[Any, ...] = ()
    compared: bool = True


class Made(NamedTuple):
    """A call that is not one of torch, and the results of a first one."""

    call: Call
    results: Tensors


@dataclass(frozen=True)
class Contender:
    """An implementation to measure.

    Attributes:
        name: a unique name.
        applies: whether it can take part in a case.
        make: prepares it from the tensors of a case.
        own_threads: whether it computes on its own threads, not on torch's.
    """

    name: str
    applies: Callable[[Case], bool]
    make: Callable[[Rotation], Rotate | Made]
    own_threads: bool = False


class WrongError(RuntimeError):
    """The result of a contender is wrong."""


# ---- tensors --------------------------------------------------------------------------------------


@dataclass
class Rotation:
    """The tensors of a case, and what contenders need besides.

    Attributes:
        case: the case.
        xs: q, and k if there is one.
        ids: position ids: ``(rows or 1, tokens)``, ``(rows, heads, tokens)``, or ``(axes, 1, tokens)``.
        learned: the weights of the norm and the tensors of the gate, of each one for q and one for k;
            then the angles, or increments, of phases.
    """

    case: Case
    xs: Tensors = field(init=False)
    ids: torch.Tensor = field(init=False)
    learned: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        self._generator = torch.Generator(case.device).manual_seed(0)
        heads = [count for count in (case.q_heads, case.k_heads) if count]
        self.xs = tuple(self._tensor(count) for count in heads)
        if case.memory == "qkv":
            self.xs = torch.cat((*self.xs, self.xs[0]), 2).chunk(3, 2)[:2]
        self.ids = self._ids()
        self.learned = self._factors()
        if case.phases is not None:
            shape = case.rows, case.tokens, case.angle_heads, case.width // 2
            self.learned.append(self._noise(*shape).transpose(1, 2))
        self._saved = [x.clone() for x in self.xs]
        self._kept: list[tuple[slice, Tensors]] | None = None

    def _noise(self, *shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=self._generator, device=self.case.device)
        return x.to(getattr(torch, self.case.dtype))

    def _tensor(self, heads: int) -> torch.Tensor:
        case = self.case
        x = self._noise(case.rows, case.tokens, heads, case.head_dim)
        if self.by_tokens:
            return x
        x = x.transpose(1, 2)
        if case.memory == "apart":
            return x.mT.contiguous().mT
        return x if case.memory == "view" else x.contiguous()

    def _ids(self) -> torch.Tensor:
        case, device = self.case, self.case.device
        ids = torch.arange(case.tokens, device=device)[None]
        # As in decoding: each row, or head, continues its own sequence.
        past = 17 + 3 * torch.arange(case.rows, device=device)[:, None]
        if case.positions in ("offset per row", "ids per row"):
            return ids + past
        if case.positions == "ids per head":
            heads = 17 * torch.arange(case.k_heads, device=device)
            return (ids + heads[:, None]).expand(case.rows, -1, -1).contiguous()
        if case.positions == "packed":
            return ids % (case.tokens // 3 + 1)
        if case.positions == "M-RoPE":
            return torch.stack((ids, ids // 7, ids % 31))
        return ids if case.positions == "0..n-1" else ids + int(case.positions)

    def _factors(self) -> list[torch.Tensor]:
        case, found = self.case, list[torch.Tensor]()
        if case.act == "rms_norm":
            found += [1 + 0.1 * self._noise(case.head_dim) for _ in self.xs]
        heads = [count for count in (case.q_heads, case.k_heads) if count]
        if case.gate == "exp":
            # The factors of successive calls in place multiply: keep them near 1.
            found += [0.01 * self._noise(count, case.head_dim) for count in heads]
        elif case.gate == "slope":
            found += [
                self._noise(count, case.head_dim).abs() * (-0.1 / case.tokens) for count in heads
            ]
        return found

    def renew(self) -> None:
        """Restore the values of q and k."""
        with torch.no_grad():
            for x, saved in zip(self.xs, self._saved, strict=True):
                x.copy_(saved)

    @property
    def by_tokens(self) -> bool:
        """True if q and k are (batch, seq, heads, dim)."""
        return self.case.memory in ("bshd", "qkv")

    @property
    def layout(self) -> dict[str, str]:
        """The argument `layout` of this library's functions; the grid, with several, always has it."""
        if self.by_tokens:
            return {"layout": "bshd"}
        return {"layout": "bhsd"} if self.case.best else {}

    @property
    def no_k(self) -> tuple[None, ...]:
        """The argument for k of this library's functions, if there is no k."""
        return () if self.case.k_heads else (None,)

    @cached_property
    def spec(self) -> RopeSpec:
        """The spec of a case; its frequencies are 0 if the angles are those of phases."""
        case, axes = self.case, None
        if case.positions == "M-RoPE":
            pairs = case.width // 2
            side = pairs * 3 // 8  # 16, 24, 24 of 64, as in Qwen2-VL
            axes = Axes.sections((pairs - 2 * side, side, side))
        return RopeSpec(
            case.head_dim,
            rotary_dim=case.width,
            interleaved=case.interleaved,
            axes=axes,
            scaling=None if case.phases is None else Proportional(0.0),
        )

    @property
    def where(self) -> Any:
        """The positions, as this library's functions take them."""
        kind = self.case.positions
        if kind == "0..n-1":
            return None
        if kind == "offset per row":
            return positions.per_row(self.ids[:, 0])
        return int(kind) if kind.isdigit() else self._given(self.ids)

    def _given(self, ids: torch.Tensor) -> Any:
        """Return ids of all tokens, or of some, as this library's functions take them."""
        if self.case.positions == "ids per head":
            return positions.per_head(ids)
        if self.case.positions == "M-RoPE":
            return positions.multi_axis(ids)
        return ids if len(ids) > 1 else ids[0]

    def angles(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Angles in radians, float64 ``[…, tokens, pairs]``, from unscaled frequencies."""
        where = (self.ids if ids is None else ids)[..., None].double()
        if self.spec.axes is not None:
            where = torch.cat([where[axis] for axis, _, _ in self.spec.axes.pairs], -1)
        return where * self.spec.frequencies().inv_freq.to(where.device)

    def tables(self, kind: str = "cat", dtype: str = "") -> Tensors:
        """Cosines and sines as model files make them: in the dtype of q, without a heads dimension.

        Args:
            kind: "half" for an entry per pair, otherwise one per channel.
        """
        angle = self.angles()
        if kind != "half":
            if self.case.interleaved:
                angle = angle.repeat_interleave(2, -1)
            else:
                angle = torch.cat((angle, angle), -1)
        of = getattr(torch, dtype or self.case.dtype)
        return angle.cos().to(of), angle.sin().to(of)

    def beside_heads(self, tables: Tensors) -> Tensors:
        """Give tables the dimension of the heads, if they have none yet."""
        if self.case.positions == "ids per head":
            return tables
        return tuple(table.unsqueeze(self.heads) for table in tables)

    @property
    def heads(self) -> int:
        """The dimension of the heads."""
        return 2 if self.by_tokens else 1

    @cached_property
    def cotangents(self) -> Tensors:
        """Random gradients of the results, strided like q and k."""
        generator = torch.Generator(self.case.device).manual_seed(2)
        return tuple(torch.empty_like(x).normal_(generator=generator) for x in self._saved)

    def arguments(self, learned: list[torch.Tensor]) -> dict[str, Any]:
        """Return the arguments `act` and `gate` of this library's functions.

        Args:
            learned: tensors like those of the attribute, in any dtype.
        """
        case, count = self.case, len(self.xs)
        given: dict[str, Any] = {}  # Dynamo does not trace dict[str, Any]()
        if case.act is not None:
            given["act"] = case.act
        if case.act == "rms_norm":
            given["act"] = tuple(RMSNorm(weight, EPS) for weight in learned[:count])
        if case.gate is not None:
            make = {"exp": gates.Exp, "slope": gates.Slope}[case.gate]
            start = count * (case.act == "rms_norm")
            given["gate"] = tuple(make(one) for one in learned[start : start + count])
        return given

    @cached_property
    def rope(self) -> PreparedRotation:
        """The rotation of the case, without phases."""
        return self.spec.at(self.where, device=self.case.device, rounding=self.case.rounding)

    def with_phases(self, rope: PreparedRotation, learned: list[torch.Tensor]) -> PreparedRotation:
        """Return the rotation with the phases of the case, if it has any."""
        if self.case.phases is None:
            return rope
        make = phases.running if self.case.phases == "running" else phases.given
        return rope.having(phases=make(learned[-1]))

    def expected(self) -> Iterator[tuple[slice, Tensors]]:
        """Yield the right results, by the definition in float64, some tokens at a time."""
        if self._kept is not None:
            yield from self._kept
            return
        tokens = self.case.tokens
        step = max(1, AT_A_TIME * tokens // self.case.elements)
        found = []
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            one = part, self._defined(part)
            if self.case.elements <= KEPT:
                found.append(one)
            yield one
        self._kept = found or None

    def _defined(self, part: slice) -> Tensors:
        case = self.case
        given = self.arguments([one.detach().double() for one in self.learned])
        given["inverse"] = case.work == "backward"
        rope = self.spec.at(self._given(self.ids[..., part]), device=case.device)
        if case.phases is not None:
            angle = self.learned[-1].detach().double()
            angle = angle.cumsum(2) if case.phases == "running" else angle
            rope = rope.having(phases=phases.given(angle[:, :, part]))
        training = case.work == "training"
        xs = [self._by_heads(x)[:, :, part].double() for x in self._saved]
        with torch.set_grad_enabled(training), use("reference"):
            for x in xs:
                x.requires_grad_(training)
            ys = kept(around(self, rotate_qk)(*xs, *self.no_k, rope, **given))
            if not training:
                return ys
            grads = [self._by_heads(grad)[:, :, part].double() for grad in self.cotangents]
            return (*(y.detach() for y in ys), *torch.autograd.grad(ys, xs, grads))

    def _by_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if self.by_tokens else x

    def mismatch(self, results: Tensors, tolerance: float) -> str | None:
        """Compare each element of a contender's results; return why they are wrong, or None."""
        shapes = [x.shape for x in self.xs] * (1 + (self.case.work == "training"))
        if [x.shape for x in results] != shapes:
            return f"its results have wrong shapes: {[tuple(x.shape) for x in results]}"
        results = tuple(self._by_heads(x) for x in results)
        wrong, compared, worst, first = 0, 0, 0.0, ""
        names = (_NAMES if len(self.xs) == 2 else _NAMES[::2])[: len(results)]
        for tokens, wanted in self.expected():
            for name, got, want in zip(names, results, wanted, strict=True):
                part = got[:, :, tokens]
                compared += want.numel()
                largest = want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
                off = (part.double() - want).abs() / largest
                bad = ~(off <= tolerance)  # true for NaN
                if not bad.any():
                    continue
                wrong += int(bad.sum())
                worst = max(worst, off.nan_to_num(float("inf")).max().item())
                row, head, token, channel = (int(i) for i in bad.nonzero()[0])
                there = f"{name}[{row}, {head}, {token + tokens.start}, {channel}]"
                values = (x[row, head, token, channel].item() for x in (part, want))
                first = first or there + ": {:.4g} instead of {:.4g}".format(*values)
        if not wrong:
            return None
        return (
            f"its result is off by {worst:.2g} of a head's largest channel: {wrong:,} of "
            f"{compared:,} elements are wrong; the first is {first}"
        )


def kept(results: Any) -> Tensors:
    """Return the results that are not None."""
    results = (results,) if isinstance(results, torch.Tensor) else results
    return tuple(y for y in results if y is not None)


def around(rotation: Rotation, rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rotation, with elementwise operations around it if the case has neighbours."""
    if not rotation.case.neighbours:
        return rotate

    def scaled(q: torch.Tensor, k: torch.Tensor, *given: Any, **options: Any) -> Tensors:
        y, z = rotate(q * 1.25 + 0.5, k * 1.25 + 0.5, *given, **options)
        return y * 1.25, z * 1.25

    return scaled


# ---- ours -----------------------------------------------------------------------------------------


def _ours(rotation: Rotation) -> Rotate:
    """Rotate by a prepared rotation, or by the case's tables."""
    case = rotation.case
    if case.neighbours:
        return _ours_compiled(rotation)
    if case.tables is not None:
        return _by_tables(rotation, case.tables)
    options = rotation.arguments(rotation.learned) | rotation.layout
    if case.work == "backward":
        # The backward pass of a rotation is the rotation of the gradients by the opposite angles.
        options["inverse"] = True
    rope, function = rotation.rope, _function(case)
    if case.phases == "running" or (case.phases and case.work == "training"):

        def turned(q: torch.Tensor, k: torch.Tensor | None = None) -> Any:
            # Sums and phases are made anew in each call: their cost counts.
            own = rotation.with_phases(rope, rotation.learned)
            return function(q, k, own, **options | rotation.arguments(rotation.learned))

        return Rotate(turned)
    rope = rotation.with_phases(rope, rotation.learned)
    return Rotate(partial(function, **options), (*rotation.no_k, rope))


def _function(case: Case) -> Callable[..., Any]:
    return rotate_qk_ if case.work == "in place" else rotate_qk


def _by_spec(rotation: Rotation) -> Rotate:
    given = (*rotation.no_k, rotation.spec, rotation.where)
    return Rotate(partial(_function(rotation.case), **rotation.layout), given)


def _by_tables(rotation: Rotation, kind: str) -> Rotate:
    case = rotation.case
    function = apply_rotary_pos_emb_ if case.work == "in place" else apply_rotary_pos_emb
    options: dict[str, Any] = {"interleaved": case.interleaved, "tables": kind}
    if case.rounding != "once":
        options["rounding"] = case.rounding
    given = (*rotation.no_k, *rotation.tables(kind), rotation.heads)
    return Rotate(partial(function, **options), given)


def _own_tables(rotation: Rotation) -> Rotate:
    return _by_tables(rotation, "half" if rotation.case.interleaved else "cat")


def _usual(case: Case) -> bool:
    """Whether a case is the plain rotation, by a spec or by tables."""
    alone = case.plain and case.phases is None and not case.neighbours
    return alone and case.rounding == "once" and case.work != "backward"


def _has_tables(case: Case) -> bool:
    return _usual(case) and case.positions not in ("ids per head", "M-RoPE")


def _other(rotation: Rotation, **changes: Any) -> Rotate:
    """Rotate the same tensors as another case does, to show the cost of what differs."""
    return _ours(Rotation(replace(rotation.case, **changes)))._replace(compared=False)


def _has_options(case: Case) -> bool:
    plain = case.plain and case.rounding == "once" and case.tables in (None, "cat")
    return not plain or case.phases is not None


def _rotation(rotation: Rotation) -> Rotate:
    """Rotate without f and P, rounding once, to show the cost of the case's options.

    If the case has tables, they are "cat", or "repeat" for interleaved pairs.
    """
    case = rotation.case
    tables = None if case.tables is None else "repeat" if case.interleaved else "cat"
    return _other(rotation, act=None, gate=None, rounding="once", tables=tables, phases=None)


def _is_per_head(case: Case) -> bool:
    phases = case.phases == "given" and case.q_heads == case.k_heads
    return phases or case.positions == "ids per head"


def _frequencies(rotation: Rotation) -> Rotate:
    """Rotate by a frequency for each head and pair, to show the cost of phases or positions per head."""
    case = rotation.case
    rule = Given.of(torch.rand(case.q_heads, case.width // 2))
    where = None if case.positions == "ids per head" else rotation.where
    rope = replace(rotation.spec, scaling=rule).at(where, device=case.device)
    return Rotate(_function(case), (rope,), compared=False)


def _ours_compiled(rotation: Rotation, backend: str | None = None) -> Rotate:
    """Compile our function: the operator, or the definition for Inductor to fuse."""
    rope, learned = rotation.rope, rotation.learned

    def rotate(q: torch.Tensor, k: torch.Tensor | None = None) -> Any:
        given = rotation.arguments(learned) | rotation.layout
        with nullcontext() if backend is None else use(backend):
            return rotate_qk(q, k, rotation.with_phases(rope, learned), **given)

    return Rotate(torch.compile(around(rotation, rotate), fullgraph=True))


# ---- floors: memory traffic alone -----------------------------------------------------------------

#: Contenders that only touch memory: in each pass they read and write each byte once, `neg_` in
#: place and `clone` into a copy.
FLOORS = ("neg_", "clone")


def _neg(_: Rotation) -> Rotate:
    return Rotate(lambda *xs: [x.neg_() for x in kept(xs)], compared=False)


def _clone(rotation: Rotation) -> Made:
    xs = [x.detach() for x in rotation.xs] * (1 + (rotation.case.work == "training"))
    return Made(lambda: [x.clone() for x in xs], ())


def _copy(rotation: Rotation) -> Made:
    pairs = [(torch.empty_like(x), x) for x in rotation.xs]
    return Made(lambda: [y.copy_(x) for y, x in pairs], ())


# ---- eager: the code of model files ---------------------------------------------------------------


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return the partner of each channel: (−x₂, x₁) for halves x₁ and x₂."""
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def _turned_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _has_eager(case: Case) -> bool:
    if case.work == "backward" or (case.best and case.interleaved):
        return False  # in training cases; as complex numbers
    return case.act in (None, "rms_norm", *FUNCTIONS)


def _before(rotation: Rotation) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """Return f by torch's functions, for q (0) or k (1); None if there is none."""
    act, learned, shape = rotation.case.act, rotation.learned, (rotation.case.head_dim,)
    if act == "rms_norm":
        return lambda x, which: torch.nn.functional.rms_norm(x, shape, learned[which], EPS)
    return None if act is None else lambda x, _: FUNCTIONS[act](x)


def _after(rotation: Rotation) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """Return P by torch's functions, for q (0) or k (1); None if there is none."""
    case, ids = rotation.case, rotation.ids
    logs = rotation.learned[len(rotation.xs) * (case.act == "rms_norm") :]
    if case.gate == "exp":
        return lambda y, which: y * logs[which].exp()[:, None]

    def by_slope(y: torch.Tensor, which: int) -> torch.Tensor:
        # A 16-bit type cannot represent large positions.
        return y * (logs[which].float()[:, None] * ids[:, None, :, None]).exp().to(y.dtype)

    return None if case.gate is None else by_slope


def _eager(rotation: Rotation, compiles: bool = False) -> Rotate:
    """Rotate as transformers does, with torch's functions as f and P."""
    case, width = rotation.case, rotation.case.width
    cos, sin = rotation.beside_heads(rotation.tables())
    turned = _turned_neighbours if case.interleaved else rotate_half
    learned, wide, partly = rotation.learned, case.rounding == "wide", width < case.head_dim
    before, after = _before(rotation), _after(rotation)

    def one(x: torch.Tensor, which: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if before is not None:
            x = before(x, which)
        head = x[..., :width]
        head = head.float() if wide else head
        y = head * cos + turned(head) * sin
        y = y.to(x.dtype) if wide else y
        y = torch.cat((y, x[..., width:]), -1) if partly else y
        return y if after is None else after(y, which)

    def rotated(*given: torch.Tensor) -> Tensors:
        *xs, cos, sin = given
        if case.phases is not None:
            angle = learned[-1].float()
            angle = angle.cumsum(2) if case.phases == "running" else angle
            angle = (
                angle.repeat_interleave(2, -1) if case.interleaved else torch.cat((angle,) * 2, -1)
            )
            cos, sin = angle.cos().to(xs[0].dtype), angle.sin().to(xs[0].dtype)
        return tuple(one(x, which, cos, sin) for which, x in enumerate(xs))

    function = around(rotation, rotated)
    function = torch.compile(function, fullgraph=True) if compiles else function
    return Rotate(function, (cos, sin))


def _complex(rotation: Rotation) -> Rotate:
    """Rotate in complex numbers, as Meta's Llama does."""
    angle = rotation.angles()
    polar = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)

    def one(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * factor
        return torch.view_as_real(z).flatten(-2).to(x.dtype)

    def rotated(*given: torch.Tensor) -> Tensors:
        *xs, factor = given
        return tuple(one(x, factor) for x in xs)

    return Rotate(rotated, rotation.beside_heads((polar,)))


def _halves(rotation: Rotation, over: bool = False) -> Rotate:
    """Compile what compiles best: half-width tables, and no copy of a half."""
    case, width = rotation.case, rotation.case.width

    def one(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        head = x[..., :width]
        u, v = head.unflatten(-1, (-1, 2)).unbind(-1) if case.interleaved else head.chunk(2, -1)
        pair = u * c - v * s, v * c + u * s
        y = torch.stack(pair, -1).flatten(-2) if case.interleaved else torch.cat(pair, -1)
        y = y if width == x.shape[-1] else torch.cat((y, x[..., width:]), -1)
        return x.copy_(y) if over else y

    def rotated(*given: torch.Tensor) -> Tensors:
        *xs, c, s = given
        return tuple(one(x, c, s) for x in xs)

    tables = rotation.beside_heads(rotation.tables("half"))
    return Rotate(torch.compile(rotated, dynamic=False), tables)


# ---- checks ---------------------------------------------------------------------------------------


def prepared(rotation: Rotation, made: Rotate | Made) -> Made:
    """Return the call to time, and the results of a first one; none if they are not compared."""
    if isinstance(made, Made):
        return made
    function, given, compared = made
    if rotation.case.work != "training":
        call = partial(function, *rotation.xs, *given)
        return Made(call, tuple(y.clone() for y in kept(call())) if compared else ())
    leaves = [x.detach().requires_grad_() for x in rotation.xs]
    learned = rotation.learned if compared else ()
    every = [*leaves, *(one.requires_grad_() for one in learned)]

    def trained() -> Tensors:
        # The gradients of the leaves are returned, not accumulated.
        ys = kept(function(*leaves, *given))
        return (*ys, *torch.autograd.grad(ys, every, rotation.cotangents))

    if not compared:
        return Made(trained, ())
    ys = kept(function(*leaves, *given))
    # Some kernels overwrite the gradients that they are given.
    grads = torch.autograd.grad(ys, every, [grad.clone() for grad in rotation.cotangents])
    return Made(trained, (*(y.detach() for y in ys), *grads[: len(leaves)]))


def checked(contender: Contender, rotation: Rotation) -> Call:
    """Prepare a contender and check its results.

    Raises:
        WrongError: a result is wrong. Exceptions of `contender.make` are not caught.
    """
    case = rotation.case
    if case.device != "cpu":
        # Freed memory may hold the right results of an earlier contender.
        for spoilt in [torch.empty_like(x) for _ in range(2) for x in rotation.xs]:
            spoilt.fill_(float("nan"))
    call, results = prepared(rotation, contender.make(rotation))
    # With other roundings, given tables or neighbouring operations, errors are those of eager code.
    exact = case.rounding == "once" and case.tables is None and not case.neighbours
    ours = exact and contender.name in (OURS, "tightrope, a spec")
    if results:
        reason = rotation.mismatch(results, (OWN_TOLERANCE if ours else TOLERANCE)[case.dtype])
        if reason is not None:
            raise WrongError(reason)
    rotation.renew()
    return captured(call) if case.graph and case.device == "cuda" else call


def _lost(device: str) -> bool:
    """Return whether a GPU is unusable for this process, as after an illegal memory access."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def build(
    case: Case,
    contenders: Sequence[Contender],
    wanted: re.Pattern[str],
    note: Callable[[str], object] = str,
) -> Built:
    """Make the calls of a rotation's contenders, and check their results.

    Args:
        contenders: the first is this library, and always takes part.
        wanted: other contenders whose name it matches take part.
        note: called with the name of each contender before it is made.

    Raises:
        RuntimeError: this library's own result is wrong.
    """
    rotation, built = Rotation(case), Built()
    for contender in contenders:
        name = contender.name
        if not contender.applies(case) or (name != OURS and not wanted.search(name)):
            continue
        note(name)
        try:
            built.calls[name] = checked(contender, rotation)
        except WrongError as error:
            if name.startswith(OURS):
                what = f"{name} must be right in {case.name} but {error}"
                raise RuntimeError(f"[benchmarks] {what}.") from error
            built.absent[name] = str(error)
        except FAILURES as error:
            if name == OURS:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            if case.alone and _lost(case.device):
                os._exit(1)  # another process measures the case without this contender
            first = next(iter(str(error).strip().splitlines()), "")
            built.absent[name] = f"it failed: {type(error).__name__}: {first[:200]}"
    if case.work == "in place" or case.device != "cpu":
        built.renew = dict.fromkeys(built.calls, rotation.renew)
    built.rest = any(one.own_threads for one in contenders if one.name in built.calls)
    return built


#: The contenders that are part of this program; this library first, then single passes over the same
#: memory. :mod:`benchmarks.peers` has those of other libraries.
CONTENDERS = (
    Contender(OURS, lambda _: True, _ours),
    Contender("tightrope, a spec", lambda case: _usual(case) and case.tables is None, _by_spec),
    Contender("tightrope, tables", _has_tables, _own_tables),
    Contender(
        "tightrope, half tables",
        lambda case: _has_tables(case) and not case.interleaved,
        partial(_by_tables, kind="half"),
    ),
    Contender("neg_", lambda case: case.work == "in place", _neg),
    Contender("clone", lambda case: case.work != "in place", _clone),
    Contender("copy_", lambda case: case.work == "out of place", _copy),
    Contender(
        "0..n-1",
        lambda case: case.positions != "0..n-1",
        partial(_other, positions="0..n-1"),
    ),
    Contender("rotation", _has_options, _rotation),
    Contender("inv_freq per head", _is_per_head, _frequencies),
    Contender("tightrope, compiled", lambda case: case.compiled, _ours_compiled),
    Contender(
        "definition, compiled",
        lambda case: case.compiled,
        partial(_ours_compiled, backend="reference"),
    ),
    Contender("eager", _has_eager, _eager),
    Contender("compiled eager", _has_eager, partial(_eager, compiles=True)),
    Contender("complex eager", lambda case: case.best and case.interleaved, _complex),
    Contender("compiled halves", lambda case: case.best, _halves),
    Contender(
        "compiled halves, over its input",
        lambda case: case.best and case.work == "in place",
        partial(_halves, over=True),
    ),
    Contender(
        "compiled as eager",
        # A width of whole registers compiles as well from halves.
        lambda case: case.best and case.width % 32 != 0 and not case.interleaved,
        partial(_eager, compiles=True),
    ),
)
