"""Random calls of the public functions, with random options."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from tightrope import Axes, RopeSpec, frequencies, functional, gates, nn, positions
from tightrope.activations import RMSNorm

Tensors = Mapping[str, torch.Tensor]

# Relative frequency of each function and mode.
VERBS = {"rotate": 16, "rotate_": 16, "rotate_qk": 14, "rotate_qk_": 14, "rerotate": 4}
VERBS |= {"rerotate_": 4, "apply_rotary_pos_emb": 7, "apply_rotary_pos_emb_": 7}
VERBS |= {"lrpe_rotate_1d": 5, "lrpe_rotate_1d_": 4, "polar_scan": 3, "rotary_apply": 2}
VERBS |= {"rotary_pos_embedding": 2, "build_freqs_cis": 1, "frequencies": 2, "Llama": 0.7}
VERBS |= {"RotaryPositionalEmbedding": 1.5, "LrpeRotate1d": 1.5, "PolarRoPEHead": 0.5}
VERBS |= {"PolarRoPEAttention": 1.5}
PLAIN = {"plain": 28, "no grad": 3, "inference": 2, "inference tensors": 2, "autocast": 1}
PLAIN |= {"inference tensors outside": 0.5, "meta": 1, "bad": 10}
MODES = PLAIN | {"grad": 24, "second": 7, "batched": 3, "vmap": 4, "func.grad": 3, "jvp": 2}
MODES |= {"vmap of grad": 2, "jvp of grad": 1, "dual": 2, "functionalize": 1, "compiled": 1.5}
MODES |= {"compiled grad": 1.7, "compiled vmap": 0.3, "compiled func.grad": 0.3, "exported": 0.4}

LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (2, 1, 3)}
LAYOUTS |= {"bsd": (0, 2, 3), "sd": (2, 3)}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
STRIDES = ("contiguous", "permuted", "inside", "stepped", "misaligned", "expanded")
TABLES = ("cat", "repeat", "half")
ACTS = "relu sigmoid silu gelu elu relu2 softplus exp leaky_relu tanh sin cos softmax".split()
NEVER = (None,) * 5


class Call(NamedTuple):
    """A function, its arguments as a function of the drawn tensors, and the names of tensors it changes."""

    function: Callable[..., Any]
    arguments: Callable[[Tensors], dict[str, Any]]
    changes: Sequence[str] = ()


# Arguments of the surface before version 0.4 that `RopeSpec.at` takes since.
STATED = ("seq_len", "inv_freq")


def public(name: str) -> Callable[..., Any]:
    """Return a public function that takes the arguments of the surface before version 0.4."""
    function = getattr(functional, name)
    return partial(_translated, function) if hasattr(functional, "write_kv") else function  # type: ignore[no-any-return]


def _translated(function: Callable[..., Any], **now: Any) -> Any:
    from tightrope.backends import use

    backend = now.pop("backend", None)
    if "from_spec" in now:
        for old, new, where in (("from", "old", "positions"), ("to", "new", "new_positions")):
            spec, length = now.pop(f"{old}_spec"), now.pop(f"{old}_seq_len")
            if spec.by_length and length is not None:
                at = now["positions"] if now.get(where) is None else now[where]
                spec = spec.at(at, device=now["k"].device, seq_len=length)
            now[new] = spec
        for new, where in (("old", "positions"), ("new", "new_positions")):
            if not isinstance(now[new], RopeSpec):
                now[where] = None
    elif "spec" in now:
        rope, stated = now.pop("spec"), {name: now.pop(name, None) for name in STATED}
        if any(value is not None for value in stated.values()):
            x = now.get("x", now.get("q"))
            rope = rope.at(now.pop("positions"), device=x.device, **stated)
        now["rope"] = rope
    with use(backend) if backend else nullcontext():
        return function(**now)


class Draw:
    """The random choices of one call, and its floating-point tensors."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(f"{seed} {number}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))
        self.choices: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.strides: dict[str, str] = {}
        self.verb, self.mode = self.weighed("verb", VERBS), self.weighed("mode", MODES)
        self.dtype = self.pick("dtype", *DTYPES)

    def pick(self, name: str, *values: Any) -> Any:
        value = self.random.choice(values)
        self.choices[name] = str(value)
        return value

    def weighed(self, name: str, values: Mapping[str, float]) -> str:
        self.choices[name] = self.random.choices(list(values), list(values.values()))[0]
        return self.choices[name]

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(-40, 40, shape, generator=self.generator)

    def add(self, name: str, values: torch.Tensor, wide: bool = False) -> str:
        """Add a tensor of a random dtype and return its name; `wide` excludes 16-bit dtypes."""
        wides = (torch.float32, torch.float64)
        values = values.to(self.pick(f"type of {name}", *wides, *(() if wide else (self.dtype,))))
        if self.pick(f"{name} is a Parameter", False, False, True):
            values = torch.nn.Parameter(values, requires_grad=False)
        self.tensors[name] = values
        return name

    def add_x(self, name: str, *shape: int) -> None:
        """Add a tensor to rotate, with random strides."""
        values = self.noise(*shape).to(self.dtype)
        if self.pick(f"values of {name}", *["normal"] * 15, "special") == "special":
            odd = torch.tensor([-0.0, math.inf, math.nan, 1e-40], dtype=self.dtype)
            values.view(-1)[:4] = odd[: values.numel()]
        kept = STRIDES[:-1] if self.verb.endswith("_") or name.startswith("out") else STRIDES
        self.strides[name] = self.pick(f"strides of {name}", STRIDES[0], *kept)
        self.tensors[name] = laid_out(values, self.strides[name])


