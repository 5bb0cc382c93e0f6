"""The operator's registration with PyTorch: opcheck, the raw schema, fake and meta tensors."""

from functools import partial

import pytest
import torch

from tests.support import helpers
from tests.support.tolerances import assert_each, assert_near
from tightrope import RopeSpec, angles, gates
from tightrope.activations import ACTS, RMSNorm
from tightrope.backends import reference
from tightrope.functional import rotate, rotate_
from tightrope.ops import schema
from tightrope.patching._kinds import WIDTHS

noise = partial(helpers.noise, dtype=torch.float32)


SPEC = RopeSpec(8, rotary_dim=6, start=1)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def arguments(
    ids: torch.Tensor | None = None, layout: int = 0, interleaved: bool = False, direction: int = 0
) -> tuple[object, ...]:
    words = SPEC.at().angles.words
    turns = torch.ones_like(words)
    options = schema.Options(layout, 1, interleaved, direction, add_index=ids is None)
    return (words, turns, ids, 3, options.pack(), 1.25)


# ---- opcheck --------------------------------------------------------------------------------------


def outer_call(
    act: str,
    gate: int,
    direction: int,
    x: torch.Tensor,
    k: torch.Tensor | None,
    source: str = "words",
) -> schema.Packed:
    """Return the arguments after q and k of a call with f and P; no tensor requires grad."""
    xs, tokens = schema.present(x, k), x.shape[2]
    extras: list[torch.Tensor] = []
    if act == "rms_norm":
        extras += [1 + noise(heads, 8) / 9 for heads in (1, 5)[: len(xs)]]
    if gate == schema.LOG:
        extras += [noise(1, one.shape[1], tokens, 1) / 9 for one in xs]
    elif gate == schema.SLOPE:
        extras += [noise(one.shape[1], 8) / 99 for one in xs]
    if act != "none" and direction == schema.TRANSPOSE:
        extras += [noise(*one.shape).flip(0).to(one.dtype) for one in xs]
    number, which = schema.SOURCES.index(source), ACTS.index(act)
    options = schema.Options(0, 1, source=number, direction=direction, act=which, gate=gate)
    angle = noise(1, 1, 20, 3)
    primary, secondary = (
        (SPEC.at().angles.words, None) if source == "words" else (angle.cos(), angle.sin())
    )
    eps = 1e-5 if act == "rms_norm" else 0.0
    fixed = primary, secondary, None, 3, options.pack(), 1.25
    return (*fixed, [one.detach() for one in extras], eps) if extras else fixed


def extras_by(call: schema.Packed) -> list[torch.Tensor]:
    return list(schema.Arguments(*call).extras)


def rotated(q, k, *arguments):
    return schema.NEW.for_(arguments)(q, k, *arguments)


def carrying(extras, call: tuple[object, ...]) -> tuple[object, ...]:
    """Return `extras` and the eps of a call, the last arguments of the operator; () without extra tensors."""
    return (list(extras), call[7]) if extras else ()


STAGES = [
    (act, gate, direction)
    for act in ("none", "silu", "softmax", "rms_norm")
    for gate in (schema.NO_GATE, schema.LOG, schema.SLOPE)
    for direction in (schema.FORWARD, schema.TRANSPOSE, schema.INVERSE)
    if (act != "none" or gate) and not (act != "none" and direction == schema.INVERSE)
]


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    # Relative to the largest channel of each head, or to 1 if all are smaller.
    scale = wanted.abs().amax(-1, keepdim=True).clamp(min=1)
    assert_near(got.double() / scale, wanted / scale, "f and P, float32")


@pytest.mark.parametrize("source", schema.SOURCES[1 : schema.FULL])
@pytest.mark.parametrize("act, gate, direction", STAGES)
def test_tables_between_acts_and_gates(act: str, gate: int, direction: int, source: str) -> None:
    """Kernels agree with the definition for tables with f or P, which no public call combines."""
    x, k = noise(2, 3, 5, 8), noise(2, 5, 5, 8).transpose(1, 2)
    call = outer_call(act, gate, direction, x, k, source)
    call = (*(WIDTHS[source](table) for table in call[:2]), *call[2:])
    wide = (*(table.double() for table in call[:2]), *call[2:6])
    wide += carrying([one.double() for one in extras_by(call)], call)
    right = reference.compose(x.double(), k.double(), *wide)
    assert_each(near, rotated(x, k, *call), right)
    if direction != schema.FORWARD:
        return
    leaves = [one.clone().requires_grad_() for one in (x, k, *call[:2], *extras_by(call))]
    doubles = [one.detach().double().requires_grad_() for one in leaves]

    def gradients(run, tensors):
        ys = run(*tensors[:4], *call[2:6], *carrying(tensors[4:], call))
        return torch.autograd.grad([y.sin().sum() for y in ys], tensors)

    assert_each(near, gradients(rotated, leaves), gradients(reference.compose, doubles))


