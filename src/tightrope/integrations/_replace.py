"""The replacement of a recognised function: the fused operator under the same signature."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..channels import join_pairs
from ..forms import COS_SIN, HALF, Rotation, both_entries, signature
from ..functional.tables import Tables, rotate_by
from ..ops import route, schema
from ..ops.run import run_packed
from ._candidate import Bits, Candidate, same, tokens_first

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TRACED = (FakeTensor, FunctionalTensor)

# Largest number of elements for which torch runs an elementwise operation on one thread.
_GRAIN = 32768


class _Limit(NamedTuple):
    """A kind of call whose bits the operator cannot equal, although recognition found equal bits.

    Attributes:
        words: the description in the report.
        applies: whether a call is of this kind: (rotated tensors, cosines, candidate) -> bool.
    """

    words: str
    applies: Callable[[list[torch.Tensor], torch.Tensor, Candidate], bool]


_BY_BATCH = _Limit(
    "x whose rows do not lie one after the other in memory",
    lambda xs, *_: not all(map(_is_by_batch, xs)),
)
# Calls for gradients of tables whose sum over rows would have another order.
_SHARED = _Limit(
    "cos/sin that need gradients and that rows of x share",
    lambda xs, cos, _: (
        cos.dim() != xs[0].dim()
        or cos.shape[0] != xs[0].shape[0]
        or tokens_first(xs[0].shape, cos.shape)
    ),
)
# Eager calls of functions that multiply complex numbers: torch rounds these products differently in the last,
# incomplete vectors of each row and of each thread's part of a tensor.
_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
_COMPLEX = (
    _Limit("in eager code, devices other than CPUs", lambda xs, *_: xs[0].device.type != "cpu"),
    _Limit(
        f"in eager code, a number of rotated pairs that is no multiple of {_LANES}",
        lambda _, cos, candidate: bool(candidate.rotation.pairs_of(cos.shape[-1]) % _LANES),
    ),
    _Limit(
        f"in eager code, tensors of more than {_GRAIN:,} pairs that the threads of torch divide into parts of "
        f"which one is no multiple of {_LANES} pairs",
        lambda xs, cos, candidate: any(
            _part(x.numel() // x.shape[-1] * candidate.rotation.pairs_of(cos.shape[-1])) % _LANES
            for x in xs
            if x.numel()
        ),
    ),
)


def _part(count: int) -> int:
    """The number of elements of which each thread of torch computes a product of many; 0 for one thread."""
    threads = min(torch.get_num_threads(), -(-count // _GRAIN))
    return -(-count // threads) if threads > 1 else 0


def replacement(
    original: Any,
    candidates: Sequence[Candidate],
    narrow: bool = False,
    rounding: str = "model",
) -> Callable[..., Any]:
    """Make a function with the signature of the original that calls the fused operator.

    Args:
        original: the function, called for every kind of call that recognition did not try.
        candidates: what the original was recognised as, one for each combination of constants.
        narrow: whether results have the dtype of x even if the original promotes: with exact
            angles, tables are float32 where the model's had the dtype of x.
        rounding: "model" for the bits of the original, which then also runs every call whose bits
            the operator cannot equal; else the rounding of all results and gradients; see
            :func:`tightrope.functional.rotate`.

    Returns:
        The function. It counts its eager calls in ``_tightrope_counts``: those that the operator served,
        and those in which the original ran.
    """
    calls = [_Call(original, candidate, narrow, rounding) for candidate in candidates]
    first, counts = calls[0], [0, 0]

    def apply(*args: Any, **kwargs: Any) -> Any:
        for call in calls:
            values = call.bind(args, kwargs)
            if values is not None:
                result = call.short(values)
                if result is None:
                    result = call.long(values)
                if result is not None:
                    if not torch.compiler.is_compiling():
                        counts[0] += 1
                    return result
                break
        if not torch.compiler.is_compiling():
            counts[1] += 1
        result = original(*args, **kwargs)
        if first.narrowed:
            return _in_dtype_of(
                {**dict(zip(first.names, args)), **kwargs}[first.rotated[0]], result
            )
        return result

    functools.update_wrapper(apply, original if callable(original) else original.__func__)
    apply.__signature__ = calls[0].signature  # type: ignore[attr-defined]
    apply._tightrope_original = original  # type: ignore[attr-defined]
    apply._tightrope_counts = counts  # type: ignore[attr-defined]
    apply._tightrope_calls = first.candidate.calls  # type: ignore[attr-defined]
    apply._tightrope_candidates = tuple(candidates)  # type: ignore[attr-defined]
    return apply


def _in_dtype_of(x: torch.Tensor, result: Any) -> Any:
    """The results of an original, in the dtype of x; its tables may be wider than those of the model."""
    if isinstance(result, tuple):
        return tuple(_in_dtype_of(x, each) for each in result)
    return None if result is None else result.to(x.dtype)


def original_runs(candidate: Candidate, rounding: str) -> tuple[str, ...]:
    """Kinds of calls in which the replacement of a function calls the original, for the report.

    Those in which every replacement does are left out.
    """
    free = rounding != "model"

    def bits(x: torch.dtype, table: torch.dtype, needs_grad: bool = True) -> Bits | None:
        return candidate.bits_of(x, table, needs_grad, rounding)

    def fixed(x: torch.dtype, table: torch.dtype) -> bool:
        found = bits(x, table)
        return found is not None and not found.tables

    trained = [pair for pair in _PAIRS if bits(*pair)]
    learned = [pair for pair in trained if not fixed(*pair)]
    found = [
        f"x of a rank other than {_any_of([*map(str, candidate.ranks())])}",
        *_pairs("{}", lambda x, table: not bits(x, table, False)),
        *_pairs(
            "with gradients, {}", lambda x, table: bits(x, table, False) and not bits(x, table)
        ),
    ]
    if learned:
        found += _pairs("cos/sin that need gradients, for {}", fixed)
        found += [_SHARED.words] * (not free)
    elif trained:
        found.append("cos/sin that need gradients")
    if any(each.by_batch for pair in _PAIRS if (each := bits(*pair, False))):
        found.append(_BY_BATCH.words)
    multiplies_complex = candidate.call.form.is_complex and not free
    return (*found, *(limit.words for limit in _COMPLEX if multiplies_complex))


_PAIRS = tuple(itertools.product(_FLOATING, _FLOATING))


def _pairs(text: str, holds: Callable[[torch.dtype, torch.dtype], object]) -> list[str]:
    """A text about the dtypes of x and of tables for which a condition holds; nothing if there are none."""
    by_tables: dict[str, list[str]] = {}
    for x in _FLOATING:
        if tables := [str(table)[6:] for table in _FLOATING if holds(x, table)]:
            by_tables.setdefault(_any_of(tables), []).append(str(x)[6:])
    parts = [f"{_any_of(xs)} x by {tables} cos/sin" for tables, xs in by_tables.items()]
    return [text.format(", and ".join(parts))] if parts else []


def _any_of(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def tables_inside(
    function: Any, values: Mapping[str, Any], name: str, pairs: str, behind: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Read the tables that a function makes off its results for ones and zeros.

    Args:
        function: rotates the argument ``name`` of ``values``, which is (batch, heads, seq, dim), or
            (batch, seq, heads, dim) if ``behind``.
        pairs: the pairing.

    Returns:
        Cosines and sines for one batch row and head, with an entry for each channel; None if they depend
        on the row or the head.
    """
    x = values[name]
    one = x.detach().new_zeros((1, x.shape[1], 1, x.shape[3]) if behind else (1, 1, *x.shape[2:]))
    dim, first = one.shape[-1], torch.arange(one.shape[-1], device=one.device)
    first = first < dim // 2 if pairs == HALF else first % 2 == 0
    with torch.no_grad():
        # u = 1 and v = 0 give (cos, sin); u = 0 and v = 1 give (-sin, cos).
        left = function(**{**values, name: one + first.to(one.dtype)})
        right = function(**{**values, name: one + (~first).to(one.dtype)})
    if not isinstance(left, torch.Tensor) or left.shape != one.shape:
        return None
    return torch.where(first, left, right), torch.where(first, -right, left)