def laid_out(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the values of x, placed in memory as `kind` states.

    The exception is "expanded": it repeats the first entry along dimension -2, with stride 0.
    """
    if kind == "permuted" and x.dim() > 2:
        return x.movedim(0, -2).clone(memory_format=torch.contiguous_format).movedim(-2, 0)
    if kind == "inside":
        return torch.nn.functional.pad(x, (3, 2), value=math.nan)[..., 3 : 3 + x.shape[-1]]
    if kind == "stepped":
        return torch.stack((x, x * math.nan), -1)[..., 0]
    if kind == "misaligned":
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    if kind == "expanded" and x.dim() > 1:
        return x[..., :1, :].expand(x.shape)
    return x.clone(memory_format=torch.contiguous_format)


def spec_of(d: Draw, axes: int = 1, heads: int = 1) -> RopeSpec:
    """Draw a spec whose positions have `axes` axes."""
    pairs = d.pick("pairs", *([] if axes > 1 else [1, 2, 3]), 4, 7, 8, 16, 17, 32, 64)
    start, after = d.pick("start", 0, 0, 0, 1, 3), d.pick("after", 0, 0, 0, 2)
    ones = (1.0,) * pairs
    rules: dict[str, Callable[[], Any]] = {
        "linear": lambda: frequencies.Linear(4.0),
        "ntk": lambda: frequencies.NTK(4.0),
        "dynamic": lambda: frequencies.DynamicNTK(4.0, 32),
        "yarn": lambda: frequencies.YaRN(8.0, 64),
        "yarn with a factor": lambda: frequencies.YaRN(4.0, 64, attention_factor=1.3),
        "llama3": lambda: frequencies.Llama3(8.0, 1.0, 4.0, 64),
        "proportional": lambda: frequencies.Proportional(0.5),
        "longrope": lambda: frequencies.LongRoPE(ones, (3.0,) * pairs, 32, factor=4.0),
        "given": lambda: frequencies.Given.of(d.noise(pairs)),
        "given per head": lambda: frequencies.Given.of(d.noise(heads, pairs)),
    }
    rule = d.pick("rule", *["none"] * 8, *(list(rules)[: 7 if axes > 1 else 10]))
    sizes = (pairs - axes + 1, *[1] * (axes - 1))
    shares: dict[str, Callable[[], Axes | None]] = {
        "sections": lambda: Axes.sections(sizes),
        "turns": lambda: Axes.sections(sizes, interleaved=True),
        "blocks": lambda: Axes.blocks(sizes),
        "strided": lambda: Axes.strided(axes, pairs),
    }
    if axes > 1:
        share = shares[d.pick("shares", *(list(shares)[: 3 if pairs % axes else 4]))]
    return RopeSpec(
        start + 2 * pairs + after,
        base=d.pick("base", 100.0, 1e4, 5e5),
        rotary_dim=2 * pairs,
        start=start,
        interleaved=d.pick("interleaved", False, True),
        scaling=rules[rule]() if rule in rules else None,
        axes=share() if axes > 1 else None,
    )


def positions_of(
    d: Draw, rows: int, tokens: int, axes: int = 1, name: str = "positions"
) -> tuple[bool, Callable[[Tensors], Any]]:
    """Draw positions; return whether they are among the drawn tensors, and a function that makes them."""
    at, half = positions, tokens // 2
    ends, lengths = torch.tensor([0, half, tokens]), torch.full((rows,), half)
    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "offset": lambda: 7,
        "far offset": lambda: 2**31 - 200,
        "ids": lambda: d.ids(tokens),
        "ids of int32": lambda: d.ids(tokens).int(),
        "far ids": lambda: d.ids(tokens) + 2**30,
        "ids per row": lambda: d.ids(rows, tokens),
        "per row": lambda: at.per_row(d.ids(rows)),
        "padded": lambda: at.per_row(lengths - tokens),
        "masked": lambda: at.left_padded(torch.ones(rows, tokens).cumsum(1) > half),
        "packed": lambda: at.packed(ends, d.ids(2), tokens),
        "joined": lambda: at.concatenate([at.explicit(3, tokens - half), d.ids(half)]),
        "zigzag": lambda: at.shard(5, 1, 2, kind="zigzag", tokens=2 * tokens),
    }
    fractions = {"fractions": (tokens,), "fractions per row": (rows, tokens), "starts": (rows,)}
    if rows > 1:
        del made["packed"]
    if tokens % 2:
        del made["zigzag"]
    if axes > 1:
        fractions = {"fractions": (axes, tokens), "fractions per row": (axes, rows, tokens)}
        sizes = (*[1] * (axes - 2), 2, half)
        made = {
            "grid": lambda: at.grid(*sizes, start=3),
            "grid of spans": lambda: at.grid(*sizes, span=(-1.0, 1.0)),
            "text": lambda: at.text(3, axes=axes),
            "text of ids": lambda: at.text(d.ids(rows, tokens), axes=axes),
            "ids": lambda: at.multi_axis(d.ids(axes, tokens)),
            "ids per row": lambda: at.multi_axis(d.ids(axes, rows, tokens)),
        }
        if axes == 3:
            made["mrope"] = lambda: at.mrope([tokens - 4, (1, 2, 2)])
    kind = d.pick(name, *made, *fractions)
    if kind in made:
        value = made[kind]()
        return False, lambda t: value  # noqa: ARG005
    d.add(name, d.ids(*fractions[kind]) / 8, wide=True)
    if axes == 1 and kind != "starts":
        return True, lambda t: t[name]
    wrap = at.multi_axis if axes > 1 else at.per_row
    return True, lambda t: wrap(t[name])


def act_of(d: Draw, name: str, heads: int, width: int) -> Callable[[Tensors], Any]:
    """Draw a prologue f; return a function that makes it from the drawn tensors."""
    kind = d.pick(name, *["none"] * 16, "norm", "norm", "norm", "norm per head", "bare norm", *ACTS)
    if not kind.endswith(("norm", "head")):
        return lambda t: None if kind == "none" else kind  # noqa: ARG005
    shape = (heads, width) if kind == "norm per head" else (width,)
    options = {"eps": d.pick("eps", 1e-6, 1e-3), "unit_offset": d.pick("offset", False, True)}
    own = None if kind == "bare norm" else d.add(f"weight of {name}", d.noise(*shape))
    return lambda t: RMSNorm(t[own] if own else None, **options)


def gate_of(
    d: Draw, name: str, heads: int, tokens: int, spec: RopeSpec
) -> Callable[[Tensors], gates.Gate | None]:
    """Draw an epilogue P; return a function that makes it from the drawn tensors."""
    kinds = ["number", "Scalar", "Exp", "Exp", "Given", "Given"]
    kinds += ["Slope", "Slope", "XPos"] if spec.axes is None else []
    kind, tied = d.pick(name, *["none"] * 12, *kinds), d.pick("tied", None, "pair")
    width = d.pick("widths", 1, *[spec.rotary_dim // 2 if tied else spec.head_dim] * 3)
    heads = d.pick("heads of the gate", 1, heads)
    if kind == "none":
        return lambda t: None  # noqa: ARG005
    if kind in ("number", "XPos"):
        gate = gates.Scalar(1.7) if kind == "number" else gates.XPos(1.25, scale_base=60.0)
        return lambda t: gate  # noqa: ARG005
    if kind == "Scalar":
        own = d.add(f"tensor of {name}", d.noise(1)[0].abs() + 0.5)
        return lambda t: gates.Scalar(t[own])
    shape = (d.pick("tokens of the gate", 1, tokens), heads, width)
    log = (0.01 if kind == "Slope" else 0.3) * d.noise(*shape[0 if kind == "Given" else 1 :])
    own = d.add(f"tensor of {name}", log)
    return lambda t: getattr(gates, kind)(t[own], tied)


def rotation(d: Draw) -> Call:
    """Draw a call of rotate, rotate_, rotate_qk or rotate_qk_."""
    layout, both = d.pick("layout", *LAYOUTS), "qk" in d.verb
    names = [["x"], ["q", "k"], ["q"]][both and d.pick("of q and k", 1, 1, 1, 1, 1, 2)]
    dims = LAYOUTS[layout]
    rows = d.pick("rows", 1, 2, 3) if 0 in dims else 1
    heads = d.pick("heads", 1, 2, 4) if 1 in dims else 1
    few = heads > 1 and d.pick("one head of keys", False, len(names) == 2)
    axes = d.pick("axes", 1, 1, 1, 1, 2, 3)
    tokens = d.pick("tokens", *((0, *[1] * 5, *[2, 5, 18, 70] * 3) if axes == 1 else (4, 8, 12)))
    spec = spec_of(d, axes, 1 if few else heads)
    width, per = spec.head_dim, 1 if few else heads
    for i, name in enumerate(names):
        sizes = (rows, 1 if few and i else heads, tokens, width)
        d.add_x(name, *(sizes[dim] for dim in dims))
    learned, where = positions_of(d, rows, tokens, axes)
    seq_len: Any = {"number": 2**32, "rows": torch.full((rows,), 2**32)}.get(
        d.pick("seq_len", "none", "none", "none", "number", "rows")
    )
    act, gate = act_of(d, "act", per, width), gate_of(d, "gate", per, tokens, spec)
    acts, of_gates = [act], [gate]
    if both and d.pick("pairs of f and P", False, False, True):
        acts.append(act_of(d, "act of k", per, width))
        of_gates.append(gate_of(d, "gate of k", per, tokens, spec))
    prepared = d.pick("prepared", "no", "inside", *["no" if learned else "before"] * 2)
    backend = d.pick("backend", *NEVER, "cpu", "reference")
    inverse = d.choices["act"] == d.choices.get("act of k", "none") == "none"
    inverse = inverse and d.pick("inverse", False, True)
    if prepared == "no" and d.pick("inv_freq", *NEVER, "learned"):
        shape = (d.pick("heads of inv_freq", 1, per), spec.rotary_dim // 2)
        inv_freq = d.noise(*(shape if axes == 1 else (axes, *shape)))
        d.add("inv_freq", inv_freq[0] if axes == 1 and shape[0] == 1 else inv_freq)
    outs = not d.verb.endswith("_") and d.mode in PLAIN and d.pick("out", *NEVER, "given")
    for name in names if outs else ():
        d.add_x(f"out of {name}", *d.tensors[name].shape)
    device = "meta" if d.mode == "meta" else None
    rope = spec.at(where({}), device=device, seq_len=seq_len) if prepared == "before" else None

    def arguments(t: Tensors) -> dict[str, Any]:
        now = {name: t.get(name) for name in (("q", "k") if both else "x")}
        now |= {"spec": rope, "positions": None, "seq_len": None, "layout": layout}
        if prepared == "inside":
            now["spec"] = spec.at(where(t), seq_len=seq_len)
        elif prepared == "no":
            now |= {"spec": spec, "positions": where(t), "seq_len": seq_len}
        now |= {"act": acts[0](t), "gate": of_gates[0](t)}
        if len(acts) > 1:
            now |= {"act": (now["act"], acts[1](t)), "gate": (now["gate"], of_gates[1](t))}
        if outs:
            into = tuple(t.get(f"out of {name}") for name in ("q", "k"))
            now["out"] = into if both else t["out of x"]
        now |= {"inv_freq": t.get("inv_freq"), "inverse": inverse, "backend": backend}
        return now

    verb = public(d.verb)
    if prepared != "before":
        return Call(verb, arguments, names if d.verb.endswith("_") else ())
    # The second call uses the caches of the first.
    twice = lambda **now: (verb(**now), verb(**now))  # noqa: E731
    return Call(twice, arguments, names if d.verb.endswith("_") else ())


def rerotation(d: Draw) -> Call:
    """Draw a call of rerotate or rerotate_."""
    layout, axes = d.pick("layout", *LAYOUTS), d.pick("axes", 1, 1, 1, 2)
    rows = d.pick("rows", 1, 2) if "b" in layout else 1
    heads, tokens = d.pick("heads", 1, 3) if "h" in layout else 1, d.pick("tokens", 4, 6, 18)
    old = spec_of(d, axes, heads)
    new = replace(old, base=d.pick("new base", old.base, 777.0))
    new = replace(new, scaling=d.pick("new rule", old.scaling, None, frequencies.Linear(2.0)))
    sizes = (rows, heads, tokens, old.head_dim)
    d.add_x("k", *(sizes[dim] for dim in LAYOUTS[layout]))
    _, where = positions_of(d, rows, tokens, axes)
    _, to = positions_of(d, rows, tokens, axes, "new_positions")
    fixed = {
        "layout": layout,
        "backend": d.pick("backend", *NEVER, "reference"),
        "from_seq_len": d.pick("from_seq_len", None, 2**32),
        "to_seq_len": d.pick("to_seq_len", None, 2**32),
    }

    def arguments(t: Tensors) -> dict[str, Any]:
        ends = {"from_spec": old, "to_spec": new, "positions": where(t), "new_positions": to(t)}
        return {"k": t["k"], **ends, **fixed}

    return Call(public(d.verb), arguments, ["k"] if d.verb.endswith("_") else ())


def by_tables(d: Draw) -> Call:
    """Draw a call of apply_rotary_pos_emb or apply_rotary_pos_emb_."""
    rows, heads, tokens = d.pick("rows", 1, 2), d.pick("heads", 1, 2, 4), d.pick("tokens", 1, 5, 18)
    pairs, start = d.pick("pairs", 1, 4, 7, 16, 32), d.pick("start", 0, 0, 0, 2)
    width, tables = start + 2 * pairs + d.pick("after", 0, 0, 3), d.pick("tables", *TABLES)
    shapes = {
        (4, 1): (rows, heads, tokens, width),
        (4, 2): (rows, tokens, heads, width),
        (3, 1): (tokens, heads, width),
        (3, 0): (rows, tokens, width),
    }
    dims, unsqueeze = d.pick("dimensions and heads", (4, 1), (4, 1), *shapes)
    shape = shapes[dims, unsqueeze]
    rows = rows if shape[0] == rows and dims + unsqueeze != 4 else 1
    for name in ("q", "k")[: d.pick("of q and k", 1, 2, 2)]:
        d.add_x(name, *shape)
    ids = d.pick("position_ids", *NEVER, (tokens,), (rows, tokens))
    where = None if ids is None else torch.randint(9, ids, generator=d.generator)
    lead = [9 if ids else tokens]
    lead = d.pick("rows of tables", lead, [rows, *lead] if len(shape) == 4 else lead)
    dtype = d.pick("type of tables", torch.float32, d.dtype)
    angles = 3 * d.noise(*lead, pairs)
    for name, half in (("cos", angles.cos()), ("sin", angles.sin())):
        both = {"cat": half.repeat(*[1] * len(lead), 2), "repeat": half.repeat_interleave(2, -1)}
        d.tensors[name] = both.get(tables, half).to(dtype)
    fixed = {"unsqueeze_dim": unsqueeze, "position_ids": where, "tables": tables, "start": start}
    fixed |= {name: d.pick(name, False, True) for name in ("interleaved", "inverse")}
    fixed["backend"] = d.pick("backend", *NEVER, "reference")
    names = ["q", "k"] if "k" in d.tensors else ["q"]

    def arguments(t: Tensors) -> dict[str, Any]:
        return {"q": t["q"], "k": t.get("k"), "cos": t["cos"], "sin": t["sin"], **fixed}

    return Call(public(d.verb), arguments, names if d.verb.endswith("_") else ())


def lrpe(d: Draw) -> Call:
    """Draw a call of lrpe_rotate_1d or lrpe_rotate_1d_."""
    rows, heads, tokens = d.pick("rows", 1, 2), d.pick("heads", None, 1, 3), d.pick("tokens", 1, 6)
    pairs, start = d.pick("pairs", 2, 4, 16), d.pick("start", 0, 0, 1)
    width, count = start + 2 * pairs + d.pick("after", 0, 0, 3), heads or 1
    d.add_x("x", rows, tokens, *([] if heads is None else [heads]), width)
    shapes = [(count, pairs), (1, pairs), (pairs,), (count, 1), (count,), (count, pairs - 1)]
    d.add("theta", d.noise(*d.pick("theta", *shapes)))
    act = act_of(d, "act", count, width)
    over = d.pick("dim", -1, 1) if d.choices["act"] == "softmax" else None
    offset = d.pick("offset", 0, 0, 0 if over == 1 else 9)
    if over != 1 and d.pick("an offset per row", False, True):
        offset = d.ids(rows)
    fixed = {"offset": offset, "dim": over, "start": start, "rotary_dim": 2 * pairs}
    fixed["theta_axis"] = d.pick("theta_axis", "auto", "auto", "auto", "pair")

    def arguments(t: Tensors) -> dict[str, Any]:
        return {"x": t["x"], "theta": t["theta"], "act": act(t), **fixed}

    return Call(getattr(functional, d.verb), arguments, ["x"] if d.verb.endswith("_") else ())


def scan(d: Draw) -> Call:
    """Draw a call of polar_scan; in some cases a second call continues from the state of the first."""
    rows, heads, group, tokens = (d.pick(name, 1, 2) for name in ("rows", "heads", "group", "more"))
    tokens, layout = 5 * tokens, d.pick("layout", "bhsd", "bshd", "sbhd")
    spec = spec_of(d)
    for name, many, width in (("q", heads * group, 0), ("k", heads, 0), ("v", heads, 3)):
        sizes = (rows, many, tokens, width or spec.head_dim)
        d.add_x(name, *(sizes[dim] for dim in LAYOUTS[layout]))
    shape = d.pick("decay", None, (), (heads, 1), (1, spec.head_dim), (rows, heads, tokens, 1))
    decay = None if shape is None else d.add("log_decay", -d.noise(*shape).abs())
    gate = gate_of(d, "gate", heads if group == 1 else 1, tokens, spec)
    fixed = {
        "form": d.pick("form", "chunked", "step"),
        "chunk": d.pick("chunk", 3, 128),
    }
    fixed |= {"layout": layout, "spec": spec, "seq_len": 2**32}
    _, where = positions_of(d, rows, tokens)

    def arguments(t: Tensors) -> dict[str, Any]:
        now = {name: t[name] for name in "qkv"}
        log = t[decay] if decay else None
        return {**now, "log_decay": log, "gate": gate(t), "positions": where(t), **fixed}

    def both(**now: Any) -> Any:
        first = run(**now)
        return first, run(**now, state=first[1])

    run = public("polar_scan")
    return Call(both if d.pick("state", False, True) else run, arguments)


def other_functions(d: Draw) -> Call:
    """Draw a call of rotary_apply, rotary_pos_embedding, build_freqs_cis, or `described`."""
    if d.verb == "frequencies":
        spec, seq_len = spec_of(d), d.pick("seq_len", None, 16, 100, 2**20)
        made = {"spec": spec, "seq_len": seq_len}
        return Call(described, lambda t: made)  # noqa: ARG005
    if d.verb == "build_freqs_cis":
        made = {"seq_len": d.pick("seq_len", 0, 1, 40), "d": d.pick("d", 2, 6, 64)}
        made |= {"base": d.pick("base", 1e4, 500.0), "dtype": d.pick("dtype", *DTYPES[::2])}
        return Call(functional.build_freqs_cis, lambda t: made)  # noqa: ARG005
    lead, tokens = d.pick("lead", (), (2,), (2, 3), (2, 1, 3)), d.pick("tokens", 1, 6, 18)
    pairs = d.pick("pairs", 1, 4, 16)
    if d.verb == "rotary_apply":
        d.add_x("x", *lead, tokens, 2 * pairs)
        shape = d.pick("tables", (tokens, pairs), (1, pairs), (*lead, tokens, pairs))
        for name in ("cos", "sin"):
            d.add(name, d.noise(*shape))
        d.tensors["sin"] = d.tensors["sin"].to(d.tensors["cos"])
        return Call(functional.rotary_apply, dict)
    d.add_x("input_", *lead, tokens, 2 * pairs)
    where = d.pick("position_ids", "none", "ids", "fractions")
    ids = d.ids(tokens) if where == "ids" else None
    if where == "fractions":
        d.add("position_ids", d.ids(tokens) / 8, wide=True)
    fixed = {"position_ids": ids, "interleaved": d.pick("interleaved", False, True)}
    return Call(functional.rotary_pos_embedding, lambda t: {**fixed, **t})


def described(spec: RopeSpec, seq_len: Any) -> list[Any]:
    """Return a spec's repr, frequencies, attention scaling and phase words, and whether its dict restores it."""
    found = spec.frequencies(seq_len)
    words = spec.words_for(100 if seq_len is None else seq_len)
    again = RopeSpec.from_dict(spec.to_dict())
    return [repr(spec), found.inv_freq, found.attention_scaling, words, again == spec]


def modules(d: Draw) -> Call:
    """Draw a call of a module of tightrope.nn; its parameters are among the drawn tensors."""
    torch.manual_seed(d.random.getrandbits(30))
    rows, tokens, heads = d.pick("rows", 1, 2), d.pick("tokens", 1, 6), d.pick("heads", 2, 4)
    options: dict[str, Any] = {}
    if d.verb == "RotaryPositionalEmbedding":
        module: Any = nn.RotaryPositionalEmbedding(
            16, interleaved=d.pick("interleaved", False, True)
        )
        d.add_x(
            "x", rows, tokens, *d.pick("between", (), (heads,), (heads, 2)), 16 + d.pick("+", 0, 3)
        )
        options = {"seq_dim": 1, "positions": d.pick("positions", None, 7)}
        options["inverse"] = d.pick("inverse", False, True)
    elif d.verb == "LrpeRotate1d":
        per = {"per": d.pick("per", "head and pair", "pair", "head")}
        module = nn.LrpeRotate1d(16, heads, act=d.pick("act", *ACTS[:-1]), **per)
        d.add_x("x", rows, tokens, heads, 16)
        options["offset"] = d.pick("offset", 0, 5)
    else:
        settings = {"use_spd": d.pick("use_spd", False, True), "tied": d.pick("tied", None, "pair")}
        d.add_x("x", rows, tokens, 24)
        if d.verb == "PolarRoPEHead":
            module = nn.PolarRoPEHead(24, 8, dtype=d.dtype, **settings)
            options["cos"], options["sin"] = functional.build_freqs_cis(tokens, 8)
        else:
            settings |= {
                "num_kv_heads": d.pick("kv_heads", 1, 2),
                "gate": d.pick("gate", None, "slope"),
            }
            settings["causal"] = d.pick("causal", False, True)
            module = nn.PolarRoPEAttention(24, heads, 8, dtype=d.dtype, **settings)
            options["positions"] = d.pick("positions", None, 3)
    d.tensors |= {name: value.detach() for name, value in module.named_parameters()}

    def arguments(t: Tensors) -> dict[str, Any]:
        parameters = {name: value for name, value in t.items() if name != "x"}
        return {"parameters": parameters, "x": t["x"], **options}

    def run(parameters: dict[str, torch.Tensor], **now: Any) -> Any:
        return torch.func.functional_call(module, parameters, (), now)

    return Call(run, arguments)


def llama(d: Draw) -> Call:
    """Draw a call of a Llama of transformers, patched or patched and unpatched, with or without a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tightrope import patch, unpatch

    torch.manual_seed(d.random.getrandbits(30))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().to(d.dtype)
    patch(model, angles=d.pick("angles", "model", "exact"))
    if d.pick("unpatched", False, False, False, True):
        unpatch(model)
    d.tensors["x"] = d.noise(2, 6, 32).to(d.dtype)
    cached = d.pick("cached", False, True)

    def run(x: torch.Tensor) -> Any:
        if not cached:
            return model(inputs_embeds=x, use_cache=False).logits
        first = model(inputs_embeds=x[:, :5], use_cache=True)
        last = model(inputs_embeds=x[:, 5:], past_key_values=first.past_key_values, use_cache=True)
        return first.logits, last.logits

    return Call(run, dict)


FAMILIES: dict[str, Callable[[Draw], Call]] = {
    **dict.fromkeys(("rotate", "rotate_", "rotate_qk", "rotate_qk_"), rotation),
    **dict.fromkeys(("rerotate", "rerotate_"), rerotation),
    **dict.fromkeys(("apply_rotary_pos_emb", "apply_rotary_pos_emb_"), by_tables),
    **dict.fromkeys(("lrpe_rotate_1d", "lrpe_rotate_1d_"), lrpe),
    **dict.fromkeys(("rotary_apply", "rotary_pos_embedding"), other_functions),
    **dict.fromkeys(("build_freqs_cis", "frequencies"), other_functions),
    **dict.fromkeys(("RotaryPositionalEmbedding", "LrpeRotate1d"), modules),
    **dict.fromkeys(("PolarRoPEAttention", "PolarRoPEHead"), modules),
    "polar_scan": scan,
    "Llama": llama,
}