@pytest.mark.parametrize(
    "act, gate, direction, mapped",
    [
        (act, gate, direction, mapped)
        for act, gate, direction in STAGES
        for mapped in ("x", "both", "extras")
        if mapped == "x" or act == "rms_norm" or gate or direction == schema.TRANSPOSE
    ],
)
def test_vmap_of_the_operator_with_acts_and_gates(
    act: str, gate: int, direction: int, mapped: str
) -> None:
    """Vmap of the operator with f or P equals a loop over the mapped index.

    Public functions with f or P use the definition in a transform; the operator itself has a vmap
    rule. A mapped call is one launch, or one per mapped index if norm weights or slopes are mapped
    and in the backward pass of a norm.
    """
    x, k = noise(4, 2, 3, 5, 8), noise(4, 2, 5, 5, 8)
    call = outer_call(act, gate, direction, x[0], k[0])
    extras = extras_by(call)
    stacks = [torch.stack([one * (1 + i / 8) for i in range(4)], 1) for one in extras]
    in_x = None if mapped == "extras" else 0
    in_extras = None if mapped == "x" else 1
    if mapped == "extras":
        x, k = x[0], k[0]

    def run(q, k, *own):
        return tuple(rotated(q, k, *call[:6], *carrying(own, call)))

    own = extras if in_extras is None else stacks
    got = torch.vmap(run, in_dims=(in_x, in_x, *[in_extras] * len(own)))(x, k, *own)
    for i in range(4):
        own_i = [one if in_extras is None else one[:, i] for one in own]
        xs = (x, k) if in_x is None else (x[i], k[i])
        for a, b in zip(got, run(*xs, *own_i), strict=True):
            assert torch.equal(a[i], b)


def test_raw_operators_see_gradients_in_lists_too() -> None:
    """Raw operators refuse learned frequencies that require grad, which they receive in a list."""
    x, theta = noise(2, 3, 5, 8), noise(1, 1, 1, 3, dtype=torch.float64).requires_grad_()
    words, turns = angles.words_from(theta.detach())
    call = (words, turns, None, 0, schema.Options(start=1, learned=True).pack(), 1.0, [theta], 0.0)
    before = x.clone()
    for run in (
        lambda: schema.rotate_extras_(x, None, *call),
        lambda: schema.rotate_extras_into(x, None, torch.empty_like(x), None, *call),
    ):
        with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
            run()
        with torch.no_grad():
            run()
        x.copy_(before)


@pytest.mark.parametrize("operator", [schema.rotate_extras, reference.compose])
def test_arguments_that_the_form_does_not_declare_are_refused(operator) -> None:
    x = noise(2, 3, 5, 8)
    words, *_ = arguments()
    weight, log = noise(1, 8), noise(1, 1, 1, 1)

    def code(**fields: int) -> int:
        return schema.Options(start=1, **fields).pack()

    norm = ACTS.index("rms_norm")
    for options, extras, eps in (
        (code(rounding=3), [], 0.0),
        (code(back=3), [], 0.0),
        (code(act=1, rounding=1), [], 0.0),
        (code(gate=schema.LOG, rounding=2), [log], 0.0),
        (code(source=7), [], 0.0),
        (code(source=schema.FULL, direction=schema.INVERSE), [], 0.0),
        (code(act=len(ACTS)), [], 0.0),
        (code(gate=3), [log], 0.0),
        (code(), [x], 0.0),
        (code(), [], 1.0),
        (code(act=1), [], 1.0),
        (code(act=1), [x], 0.0),
        (code(act=1, direction=schema.TRANSPOSE), [], 0.0),
        (code(act=1, direction=schema.TRANSPOSE), [x[:1]], 0.0),
        (code(act=1, direction=schema.TRANSPOSE), [x[..., :6]], 0.0),
        (code(act=1, direction=schema.INVERSE), [x], 0.0),
        (code(act=1, direction=schema.INVERSE), [], 0.0),
        (code(act=norm), [], 0.0),
        (code(act=norm), [weight[:, :7]], 0.0),
        (code(act=norm), [weight, weight], 0.0),
        (code(gate=schema.LOG), [], 0.0),
        (code(gate=schema.LOG), [log[0]], 0.0),
        (code(gate=schema.LOG), [noise(1, 2, 1, 1)], 0.0),
        (code(gate=schema.SLOPE), [weight[0]], 0.0),
        (code(gate=schema.SLOPE), [noise(2, 8)], 0.0),
        (code(learned=True), [], 0.0),
        (code(learned=True), [], 1.0),
        (code(learned=True), [x, x], 0.0),
    ):
        with pytest.raises((NotImplementedError, RuntimeError), match="tightrope"):
            operator(x, None, words, None, None, 0, options, 1.0, extras, eps)