class _Call:
    """One replacement: its signature, and a short and a general path through it."""

    def __init__(self, original: Any, candidate: Candidate, narrow: bool, rounding: str) -> None:
        seen = signature(original)
        if seen is None:
            raise TypeError("the function must have a signature that can be read")
        parameters = [p for p in seen.parameters.values() if p.kind is not p.VAR_KEYWORD]
        self.signature, self.candidate, self.rounding = seen, candidate, rounding
        self.narrowed = narrow and candidate.dtype == "promoted"
        if self.narrowed:
            self.candidate = candidate = replace(candidate, dtype="x")
        self.names = [p.name for p in parameters]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.expected = self.defaults | dict(candidate.constants)
        self.rotated, self.tables = candidate.call.rotated, candidate.call.tables
        self.unsqueeze_dim = candidate.call.parameter("unsqueeze_dim")
        self.original = original
        self.inside = candidate.call.makes_its_tables
        self.positions = None if self.inside else candidate.call.parameter("positions")
        known = {*self.rotated, *self.tables, self.unsqueeze_dim, self.positions}
        known |= (
            candidate.ignored | {candidate.excluded} | set(self.names[: int(candidate.call.method)])
        )
        self.others = [name for name in self.names if name not in known]
        self.plan = functools.lru_cache(maxsize=256)(self._plan)
        self.straight = (
            candidate.call.form is COS_SIN
            and self.positions is None
            and len(self.rotated) <= 2
            and not candidate.channels_first
            and candidate.tokens == "same"  # else one row of tables is for the last token alone
            and candidate.rotation.pairs == candidate.rotation.out
            and _source(candidate.rotation) is not None
        )

    def _has_bits(self, xs: list[torch.Tensor], cos: torch.Tensor, learned: bool) -> bool:
        """Return whether the equality of bits that recognition found also holds for this call."""
        limits = (_SHARED,) * learned
        if self.candidate.call.form.is_complex and route.mode() != "compiled":
            limits += _COMPLEX
        return not any(limit.applies(xs, cos, self.candidate) for limit in limits)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any] | None:
        """Arguments by name; None if recognition did not try one of them."""
        values = {**self.defaults, **dict(zip(self.names, args)), **kwargs}
        if len(args) > len(self.names) or len(values) != len(self.names):
            return None
        if self.candidate.excluded and type(values[self.candidate.excluded]) is not int:
            return None
        for name in self.others:
            if not same(values[name], self.expected.get(name, _PLAIN)):
                return None
        return values

    def read(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The cosines and sines of a call; None if they do not follow from its arguments."""
        if not self.inside:
            return self.candidate.call.read(values)
        (name,) = self.rotated
        ids = values[str(self.candidate.call.parameter("positions"))]
        x = values[name]
        if not isinstance(x, torch.Tensor) or x.dim() != 4 or not isinstance(ids, torch.Tensor):
            return None
        if ids.dim() != 1 or ids.requires_grad:
            return None
        behind = "1s1d" in self.candidate.ones
        return tables_inside(self.original, values, name, self.candidate.rotation.pairs, behind)

    def excluded(self, values: Mapping[str, Any]) -> int:
        """The number of keys at the end that pass through."""
        name = self.candidate.excluded
        return int(values[name]) if name else 0

    def short(self, values: Mapping[str, Any]) -> Any:
        """Call the operator by the cached plan for this kind of call; None if `long` must run."""
        if not self.straight or route.mode() != "eager" or self.excluded(values):
            return None
        q = values[self.rotated[0]]
        k = values[self.rotated[1]] if len(self.rotated) > 1 else None
        cos, sin = values[self.tables[0]], values[self.tables[1]]
        given = values[self.unsqueeze_dim] if self.unsqueeze_dim else None
        plan = self.plan(_kind(q), _kind(k), _kind(cos), _kind(sin), given)
        if plan is None or cos.requires_grad or sin.requires_grad:
            return None
        place, heads, options = plan
        cos, sin = _placed(cos, place, q.dim(), heads), _placed(sin, place, q.dim(), heads)
        ys = run_packed(q, k, (cos, sin, None, 0, options, 1.0))
        if len(self.rotated) == 1 or (k is None and self.candidate.alone == "one"):
            return ys[0]
        return ys[0], None if k is None else ys[1]

    def _plan(self, q: Any, k: Any, cos: Any, sin: Any, given: int | None) -> Any:
        """(Dimension at which to unsqueeze the tables, heads dimension, packed options); None if the
        operator cannot take the call directly."""
        rotation = self.candidate.rotation
        if None in (q, cos, sin) or cos != sin:
            return None
        if k is None and len(self.rotated) > 1 and self.candidate.alone is None:
            return None
        (shape, dtype, device), (table, table_dtype, table_device) = q, cos
        try:
            place = self.candidate.place(shape, table, given)
        except LookupError:
            return None
        if len(shape) != 4 or device != table_device or 0 in shape:
            return None
        if self.candidate.result_dtype(dtype, table_dtype) != dtype:
            return None
        if dtype not in _FLOATING or table_dtype not in _FLOATING or device.type == "meta":
            return None
        if not rotation.fits(shape[-1], table[-1]):
            return None
        full = _placed_shape(table, place, 4)
        if full is None:
            return None
        heads = _heads_axis(full, shape)
        rows, length = full[0], full[3 - heads]
        tokens = shape[3 - heads]
        if length != tokens or rows not in (1, shape[0]) or full[heads] != 1:
            return None
        if k is not None:
            (other, other_dtype, other_device) = k
            fits = len(other) == 4 and other[0] == shape[0] and other[3 - heads] == tokens
            if not fits or other[-1] != shape[-1] or other_dtype != dtype or other_device != device:
                return None
            if 0 in other:
                return None
        bits = self.candidate.bits_of(dtype, table_dtype, True, self.rounding)
        if bits is None or bits.cast or bits.by_batch:
            return None
        dense = bits.strides(0)
        if k is not None and bits.strides(1) != dense:
            return None
        forward, back = map(schema.ROUNDINGS.index, bits.rounding)
        options = schema.Options(
            layout=schema.LAYOUTS.index("bhsd" if heads == 1 else "bshd"),
            start=rotation.start(shape[-1], table[-1]),
            interleaved=rotation.pairs != HALF,
            source=schema.SOURCES.index(str(_source(rotation))),
            rounding=forward,
            back=back,
            dense=dense[0],
            dense_back=dense[1],
        )
        return place, heads, options.pack()

    def long(self, values: Mapping[str, Any]) -> Any:
        """Serve any call that recognition tried, also compiled; None if the original must run."""
        candidate = self.candidate
        flat = candidate.call.form.flat
        xs = [values[name] for name in self.rotated]
        present = [x for x in xs if x is not None]
        first, given_tables = xs[0], self.read(values)
        if first is None or given_tables is None or not _are_tensors(present):
            return None
        if len(xs) > 1 and xs[1] is None and candidate.alone is None:
            return None
        if None in xs[2:] and not candidate.trailing:
            return None
        if any(x.dim() != first.dim() or x.dtype != first.dtype for x in present):
            return None
        if candidate.channels_first:
            if first.dim() != 4:
                return None
            present = [x.mT for x in present]
            first = present[0]
        given = values[self.unsqueeze_dim] if self.unsqueeze_dim else None
        cos, sin = given_tables
        if self.positions:
            cos, sin = cos[values[self.positions]], sin[values[self.positions]]
        if flat:
            if first.shape[-1] % cos.shape[-1] or cos.dim() != 4 or cos.shape[1] < first.shape[1]:
                return None
            cos, sin = cos[:, : first.shape[1]], sin[:, : first.shape[1]]
            present = [x.unflatten(-1, (-1, cos.shape[-1])) for x in present]
            first = present[0]
        try:
            place = candidate.place(first.shape, cos.shape, given)
        except LookupError:
            return None
        if cos.shape != sin.shape:
            return None
        if not candidate.rotation.fits(first.shape[-1], cos.shape[-1]):
            return None
        if place is not None:
            cos, sin = cos.unsqueeze(place), sin.unsqueeze(place)
        dtype = candidate.result_dtype(first.dtype, cos.dtype)
        grad = torch.is_grad_enabled()
        learned = grad and (cos.requires_grad or sin.requires_grad)
        learns = learned or (grad and any(x.requires_grad for x in present))
        bits = candidate.bits_of(first.dtype, cos.dtype, learns, self.rounding)
        if bits is None or (learned and not bits.tables):
            return None
        if bits.by_batch and _BY_BATCH.applies(present, cos, candidate):
            return None
        if self.rounding == "model" and not self._has_bits(present, cos, learned):
            return None
        ys = _turn(present, cos, sin, candidate, dtype, bits, self.excluded(values))
        if ys is None:
            return None
        if flat:
            ys = [y.flatten(-2) for y in ys]
        if candidate.channels_first:
            ys = [y.mT for y in ys]
        if len(xs) == 1:
            return ys[0]
        if xs[1] is None:
            return ys[0] if candidate.alone == "one" else (ys[0], None)
        return tuple(ys)


def _kind(x: Any) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    return (x.shape, x.dtype, x.device) if type(x) in _PLAIN else None


def _is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor has no class of its own, except those of an export that is not strict."""
    return type(x) in _PLAIN or (torch.compiler.is_exporting() and isinstance(x, _TRACED))


def _are_tensors(xs: list[Any]) -> bool:
    return all(isinstance(x, torch.Tensor) for x in xs)


def _is_by_batch(x: torch.Tensor) -> bool:
    """Return whether the sequences of x lie one after the other in memory."""
    return x.shape[0] == 1 or x.stride(0) >= max(x.stride())


def _placed_shape(table: torch.Size, place: int | None, dims: int) -> list[int] | None:
    full = list(table)
    if place is not None:
        full.insert(len(full) + 1 + place, 1)
    return [1] * (dims - len(full)) + full if len(full) <= dims else None


def _heads_axis(table: list[int], x: torch.Size) -> int:
    """The heads dimension of x: the one of size 1 in tables of rank four."""
    return 2 if table[2] == 1 and x[2] != 1 else 1


def _placed(table: torch.Tensor, place: int | None, dims: int, heads: int) -> torch.Tensor:
    """The table as the operator takes it: [batch|1, heads|1, seq, width]."""
    if place is not None:
        table = table.unsqueeze(place)
    while table.dim() < dims:
        table = table[None]
    return table.transpose(1, 2) if heads == 2 else table


def _turn(
    xs: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    candidate: Candidate,
    dtype: torch.dtype,
    bits: Bits,
    excluded: int,
) -> list[torch.Tensor] | None:
    """Rotate all xs by tables that broadcast against each; None if the original must run."""
    ys = []
    for which, x in enumerate(xs):
        c, s, passed, last = cos, sin, None, None
        if which and excluded:
            end = x.shape[-2] - excluded
            x, last = x[..., :end, :], x[..., end:, :]
        rows = cos.shape[-2]
        if which and candidate.repeats and x.shape[-2] > rows == xs[0].shape[-2]:
            times, rest = divmod(x.shape[-2], rows)
            if rest:
                return None
            c, s = (torch.cat([table] * times, dim=-2) for table in (cos, sin))
        if candidate.tokens != "same":
            tokens = x.shape[-2]
            if candidate.tokens == "prefix" and tokens > rows:
                passed, x = x[..., : tokens - rows, :], x[..., tokens - rows :, :]
            elif candidate.tokens == "suffix" and tokens < rows:
                c, s = cos[..., rows - tokens :, :], sin[..., rows - tokens :, :]
        y = fused(x, c, s, candidate.rotation, dtype, bits, which)
        if y is None:
            return None
        if passed is not None:
            y = torch.cat((passed.to(dtype), y), dim=-2)
        ys.append(y if last is None else torch.cat((y, last), dim=-2))
    return ys


def _source(rotation: Rotation) -> str | None:
    """The operator's format for the tables of a rotation; None if they must be rearranged."""
    if rotation.sign != 1:
        return None
    if rotation.aligned:
        return "full"
    return {"first": "cat", "even": "repeat", "half": "half"}.get(rotation.reading)


def _arranged(
    cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Tables for :func:`tightrope.functional.apply_rotary_pos_emb`, and their format."""
    if rotation.sign < 0:
        sin = -sin
    found = both_entries(cos, sin, rotation.reading)
    if rotation.sign == 0:
        u, v = found[1]
        sin = join_pairs(-u, v, rotation.pairs != HALF)
    if rotation.reading not in ("cat", "repeat"):
        return found[0][0], found[1][0], "half"
    if not rotation.aligned:
        cos, sin = (join_pairs(*each, rotation.pairs != HALF) for each in found)
    return cos, sin, "full"


def fused(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    dtype: torch.dtype,
    bits: Bits,
    which: int,
) -> torch.Tensor | None:
    """Rotate one x with the operator; None if the operator does not take these tensors.

    Args:
        cos, sin: tables that broadcast against x.
        dtype: the dtype of the result.
        bits: where to round, whether to round the tables too, and the strides of the results.
        which: the number of x among the tensors of its call.
    """
    dims = x.dim()
    if (
        not _is_plain(x)
        or not _is_plain(cos)
        or x.dtype not in _FLOATING
        or cos.dtype not in _FLOATING
        or x.device.type == "meta"
        or route.mode() in ("transformed", "forward")
        or dims not in (3, 4)
        or cos.dim() > dims
    ):
        return None
    wider = torch.promote_types(x.dtype, dtype)
    arithmetic = torch.float64 if bits.cast == "float64" else wider
    if bits.cast:
        wide = x.dtype if bits.cast == "tables" else arithmetic
        cos, sin = cos.to(wide), sin.to(wide)
    while cos.dim() < dims:
        cos, sin = cos[None], sin[None]
    # The heads dimension is just before the sequence dimension, or just after it.
    behind = cos.shape[-2] == 1 and x.shape[-2] != 1
    heads = dims - 2 if behind else dims - 3
    layout = "sbhd" if tokens_first(x.shape, cos.shape) else None
    count, channels = rotation.pairs_of(cos.shape[-1]), x.shape[-1]
    start = rotation.start(channels, cos.shape[-1])
    cos, sin, tables = _arranged(cos, sin, rotation)
    try:
        (y,) = rotate_by(
            x.to(arithmetic),
            None,
            Tables(
                *(cos, sin, heads, rotation.pairs != HALF, tables, start),
                rounding=bits.rounding,
                dense=bits.strides(which),
                layout=layout,
            ),
        )
    except (TypeError, ValueError):
        return None
    y = y.to(dtype)
    return y if rotation.out == rotation.pairs else _reorder(y, start, count, rotation)


def _reorder(y: torch.Tensor, start: int, count: int, rotation: Rotation) -> torch.Tensor:
    """Move rotated channels to the output order of the function."""
    part = y[..., start : start + 2 * count]
    shape = (2, count) if rotation.pairs == HALF else (count, 2)
    moved: torch.Tensor = part.unflatten(-1, shape).transpose(-1, -2).flatten(-2)
    if 2 * count == y.shape[-1]:
        return moved
    return torch.cat((y[..., :start], moved, y[..., start + 2 * count :]), dim=-1)
