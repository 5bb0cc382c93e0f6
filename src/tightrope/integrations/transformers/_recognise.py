"""What a rotary function computes, found out by calling it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._form import Candidate, Form, signature
from ._rotation import Rotation, candidates, plain

BATCH, HEADS, TOKENS, CHANNELS = 2, 3, 5, 16

_TABLE = re.compile(r"cos|sin|freq|cis|position_emb")
_DIMENSION = re.compile(r"dim$|axis$")

# Against what is given and made in float32; a wrong candidate is off by as much as the values are.
_CLOSE = 2e-5
# Several roundings of values near ten to eight bits, and to eleven.
_COARSE = {torch.bfloat16: 0.2, torch.float16: 0.03}


@dataclass(frozen=True)
class Recognition:
    """What became of a try: a candidate, or the reason why there is none."""

    candidate: Candidate | None
    reason: str

    def __bool__(self) -> bool:
        return self.candidate is not None


class _Unlike(Exception):
    """The function is none of what it is tested against; the message says how that was seen."""


def recognise(function: Any, owner: object = None) -> Recognition:
    """Find out which rotation a function computes, by calling it on random tensors.

    Every pairing, order, slice, sign and reading of the tables is tested, at several shapes, widths
    and dtypes, values and gradients, with tables whose halves have nothing to do with each other. Names
    only say which arguments to try as what.

    Args:
        function: a function, a method, or a module whose forward is one.
        owner: what a method gets as self.

    Returns:
        The one candidate that agrees everywhere, or the reason why there is none.

    >>> def turn(x, cos, sin):
    ...     u, v = x.chunk(2, -1)
    ...     return x * cos + torch.cat((-v, u), -1) * sin
    >>> print(recognise(turn).candidate.rotation)
    half pairs, whole width, tables with halves twice
    >>> recognise(lambda x, cos, sin: x * cos + x * sin).reason
    'it agrees with no candidate'
    """
    seen = signature(function)
    if seen is None:
        return Recognition(None, "its signature cannot be read")
    forms = list(_forms(seen, owner is not None))
    if not forms:
        names = ", ".join(seen.parameters)
        return Recognition(
            None, f"its arguments, ({names}), are not those of a rotation by given tables"
        )
    found: list[Candidate] = []
    reasons: list[str] = []
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        for form in forms:
            call = _Caller(function, seen, form, owner)
            try:
                found.extend(_explain(call))
            except _Unlike as unlike:
                reasons.append(str(unlike))
    if len(found) == 1:
        return Recognition(found[0], "agrees with one candidate and with no other")
    if found:
        return Recognition(
            None, f"agrees with {len(found)} candidates: {'; '.join(map(str, found))}"
        )
    # The reason of the form that came farthest is the one to read.
    return Recognition(None, max(reasons, key=_RANK.index) if reasons else _RANK[0])


def recognise_method(function: Any, cls: type) -> Recognition:
    """Find out which rotation a method computes for every object of a class.

    All objects share one replacement, so the method is called on an object that has the attributes
    of the class and none of its own, except the sizes of heads. A method that reads more is not
    recognised.
    """
    owner = torch.nn.Module.__new__(cls) if issubclass(cls, torch.nn.Module) else object()
    tried = recognise(function, owner)
    if tried.reason != _NO_CALL:
        return tried
    return replace(tried, reason=f"{_NO_CALL}, on an object without attributes of its own")


_NO_CALL = "it does not run on tensors of any usual shape"
_NO_MATCH = "it agrees with no candidate"
_UNEVEN = "it agrees with a candidate at some shapes or widths and with none at others"
_WRITES = "it writes to its arguments"
_RANDOM = "it gives two results for one call"
_DTYPES = "the dtype of its results follows no rule that was tried"
_VALUES = "it agrees with a candidate on plain probes but not on others"
_GRADIENTS = "its gradients are not those of what it computes"
_RANK = (_NO_CALL, _NO_MATCH, _UNEVEN, _WRITES, _RANDOM, _DTYPES, _VALUES, _GRADIENTS)


def _forms(seen: inspect.Signature, method: bool) -> Iterator[Form]:
    parameters = list(seen.parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    parameters = [p for p in parameters if p.kind is not p.VAR_KEYWORD][1 if method else 0 :]
    names = tuple(p.name for p in parameters)
    tables = [
        p.name
        for p in parameters
        if _TABLE.search(p.name) and (p.default is None or p.default is p.empty)
    ]
    unsqueeze, rows = None, None
    rotated = []
    for p in parameters:
        if p.name in tables:
            continue
        if type(p.default) is int and _DIMENSION.search(p.name):
            unsqueeze = p.name
        elif p.default is p.empty and "position" in p.name:
            rows = p.name
        elif p.default is p.empty or (p.default is None and "position" not in p.name):
            rotated.append(p.name)
    if not rotated:
        return
    form = Form(names, tuple(rotated), tuple(tables), "pair", unsqueeze, rows, method=method)
    if len(tables) == 2:
        yield form
        yield replace(form, tables=(tables[1], tables[0]))
    elif len(tables) == 1:
        yield replace(form, carrier="complex")
        yield replace(form, carrier="sines first")
        if method:
            yield replace(form, carrier="stack")


class _Caller:
    """A function under one form: calls it on x's and tables, by name."""

    def __init__(
        self, function: Callable[..., Any], seen: inspect.Signature, form: Form, owner: object
    ) -> None:
        self.function, self.form, self.owner = function, form, owner
        self.optional = {
            name for name, p in seen.parameters.items() if p.default is not inspect.Parameter.empty
        }

    def __call__(
        self,
        xs: Mapping[str, torch.Tensor | None],
        cos: torch.Tensor,
        sin: torch.Tensor,
        given: int | None = None,
        rows: torch.Tensor | None = None,
        **more: Any,
    ) -> list[torch.Tensor | None]:
        """The results, in order; any error of the function is passed on."""
        form = self.form
        flat = form.carrier == "stack"
        if flat:
            shape = next(x.shape for x in xs.values() if x is not None)
            xs = {name: None if x is None else x.flatten(2) for name, x in xs.items()}
        arguments: dict[str, Any] = {**xs, **form.join(cos, sin), **more}
        if form.unsqueeze:
            arguments[form.unsqueeze] = given
        if form.rows:
            arguments[form.rows] = torch.arange(cos.shape[-2])[None] if rows is None else rows
        if self.owner is not None:
            owner = _StandIn(self.owner, *shape[-2:]) if flat else self.owner
            result = self.function(owner, **arguments)
        else:
            result = self.function(**arguments)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        return [y.unflatten(-1, shape[-2:]) for y in results] if flat else results