def test_options_are_one_integer_and_back() -> None:
    for options in (
        schema.Options(),
        schema.Options(5, 2**20 - 1, True, schema.INVERSE, False, 4, True, 255, 15, 2, 2),
        schema.Options(start=77, add_index=False),
    ):
        assert schema.options_of(options.pack()) == options
        assert 0 <= options.pack() < 2**63
    with pytest.raises(RuntimeError, match="start must lie in"):
        schema.Options(start=2**20).pack()


def test_the_raw_operator_reads_nothing_outside_its_tensors() -> None:
    x = noise(2, 3, 5, 8)
    words = SPEC.at().angles.words
    add_index, ids = schema.Options(start=1).pack(), schema.Options(start=1, add_index=False).pack()
    tables = schema.Options(source=1).pack()
    bad = {
        "pairs": (words.repeat(1, 1, 1, 2), None, None, 0, add_index),
        "start": (words, None, None, 0, schema.Options(start=3).pack()),
        "rows of words": (words.repeat(1, 3, 1, 1), None, None, 0, add_index),
        "heads of words": (words.repeat(1, 1, 2, 1), None, None, 0, add_index),
        "tokens of ids": (words, None, torch.zeros(1, 1, 4), 0, ids),
        "rows of ids": (words, None, torch.zeros(1, 3, 5), 0, ids),
        "axes of ids": (words, None, torch.zeros(2, 1, 5), 0, ids),
        "dtype of ids": (words, None, torch.zeros(1, 1, 5).half(), 0, ids),
        "dtype of words": (words.int(), None, None, 0, add_index),
        "turns": (words, words[..., :1], None, 0, add_index),
        "layout": (words, None, None, 0, schema.Options(layout=6, start=1).pack()),
        "huge start": (words, None, None, 0, schema.Options(start=2**20 - 1).pack()),
        "no axes": (words[:0], None, None, 0, add_index),
        "no sines": (x[:1, :1], None, None, 0, tables),
        "sines of another length": (x[:1, :1], x[:1, :1, :2], None, 0, tables),
        "a negative form": (words, None, None, 0, -1),
    }
    from tightrope.backends import why_not

    if why_not()["cpu"] is not None:
        pytest.skip("plain torch checks its own bounds")
    for name, call in bad.items():
        before = x.clone()
        with pytest.raises(RuntimeError, match="tightrope"):
            schema.rotate(x, None, *call, 1.0)
        with pytest.raises(RuntimeError, match="tightrope"):
            schema.rotate_(x, None, *call, 1.0)
        assert torch.equal(x, before), name


# ---- fake and meta tensors, vmap of raw operators ----------------------------------------------------


def test_vmap_in_place() -> None:
    x = noise(4, 2, 5, 8)
    expected = rotate(x, SPEC, 3)
    torch.vmap(lambda x: rotate_(x, SPEC, 3, layout="bsd"))(x)
    assert torch.equal(x, expected)
    raw = noise(4, 2, 3, 5, 8)
    torch.vmap(lambda x: schema.rotate_(x, None, *arguments()) or x)(raw)
    (whole,) = schema.rotate(noise(4, 2, 3, 5, 8).flatten(0, 1), None, *arguments())
    assert torch.equal(raw.flatten(0, 1), whole)
    with pytest.raises(RuntimeError, match=r"\[rotate_\] vmap: x is not mapped"):
        torch.vmap(lambda p: schema.rotate_(raw[0], None, *arguments(p)) or p)(
            torch.rand(4, 1, 1, 5)
        )


