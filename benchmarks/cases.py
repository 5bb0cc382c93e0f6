"""The table of benchmark cases. A case is data: :mod:`benchmarks.calls` makes calls of it.

In names, "2048" is the number of tokens, "decode" has one token per row, and "x2" is two threads.
Unless a name states otherwise, there is 1 row, and q has 32 heads and k 8, of 128 channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: Column of a case whose contenders compete as groups: the faster of eager and of compiled code.
BETTER = "the better of eager and compiled"

#: Column with the time of this library in microseconds, and one with a count, for bounds on them.
MICROSECONDS, KERNELS = "µs", "kernels"


@dataclass(frozen=True)
class Case:
    """A call to measure: sizes, dtype, positions, prologue f and epilogue P.

    Attributes:
        name: a name that is unique in its suite.
        kind: what is called: a name in :data:`benchmarks.calls.KINDS`, or "rotation".
        what: which calls of that kind, if there are several.
        rows, tokens, q_heads, k_heads, head_dim: sizes; 0 k_heads for q alone.
        dtype: the dtype of q and k.
        work: "in place"; "out of place"; "training", which is forward and backward, out of place;
            or "backward", the backward pass alone, where q and k are the gradients that it rotates.
        cold: whether caches are flushed before each call.
        memory: "view" for transposed views of (batch, seq, heads, dim), as models pass them; "bhsd"
            for contiguous (batch, heads, seq, dim); "bshd" for (batch, seq, heads, dim); "qkv" for
            slices of one projection in that order; "apart" for channels that are not neighbours.
        interleaved, rotary_dim: as in :class:`tightrope.RopeSpec`; rotary_dim None means head_dim.
        positions: "0..n-1", "17" and following, "offset per row", "ids per row", "ids per head" (q
            and k with the same heads), "packed" (sequences in one row) or "M-RoPE" (three coordinates).
        act: prologue f, by its name in :data:`tightrope.activations.ACTS`; a norm has a weight for q
            and one for k.
        gate: epilogue P: "exp", a factor per head and channel, or "slope", which also depends on the
            position.
        rounding: as in :func:`tightrope.functional.rotate`. If it is "wide", the eager code also
            rounds as "wide"; otherwise as "each".
        tables: format of given tables, rotary_dim wide and in the dtype of q; None to rotate by the
            angles of the spec.
        phases: angles for each token, head and pair in place of those of the positions: "given", or
            "running", the sums of increments, whose cost counts. All heads share them if q and k
            differ in the number of heads.
        compiled: whether contenders that compile our rotation or its definition take part.
        best: whether contenders compete as groups: the fastest of ours against the fastest eager and
            the fastest compiled code.
        threads: number of threads of every contender; 0 for torch's current number.
        rounds: number of turns of each contender in a run; 0 for the usual number.
        device: the device of q and k: "cpu" or "cuda".
        neighbours: whether q and k are scaled before and after the rotation, for a compiler to fuse.
        graph: whether a CUDA graph replays the calls, which excludes the host's time.
        host: whether the time counts until the call returns, without waiting for the device.
        alone: whether the case runs in a process of its own, because a contender may crash.
        bounds: (contender, most): the largest ratio of our time to that contender's.
    """

    name: str
    kind: str = "rotation"
    what: str = ""
    rows: int = 1
    tokens: int = 2048
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    dtype: str = "float32"
    work: str = "in place"
    cold: bool = True
    memory: str = "view"
    interleaved: bool = False
    rotary_dim: int | None = None
    positions: str = "0..n-1"
    act: str | None = None
    gate: str | None = None
    rounding: str = "once"
    tables: str | None = None
    phases: str | None = None
    compiled: bool = False
    best: bool = False
    threads: int = 0
    rounds: int = 0
    device: str = "cpu"
    neighbours: bool = False
    graph: bool = False
    host: bool = False
    alone: bool = False
    bounds: tuple[tuple[str, float], ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements of q and k together."""
        return self.rows * self.tokens * (self.q_heads + self.k_heads) * self.head_dim

    @property
    def width(self) -> int:
        """Number of channels that rotate."""
        return self.rotary_dim or self.head_dim

    @property
    def angle_heads(self) -> int:
        """Number of heads of the phases."""
        return self.q_heads if self.q_heads == self.k_heads else 1

    @property
    def plain(self) -> bool:
        """True if the case has neither f nor P."""
        return self.act is None and self.gate is None

    @property
    def moved(self) -> int:
        """Bytes that must be read and written: each input once, each result once."""
        each = {"float64": 8, "float32": 4}.get(self.dtype, 2)
        passes = 2 if self.work != "training" else 4 if self.act is None else 5
        moved = passes * self.elements * each
        if self.phases is not None:
            # As int32 in each direction.
            pairs = self.rows * self.tokens * self.angle_heads * (self.width // 2)
            moved += (passes // 2) * pairs * 4
        return moved


class Suite(NamedTuple):
    """Cases that one command measures.

    Attributes:
        about: what they show.
        cases: the cases.
        against: a regular expression of the contenders that take part unless others are asked for.
        device: where they run.
    """

    about: str
    cases: tuple[Case, ...]
    against: str = ""
    device: str = "cpu"


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_LONG = {short: long for long, short in _SHORT.items()}


def _in_both(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return each case in float32 and in bfloat16."""
    return tuple(
        replace(case, name=f"{case.name}, {_SHORT[dtype]}", dtype=dtype)
        for case in cases
        for dtype in ("float32", "bfloat16")
    )


# ---- the calls of a model -------------------------------------------------------------------------

# The default contenders: one pass over the same memory, the eager expression, also compiled, and
# other libraries.
_USUAL = "neg_|clone|eager|compiled eager|transformers|rotary-embedding-torch|onnxruntime"
# And what shows the cost of a case's options.
_OPTIONS = "0..n-1|rotation|inv_freq per head|definition, compiled|transformers, compiled"

_CALLS = _in_both(
    (
        Case("prefill 2048, in place"),
        Case("prefill 2048, out of place", work="out of place"),
        Case("training 2048", work="training"),
        Case("prefill 2048, interleaved", interleaved=True),
        Case("M-RoPE 2048, in place", positions="M-RoPE"),
        Case("decode 1 token, out of place", tokens=1, cold=False, work="out of place"),
        Case("decode 32 rows, in place", rows=32, tokens=1, cold=False),
    )
)

_IN_PLACE = (("neg_", 1.3), ("transformers", 1 / 15), ("transformers, compiled", 1 / 5))
_TRAINED = (("eager", 1 / 7), ("compiled eager", 1 / 3))
_NEW: dict[str, Any] = {"work": "out of place", "compiled": True}
_ROTATION = (
    *_in_both(
        (
            Case("prefill 128, cold", tokens=128),
            Case("prefill 128, warm", tokens=128, cold=False),
            Case("prefill 128, warm, out of place", tokens=128, cold=False, **_NEW),
            Case("prefill 2048, cold", bounds=_IN_PLACE),
            Case("prefill 2048, warm", cold=False),
            Case("prefill 8192, cold", tokens=8192),
            Case("prefill 2048, cold, 1 thread", threads=1),
        )
    ),
    Case("prefill 2048, out of place, fp32", **_NEW, bounds=(("clone", 0.75),)),
    Case("prefill 2048, out of place, bf16", **_NEW, dtype="bfloat16", bounds=(("clone", 0.9),)),
    *_in_both(
        (
            Case("training 2048", work="training", compiled=True, bounds=_TRAINED),
            Case("decode 1 row", tokens=1, cold=False, bounds=((MICROSECONDS, 8.0),)),
            Case("decode 1 row, out of place", tokens=1, cold=False, **_NEW),
            Case("decode 32 rows", rows=32, tokens=1, cold=False),
            Case("decode 256 rows", rows=256, tokens=1, cold=False),
            Case("interleaved 2048, cold", interleaved=True),
            Case("partial 64 of 128, cold", rotary_dim=64),
            Case("contiguous 2048, cold", memory="bhsd"),
            Case("ids per row, 4 x 512, cold", rows=4, tokens=512, positions="ids per row"),
            Case("packed 2048, cold", positions="packed"),
            Case("M-RoPE 2048, cold", positions="M-RoPE"),
            Case("ids per head 2048, k 32 heads, cold", k_heads=32, positions="ids per head"),
            Case("head_dim 64, cold", head_dim=64),
            Case("head_dim 80, cold", head_dim=80),
            Case("head_dim 256, cold", head_dim=256, q_heads=16, k_heads=4),
        )
    ),
)

# Cases with f or P, compared with the rotation alone and with torch's functions in sequence.
_F_AND_P: dict[str, dict[str, Any]] = {
    **{act: {"act": act} for act in ("relu", "silu", "rms_norm", "gelu", "softmax")},
    "exp gate": {"gate": "exp"},
    "slope gate": {"gate": "slope"},
}
_WITH = _in_both(
    case
    for name, given in _F_AND_P.items()
    for case in (
        Case(f"with {name}, 2048, cold", **given, bounds=(("rotation", 1.6),)),
        Case(f"with {name}, 2048, warm", cold=False, **given),
        Case(f"with {name}, training 2048", work="training", compiled=True, **given),
    )
)

# Compared with the same rotation rounded once. For cases with tables, that rotation has "cat"
# tables, or "repeat" tables if pairs are interleaved.
_ROUNDINGS = _in_both(
    (
        *(
            Case(f"{work}2048, rounding {rounding}", work=work_, rounding=rounding, bounds=bounds)
            for rounding in ("wide", "each")
            for work, work_, bounds in (
                ("", "in place", (("rotation", 1.3),)),
                ("training ", "training", ()),
            )
        ),
        Case("tables 2048, cat", tables="cat"),
        Case("tables 2048, full", tables="full", bounds=(("rotation", 1.15),)),
        Case("tables 2048, full, rounding each", tables="full", rounding="each"),
        Case("tables 2048, full, interleaved", tables="full", interleaved=True),
    )
)

# Compared with frequencies per head, and with eager code that forms the angles in float32.
_PHASES = _in_both(
    Case(f"phases 2048, k 32 heads, {name}", k_heads=32, phases=kind, work=work, bounds=bounds)
    for name, kind, work, bounds in (
        ("given", "given", "in place", (("inv_freq per head", 1.5),)),
        ("running", "running", "out of place", ()),
        ("running, training", "running", "training", ()),
    )
)

_FULL = (
    *_ROTATION,
    *_WITH,
    *_ROUNDINGS,
    *_PHASES,
    Case("prefill 2048, cold, fp16", dtype="float16"),
    Case("prefill 2048, warm, fp16", dtype="float16", cold=False),
    Case("prefill 2048, cold, fp64", dtype="float64"),
)

# ---- the grid of shapes ---------------------------------------------------------------------------

# From this number of elements on, ours is to be at least as fast; below, 0.9 of it.
_LARGE = 1 << 16


def _shaped(
    name: str, shape: Sequence[int], kinds: str = "fp32 fp32x2 bf16 bf16x2", **given: Any
) -> list[Case]:
    """Return a case of the grid in some kinds: dtypes, each with "x2" for two threads.

    Args:
        shape: rows, heads of q, tokens, channels, heads of k if there is one.
    """
    rows, heads, tokens, width, *more = shape
    usual = {"work": "out of place", "cold": False, "memory": "bhsd", "best": True}
    options: dict[str, Any] = usual | given
    base = Case(
        name,
        rows=rows,
        tokens=tokens,
        q_heads=heads,
        k_heads=sum(more),
        head_dim=width,
        **options,
    )
    goal = 1.0 if base.elements >= _LARGE else 1 / 0.9
    return [
        replace(
            base,
            name=f"{name}, {kind}",
            dtype=_LONG[kind[:4]],
            threads=1 + kind.endswith("x2"),
            bounds=((BETTER, goal),),
        )
        for kind in kinds.split()
    ]


_SOME, _TWO, _ONCE = "fp32 bf16 bf16x2", "fp32x2 bf16", "fp32 bf16"
_PREFILL, _CHUNK, _LONGER = (1, 32, 2048, 128), (1, 32, 128, 128), (1, 32, 512, 128)
_TOKEN, _BATCH = (1, 32, 1, 128), (2, 16, 512, 64)
_GRID = (
    *_shaped("prefill 2048", (*_PREFILL, 8), "fp32 fp32x2 bf16 bf16x2 fp16"),
    *_shaped("prefill 128", (*_CHUNK, 8), "fp32 fp32x2 bf16 bf16x2 fp16x2 fp64"),
    *_shaped("1024 rows x 16 tokens", (1024, 1, 16, 64)),
    *_shaped("1 head", (1, 1, 2048, 128)),
    *_shaped("256 rows x 2 heads", (256, 2, 64, 32)),
    *_shaped("ViT", (64, 12, 197, 64), "fp32x2 bf16 bf16x2"),
    *_shaped("4096 rows x 1 token", (4096, 1, 1, 64), _SOME, positions="17"),
    *_shaped("2 heads x 32768 tokens", (1, 2, 32768, 128), "fp32x2 bf16 bf16x2"),
    *(
        case
        for q, k in ((32, 8), (1, 0))
        for rows, positions in ((1, "17"), (64, "offset per row"), (256, "offset per row"))
        for case in _shaped(
            f"decode {rows} x {q}+{k} heads", (rows, q, 1, 128, k), _TWO, positions=positions
        )
    ),
    *(
        case
        for width in (16, 32, 80, 256)
        for case in _shaped(f"head_dim {width}", (2, 16, 512, width), _TWO)
    ),
    *_shaped("interleaved 1 x 64", (1, 32, 64, 128), interleaved=True),
    *_shaped("interleaved 8 x 512", (8, 8, 512, 64), interleaved=True),
    *_shaped("bshd", (*_BATCH, 16), _TWO, memory="bshd"),
    *_shaped("bshd 1 x 512 x 8", (1, 8, 512, 128), "fp32x2 bf16x2", memory="bshd"),
    *_shaped("sliced qkv", (*_BATCH, 16), _SOME, memory="qkv"),
    *_shaped("partial 32 of 128", (*_LONGER, 8), rotary_dim=32),
    *_shaped("strided", _LONGER, _SOME, memory="apart"),
    *_shaped("tables only", (*_LONGER, 8), _SOME, tables="cat"),
    *_shaped("ids per row", (4, 32, 512, 128, 8), "fp32x2 bf16 bf16x2", positions="ids per row"),
    *(
        case
        for shape in (_PREFILL, _CHUNK, _TOKEN)
        for case in _shaped(
            f"in place {shape[2]}", (*shape, 8), _SOME, positions="17", work="in place"
        )
    ),
    *_shaped("training 512", (4, 8, 512, 64, 8), _TWO, work="training"),
    *_shaped("training 2048", (*_PREFILL, 8), _TWO, work="training"),
)
_GROUPS = "^(tightrope, (a spec|tables|half tables)|eager|complex eager|compiled .*)$"
_WIDTHS = tuple(
    case
    for name, shape, part in (
        *((f"head_dim {width}", (1, 16, 512, width), None) for width in range(8, 257, 8)),
        *((f"{part} of 256", (1, 8, 512, 256), part) for part in range(16, 256, 16)),
        *((f"{heads} heads", (1, heads, 4096, 128), None) for heads in range(1, 9)),
    )
    for case in _shaped(name, shape, _ONCE, rotary_dim=part)
)

# ---- calls of Python, of other modules and of whole models ----------------------------------------

_ONE: dict[str, Any] = {"cold": False, "threads": 1}
_SMALL = tuple(
    Case(what, "small", what, **_ONE, bounds=bounds)
    for what, bounds in (
        ("a spec and an offset", (("prepared", 1.2),)),
        ("a spec and ids", (("prepared", 1.2),)),
        ("a spec and ids of rows", ()),
        ("rotary_pos_embedding", (("rotate", 1.3),)),
        ("dynamic NTK, a new length", ()),
        ("dynamic NTK, the same length", ()),
        ("dynamic NTK, 32 rows", ()),
        ("dynamic NTK, 32 rows, again", ()),
        ("1 key to a slot", ()),
        ("512 keys to slots", (("out=", 1.25),)),
        ("512 keys and values to slots", ()),
    )
)

_SHARDED = tuple(
    Case(f"{what}{', training' * (work == 'training')}", "sharded", what, work=work, **_ONE)
    for work in ("out of place", "training")
    for what in (
        "rotate",
        "rotate_qk",
        "rotate_qk, a spec",
        "apply_rotary_pos_emb",
        "q * q",
        *(["rotate_qk_"] if work != "training" else []),
    )
)

_STREAMS = tuple(
    Case(
        f"{tokens}, then {reader}, {_SHORT[dtype]}{'x2' * (threads == 2)}",
        "streams",
        reader,
        tokens=tokens,
        dtype=dtype,
        threads=threads,
        work="out of place",
    )
    for threads in (1, 2)
    for dtype in ("float32", "bfloat16")
    for tokens in (128, 512, 2048, 8192)
    for reader in ("nothing", "a sum", "attention")
)

_BLOCKS = tuple(
    Case(
        f"{what}{name}, {_SHORT[dtype]}{', training' * (work == 'training')}",
        "block",
        what + name,
        tokens=4096,
        dtype=dtype,
        work=work,
        rounds=2,
    )
    for name in ("Wan", "Flux")
    for dtype in ("float32", "bfloat16")
    for work in ("out of place", "training")
    for what in ("", "rotations of ")
)

_MODEL = tuple(
    Case(
        f"{what}{', training' * (work == 'training')}",
        "model",
        what,
        dtype="bfloat16",
        work=work,
        rounds=5,
    )
    for work in ("out of place", "training")
    for what in ("eager", "rotations of eager", "compiled")
)

# ---- a GPU ----------------------------------------------------------------------------------------

#: The contenders that must never be faster than this library there.
RIVALS = ("compiled eager", "definition, compiled", "Liger", "flash-attention", "xopes")

#: The least share of a copy's bandwidth, and the most microseconds of host time per call.
SHARE, HOST = 0.92, 25.0

_NEVER = tuple((rival, 1.0) for rival in RIVALS)
_12 = Case(
    "12 x 32768, 12 heads",
    rows=12,
    tokens=32768,
    q_heads=12,
    k_heads=12,
    dtype="bfloat16",
    work="out of place",
    device="cuda",
    alone=True,
    bounds=(("clone", 1 / SHARE), *_NEVER),
)
_32K = replace(_12, name="prefill 32k", rows=1, q_heads=32, k_heads=8)
_MORE = replace(_32K, bounds=_NEVER)
_DECODE = replace(_MORE, tokens=1, work="in place", positions="ids per row", cold=False)


def _and_training(name: str, base: Case = _MORE, **changes: Any) -> tuple[Case, ...]:
    """Return a case of 32k tokens, forward and training, with compiled contenders."""
    forward = replace(base, name=f"{name} 32k", compiled=True, **changes)
    return forward, replace(forward, name=f"{name} 32k, training", work="training", bounds=_NEVER)


# The most important first, because time may run out.
_GPU = (
    replace(_12, compiled=True),
    *_and_training("prefill", _32K),
    replace(_12, name="12 x 32768, 12 heads, backward", work="backward"),
    replace(_32K, name="prefill 32k, backward", work="backward"),
    *(
        Case(
            f"host time of {what}",
            "host",
            what,
            device="cuda",
            dtype="bfloat16",
            tokens=1,
            cold=False,
            host=True,
            alone=True,
            bounds=((MICROSECONDS, HOST),) if "prepared" in what and "," not in what else (),
        )
        for what in (
            "rotate_qk_ prepared",
            "rotate_qk prepared",
            "rotate_qk_, an offset",
            "rotate_qk prepared, with gradients",
            "phases.running",
            "rotate_qk_, running phases",
        )
    ),
    Case(
        "kernels compiled for other lengths and offsets",
        "kernels",
        device="cuda",
        cold=False,
        alone=True,
        bounds=((KERNELS, 0.0),),
    ),
    replace(_MORE, name="prefill 32k, in place", work="in place"),
    *(
        replace(_DECODE, name=f"decode {rows}{', graph' * graph}", rows=rows, graph=graph)
        for rows in (1, 32, 256)
        for graph in (False, True)
    ),
    replace(_MORE, name="prefill 2k", tokens=2048),
    replace(_MORE, name="prefill 2k, in place", tokens=2048, work="in place"),
    replace(_MORE, name="prefill 32k, interleaved", interleaved=True),
    *_and_training("silu", act="silu"),
    *_and_training("rms_norm", act="rms_norm"),
    *_and_training("neighbours", neighbours=True),
    replace(_MORE, name="packed 32k", positions="packed"),
    replace(_MORE, name="M-RoPE 32k", positions="M-RoPE"),
    replace(_MORE, name="phases 32k", phases="given"),
    *_and_training("running phases", phases="running"),
    *_and_training("running phases, per head", phases="running", q_heads=16, k_heads=16),
    replace(_DECODE, name="running phases, decode 32", rows=32, phases="running"),
    replace(_MORE, name="softmax 32k", act="softmax"),
    replace(_MORE, name="slope gate 32k", gate="slope"),
    replace(_MORE, name="exp gate 32k", gate="exp"),
    replace(_MORE, name="prefill 32k, float32", dtype="float32"),
)
_ON_GPU = (
    "^(neg_|clone|eager|transformers|compiled eager|definition, compiled"
    "|Liger|flash-attention|xopes)$"
)

#: The suites. `python -m benchmarks --suite NAME` measures one.
SUITES = {
    "short": Suite(
        "the calls of a model, with the sizes of Llama 3 8B's attention", _CALLS, f"^({_USUAL})$"
    ),
    "full": Suite(
        "all calls of docs/benchmarks.md; half an hour per run", _FULL, f"^({_USUAL}|{_OPTIONS})$"
    ),
    "grid": Suite("many shapes, beside torch code that has its tables already", _GRID, _GROUPS),
    "widths": Suite("every width, every rotary part and few heads, as the grid", _WIDTHS, _GROUPS),
    "small": Suite("host time of one decoded token, and of writing into a cache", _SMALL),
    "sharded": Suite("host time of calls on DTensors, beside local calls", _SHARDED),
    "streams": Suite("stores past the caches, by what reads the results next", _STREAMS),
    "blocks": Suite("blocks of video and image models before and after `patch`", _BLOCKS),
    "model": Suite("a transformers model before and after `patch`", _MODEL),
    "gpu": Suite("the budgets of docs/gpu.md, and other libraries' kernels", _GPU, _ON_GPU, "cuda"),
}


def tiny(case: Case, tokens: int = 5) -> Case:
    """Return a tiny case on the CPU: at most 2 rows and `tokens` tokens, 2 query heads, 16 channels.

    It has 1 key head, or 2 if the case has as many key heads as query heads.
    """
    k_heads = min(case.k_heads, 2 if case.k_heads == case.q_heads else 1)
    return replace(
        case,
        rows=min(case.rows, 2),
        tokens=min(case.tokens, tokens),
        q_heads=2,
        k_heads=k_heads,
        head_dim=16,
        rotary_dim=case.rotary_dim and 8,
        device="cpu",
        threads=1,
        graph=False,
        alone=False,
    )


def fitted(case: Case, room: int) -> Case:
    """Return a case whose q and k take at most `room` bytes, with fewer rows, then fewer tokens.

    >>> [fitted(SUITES["gpu"].cases[0], room).rows for room in (10**9, 10**12)]
    [3, 12]
    """
    for name, least in (("rows", 1), ("tokens", 16)):
        while case.moved // 2 > room and getattr(case, name) > least:
            case = replace(case, **{name: max(least, getattr(case, name) // 2)})
    return case