class _StandIn:
    """The owner of a method, with heads of the sizes of a probe."""

    def __init__(self, owner: object, heads: int, channels: int) -> None:
        self._owner, self._heads, self._channels = owner, heads, channels

    def __getattr__(self, name: str) -> Any:
        if re.fullmatch(r"n(um)?_(attention_)?heads", name):
            return self._heads
        return self._channels if name in ("head_size", "head_dim") else getattr(self._owner, name)


@dataclass(frozen=True)
class _Shape:
    """Shapes of x (bhsd, bshd, …) and of tables that fit it, and where the tables get a dimension."""

    x: str
    table: str
    given: int | None
    place: int | None

    def key(self) -> tuple[int, int, int | None, int | None]:
        return len(self.x) + 1, len(self.table) + 1, self.given, self.place


# Leading dimensions of x and tables by letter: b, h, s as they are, 1 for one.
_WITHOUT_PARAMETER = (
    *(_Shape("bhs", "bs", None, -3), _Shape("bsh", "bs", None, -2), _Shape("bsh", "s", None, -2)),
    *(
        _Shape("sh", "s", None, -2),
        _Shape("bhs", "b1s", None, None),
        _Shape("bhs", "s", None, None),
    ),
    *(
        _Shape("bhs", "11s", None, None),
        _Shape("bs", "bs", None, None),
        _Shape("hs", "s", None, None),
    ),
    *(_Shape("bs", "s", None, None), _Shape("hs", "1s", None, None)),
)
# Tables of three dimensions, one of them one wide, that broadcast against x of four as they are. Where
# another rule for three dimensions is in question these could not tell it from that.
_ONES = (_Shape("bhs", "1s", None, None), _Shape("bsh", "s1", None, None))
_FLAT = (_Shape("bsh", "1s1", None, None),)
_WITH_PARAMETER = (
    *(_Shape("bhs", "bs", 1, -3), _Shape("bsh", "bs", 2, -2), _Shape("bsh", "bs", -2, -2)),
    *(_Shape("bhs", "1s", 1, -3), _Shape("bsh", "1s", 2, -2), _Shape("bhs", "bs", -3, -3)),
    *(_Shape("sh", "s", 1, -2), _Shape("hs", "s", 0, -3), _Shape("bsh", "s", 1, -2)),
    _Shape("bhs", "s", 0, -3),
)