def test_devices_are_not_mixed() -> None:
    """A call with tensors on several devices is refused.

    One meta tensor selects the fake kernel, whose result would be uninitialised memory.
    """
    x, words = noise(2, 3, 5, 8), SPEC.at().angles.words
    rest = (None, None, 0, schema.Options(start=1).pack(), 1.0)
    for k, other in ((None, words.to("meta")), (x.to("meta"), words)):
        for operator, outs in (
            (schema.rotate, ()),
            (schema.rotate_, ()),
            (schema.rotate_into, (x.clone(), k)),
        ):
            with pytest.raises(RuntimeError, match="must be on one device"):
                operator(x, k, *outs, other, *rest)


def test_raw_operators_count_a_version_of_all_that_they_write() -> None:
    """Raw operators increase the version counter of every tensor that they write."""
    written = [noise(2, 3, 5, 8) for _ in range(6)]
    before = [x._version for x in written]
    schema.rotate_(*written[:2], *arguments())
    schema.rotate_into(noise(2, 3, 5, 8), noise(2, 3, 5, 8), *written[2:4], *arguments())
    extras = [noise(2, 3, 5, 8) for _ in range(2)], 0.0
    options = schema.Options(start=1, gate=schema.LOG).pack()
    call = (SPEC.at().angles.words, None, None, 3, options, 1.25, *extras)
    schema.rotate_extras_into(noise(2, 3, 5, 8), noise(2, 3, 5, 8), *written[4:], *call)
    assert all(x._version > version for x, version in zip(written, before, strict=True))


def test_gate_gradients_on_the_meta_device() -> None:
    y, gate = noise(2, 3, 5, 8), noise(1, 3, 1, 8)
    options = schema.Options(start=1, gate=schema.LOG).pack()
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        x = y.to("meta", dtype)
        call = (x, None, x, None, gate.to("meta", dtype), None, None, 3, options)
        (made,) = schema.gate_gradients(*call)
        assert (made.device.type, made.shape, made.dtype) == ("meta", gate.shape, wanted)
    with pytest.raises(RuntimeError, match="must be on one device"):
        schema.gate_gradients(y, None, y, None, gate.to("meta"), None, None, 3, options)


# Functions of x and of a row of eight numbers; the transforms apply to the row.
EXTRAS = {
    "a norm": lambda x, w: rotate(x, RopeSpec(8), 3, act=RMSNorm(w)),
    "a gate": lambda x, w: rotate(x, RopeSpec(8), 3, gate=gates.Exp(w)),
    "a slope": lambda x, w: rotate(x, RopeSpec(8), 3, gate=gates.Slope(w / 8)),
    "frequencies": lambda x, w: rotate(x, RopeSpec(8), 3, inv_freq=w[:4]),
    "x": lambda x, w: rotate(x * w, RopeSpec(8), 3, act="silu"),
    "x in place": lambda x, w: rotate_(x * w, RopeSpec(8), 3, act="silu"),
    "x into": lambda x, w: rotate(x * w, RopeSpec(8), 3, out=torch.empty_like(x * w)),
}


TRANSFORMS = {
    "vmap": torch.vmap,
    "grad": lambda one: torch.func.grad(lambda rows: one(rows[0]).pow(3).sum()),
    "vmap of grad": lambda one: torch.vmap(torch.func.grad(lambda row: one(row).pow(3).sum())),
    "grad of vmap": lambda one: torch.func.grad(lambda rows: torch.vmap(one)(rows).pow(3).sum()),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "what, transform",
    [
        (what, transform)
        for what in EXTRAS
        for transform in TRANSFORMS
        if what != "x into" or transform == "vmap"  # out= allows no tensor that requires grad
    ],
)
def test_compiled_transforms_of_extra_tensors(what: str, transform: str) -> None:
    """While compiling, torch ignores gradient formulas registered from Python.

    tests/laws/test_calls.py has the same transforms in eager code.
    """
    x, rows = noise(2, 3, 5, 8, dtype=torch.float64), noise(4, 8, dtype=torch.float64)
    run = TRANSFORMS[transform](lambda row: EXTRAS[what](x, row))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows), run(rows), rtol=1e-9, atol=1e-9)