def _sizes(letters: str, heads: int, tokens: int, last: int) -> tuple[int, ...]:
    size = {"b": BATCH, "h": heads, "s": tokens, "1": 1}
    return (*(size[letter] for letter in letters), last)


def _tensors(
    call: _Caller,
    shape: _Shape,
    width: int,
    *,
    tokens: int = TOKENS,
    channels: int = CHANNELS,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    xs = {}
    for i, name in enumerate(call.form.rotated):
        heads = HEADS if i == 0 else 1
        sizes = _sizes(shape.x, heads, tokens, channels)
        xs[name] = (torch.randn(sizes) * scale).to(dtype)
    sizes = _sizes(shape.table, HEADS, tokens, width)
    if call.form.rows:
        sizes = sizes[-2:]
    cos, sin = torch.randn(sizes).to(table_dtype), torch.randn(sizes).to(table_dtype)
    return xs, cos, sin


def _expected(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, place: int | None, rotation: Rotation
) -> torch.Tensor:
    if place is not None:
        cos, sin = cos.unsqueeze(place), sin.unsqueeze(place)
    return plain(x.double(), cos.double(), sin.double(), rotation, torch.float64)


def _agrees(y: object, expected: torch.Tensor, bound: float) -> bool:
    if not isinstance(y, torch.Tensor) or y.shape != expected.shape or not y.is_floating_point():
        return False
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((y.double() - expected).abs() <= bound * scale).all())


def _explain(call: _Caller) -> list[Candidate]:
    """The candidates that agree with the function under one form."""
    shapes: tuple[_Shape, ...] = _WITH_PARAMETER if call.form.unsqueeze else _WITHOUT_PARAMETER
    if call.form.carrier == "stack":
        shapes = _FLAT
    if call.form.rows:
        shapes = tuple(_Shape(s.x, s.table.replace("1s", "bs"), s.given, s.place) for s in shapes)
    alive: list[Rotation] | None = None
    verified: dict[_Shape, bool] = {}
    # Where it runs and is something else: tables of one row for all may hide what happens to rows.
    refused: set[tuple[int, int, int | None, int | None]] = set()
    partial = ran = False
    ones = () if call.form.unsqueeze or call.form.rows or call.form.carrier == "stack" else _ONES
    for shape in dict.fromkeys((*shapes, *ones)):
        if shape in ones and any(s.key()[:3] == shape.key()[:3] for s in verified if s not in ones):
            continue
        matches, widths = _at(call, shape, alive)
        ran |= bool(widths)
        if not any(matches.values()):
            if matches and shape not in ones:
                refused.add(shape.key())
            continue
        if not all(matches.values()):
            raise _Unlike(_UNEVEN)
        for width, rotations in matches.items():
            alive = rotations if alive is None else [r for r in alive if r in rotations]
            partial |= any(not replace(r, slice="whole").fits(CHANNELS, width) for r in rotations)
        verified[shape] = True
    if alive is None:
        raise _Unlike(_NO_MATCH if ran else _NO_CALL)
    if not partial:
        alive = list(dict.fromkeys(replace(r, slice="whole") for r in alive))
    if not alive:
        raise _Unlike(_UNEVEN)
    keys = frozenset(shape.key() for shape in verified if shape not in ones)
    if keys & refused:
        raise _Unlike(_UNEVEN)
    if len({key[:3] for key in keys}) != len(keys):
        raise _Unlike("where its tables get a dimension cannot be told")
    first = next(iter(verified))
    seen = frozenset(shape.table for shape in verified if shape in ones)
    return [
        _confirm(call, Candidate(call.form, rotation, keys, seen), first, tuple(verified))
        for rotation in alive
    ]


def _at(
    call: _Caller, shape: _Shape, alive: list[Rotation] | None
) -> tuple[dict[int, list[Rotation]], list[int]]:
    """For each width of tables that the function takes at a shape: what agrees with it."""
    matches: dict[int, list[Rotation]] = {}
    for width in (CHANNELS, CHANNELS // 2, CHANNELS // 4):
        xs, cos, sin = _tensors(call, shape, width)
        try:
            ys = call({n: x.clone() for n, x in xs.items()}, cos.clone(), sin.clone(), shape.given)
        except Exception:  # noqa: BLE001
            continue
        matches[width] = []
        if len(ys) != len(xs):
            continue
        for rotation in candidates() if alive is None else alive:
            if rotation.fits(CHANNELS, width) and _all_agree(ys, xs, cos, sin, shape, rotation):
                matches[width].append(rotation)
    return matches, list(matches)


def _all_agree(
    ys: list[torch.Tensor | None],
    xs: Mapping[str, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: _Shape,
    rotation: Rotation,
    bound: float = _CLOSE,
) -> bool:
    try:
        return all(
            _agrees(y, _expected(x, cos, sin, shape.place, rotation), bound)
            for y, x in zip(ys, xs.values(), strict=True)
        )
    except RuntimeError:  # these tables do not broadcast
        return False


def _confirm(
    call: _Caller, candidate: Candidate, shape: _Shape, shapes: tuple[_Shape, ...]
) -> Candidate:
    """All that plain probes cannot show: dtypes, sizes, gradients, what is optional."""
    rotation = candidate.rotation
    width = CHANNELS // 2 if rotation.reading == "half" else CHANNELS
    for tokens, channels, scale in ((1, 16, 1.0), (5, 8, 100.0), (67, 64, 1.0), (0, 16, 1.0)):
        for each in shapes if tokens == 1 else (shape,):
            wide = channels * width // CHANNELS
            tensors = _tensors(call, each, wide, tokens=tokens, channels=channels, scale=scale)
            xs, cos, sin = tensors
            before = [t.clone() for t in (*xs.values(), cos, sin)]
            try:
                ys = call(xs, cos, sin, each.given)
                again = call(xs, cos, sin, each.given)
            except Exception as error:
                if tokens == 0:
                    continue
                raise _Unlike(_VALUES) from error
            if not all(torch.equal(t, old) for t, old in zip((*xs.values(), cos, sin), before)):
                raise _Unlike(_WRITES)
            if not _all_agree(ys, xs, cos, sin, each, rotation):
                raise _Unlike(_VALUES)
            pairs = zip(ys, again, strict=True)
            if not all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs):
                raise _Unlike(_RANDOM)
    _check_strides(call, candidate, shape, width)
    _check_gradients(call, candidate, shape, width)
    return replace(
        candidate,
        form=replace(candidate.form, ignored=_ignored(call, shape, width)),
        keeps_dtype=_keeps_dtype(call, candidate, shape, width),
        tokens=_uneven_tokens(call, candidate, shape, width),
        alone=_alone(call, candidate, shape, width),
        trailing=_trailing(call, candidate, shape, width),
    )


def _check_strides(call: _Caller, candidate: Candidate, shape: _Shape, width: int) -> None:
    xs, cos, sin = _tensors(call, shape, width)
    strided = {name: x.transpose(0, -2).contiguous().transpose(0, -2) for name, x in xs.items()}
    if not _all_agree(
        call(strided, cos, sin, shape.given), xs, cos, sin, shape, candidate.rotation
    ):
        raise _Unlike(_VALUES)


def _check_gradients(call: _Caller, candidate: Candidate, shape: _Shape, width: int) -> None:
    xs, cos, sin = _tensors(call, shape, width)
    for x in xs.values():
        x.requires_grad_()
    with torch.enable_grad():
        ys = call(xs, cos, sin, shape.given)
        wanted = [_expected(x, cos, sin, shape.place, candidate.rotation) for x in xs.values()]
        weights = [torch.randn(y.shape) for y in wanted]
        leaves = list(xs.values())
        try:
            got = torch.autograd.grad(
                [y for y in ys if y is not None], leaves, weights, allow_unused=True
            )
        except RuntimeError as error:
            raise _Unlike(_GRADIENTS) from error
        right = torch.autograd.grad(wanted, leaves, [w.double() for w in weights])
    for g, r in zip(got, right):
        if g is None or not _agrees(g, r.double(), _CLOSE):
            raise _Unlike(_GRADIENTS)


def _keeps_dtype(call: _Caller, candidate: Candidate, shape: _Shape, width: int) -> bool:
    f32, f64, b16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
    keeps = widens = True
    for dtype, table_dtype in (
        *((b16, b16), (b16, f32), (f32, b16), (f16, f32), (f16, f16), (f64, f32), (f32, f64)),
        (f32, f32),
    ):
        if call.form.carrier == "complex" and table_dtype not in (f32, f64):
            continue
        xs, cos, sin = _tensors(call, shape, width, dtype=dtype, table_dtype=table_dtype)
        try:
            ys = call(xs, cos, sin, shape.given)
        except Exception as error:
            raise _Unlike(_DTYPES) from error
        wide = torch.promote_types(dtype, table_dtype)
        kinds = {y.dtype for y in ys if y is not None}
        keeps &= kinds == {dtype}
        widens &= kinds == {wide}
        narrow = [d for d in (dtype, table_dtype) if d in _COARSE]
        bound = max((_COARSE[d] for d in narrow), default=_CLOSE)
        if not _all_agree(ys, xs, cos, sin, shape, candidate.rotation, bound):
            raise _Unlike(_VALUES)
    if keeps == widens:
        raise _Unlike(_DTYPES)
    return keeps


def _ignored(call: _Caller, shape: _Shape, width: int) -> frozenset[str]:
    """Optional arguments that change nothing: ids of positions that nobody reads."""
    form = call.form
    known = {*form.rotated, *form.tables, form.unsqueeze, form.rows}
    ignored = set()
    for name in form.parameters:
        if name in known or "position" not in name:
            continue
        xs, cos, sin = _tensors(call, shape, width)
        try:
            plainly = call(xs, cos, sin, shape.given)
            ids = torch.randint(0, TOKENS, (BATCH, TOKENS))
            with_ids = call(xs, cos, sin, shape.given, **{name: ids})
        except Exception:  # noqa: BLE001
            continue
        if all(
            a is not None and b is not None and torch.equal(a, b) for a, b in zip(plainly, with_ids)
        ):
            ignored.add(name)
    return frozenset(ignored)


def _uneven_tokens(call: _Caller, candidate: Candidate, shape: _Shape, width: int) -> str:
    """What happens to x with more, or fewer, tokens than the tables."""
    if shape.x[-1] != "s":
        return "same"
    rotation = candidate.rotation
    for kind, tokens in (("prefix", TOKENS + 2), ("suffix", TOKENS - 2)):
        xs, _, _ = _tensors(call, shape, width, tokens=tokens)
        more, cos, sin = _tensors(call, shape, width)
        if kind == "suffix":
            xs = {name: x if i == 0 else more[name] for i, (name, x) in enumerate(xs.items())}
        try:
            ys = call(xs, cos, sin, shape.given)
        except Exception:  # noqa: BLE001
            continue
        if len(ys) == len(xs) and all(
            _agrees(y, _unevenly(x, cos, sin, shape.place, rotation), _CLOSE)
            for y, x in zip(ys, xs.values())
        ):
            return kind
    return "same"


def _unevenly(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, place: int | None, rotation: Rotation
) -> torch.Tensor:
    tokens, rows = x.shape[-2], cos.shape[-2]
    if tokens > rows:
        front, back = x[..., : tokens - rows, :], x[..., tokens - rows :, :]
        return torch.cat((front.double(), _expected(back, cos, sin, place, rotation)), dim=-2)
    return _expected(x, cos[..., rows - tokens :, :], sin[..., rows - tokens :, :], place, rotation)


def _alone(call: _Caller, candidate: Candidate, shape: _Shape, width: int) -> str | None:
    """What comes back where the second tensor is None."""
    if len(call.form.rotated) != 2:
        return None
    xs, cos, sin = _tensors(call, shape, width)
    name, second = call.form.rotated
    try:
        ys = call({name: xs[name], second: None}, cos, sin, shape.given)
    except Exception:  # noqa: BLE001
        return None
    expected = _expected(xs[name], cos, sin, shape.place, candidate.rotation)
    if not _agrees(ys[0], expected, _CLOSE):
        return None
    if len(ys) == 1:
        return "one"
    return "pair" if len(ys) == 2 and ys[1] is None else None


def _trailing(call: _Caller, candidate: Candidate, shape: _Shape, width: int) -> bool:
    """Whether the function takes None for the tensors after the second."""
    rotated = call.form.rotated
    if len(rotated) < 3:
        return False
    xs, cos, sin = _tensors(call, shape, width)
    present = {name: xs[name] for name in rotated[:2]}
    try:
        ys = call({**present, **dict.fromkeys(rotated[2:])}, cos, sin, shape.given)
    except Exception:  # noqa: BLE001
        return False
    return len(ys) == 2 and _all_agree(ys, present, cos, sin, shape, candidate.rotation)
