"""The raw operators: what they refuse, how torch sees their arguments, and calls that no public function makes.

tests/kernel/cpu/test_raw_operators.py draws calls of the compiled ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import helpers
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_each, assert_near
from tests.support.written_calls import options_of, rows_of, value_of
from tightrope import RopeSpec
from tightrope.activations import ACTS
from tightrope.backends import reference
from tightrope.ops import schema
from tightrope.ops.schema import FACTOR, INVERSE, LOG, SLOPE, TRANSPOSE, Options
from tightrope.patching._kinds import WIDTHS

noise = partial(helpers.noise, dtype=torch.float32)
# q, k and the result of a head of 8 channels, of which 1 to 6 rotate.
X, K = noise(2, 3, 5, 8), noise(2, 5, 5, 8, seed=1)
SPEC = RopeSpec(8, rotary_dim=6, start=1)
WORDS = SPEC.at().angles.words
NORM = ACTS.index("rms_norm")


def code(**fields: Any) -> int:
    return Options(**{"start": 1, **fields}).pack()


def call_of(options: Options, xs: list[torch.Tensor], source: str = "words") -> schema.Packed:
    """Return the arguments after q and k of a call that has these options, for tensors bhsd."""
    extras = [1 + noise(heads, 8) / 9 for heads in (1, xs[-1].shape[1])[: len(xs)]]
    extras = extras if options.act == NORM else []
    if options.gate in (LOG, FACTOR):
        shift = -1.5 if options.gate == FACTOR else 0.0
        extras += [noise(1, x.shape[1], x.shape[2], 1) / 9 + shift for x in xs]
    elif options.gate == SLOPE:
        extras += [noise(x.shape[1], 8) / 99 for x in xs]
    if options.act and options.direction == TRANSPOSE:
        extras += [noise(*x.shape).flip(0) for x in xs]
    angles = noise(1, 1, 20, 3)
    tables = (WORDS, None) if source == "words" else (angles.cos(), angles.sin())
    options = options._replace(start=1, source=schema.SOURCES.index(source))
    fixed = *tables, None, 3, options.pack(), 1.25
    return (*fixed, extras, 1e-5 if options.act == NORM else 0.0) if extras else fixed


def rotated(q: torch.Tensor, k: torch.Tensor | None, *call: Any) -> tuple[torch.Tensor, ...]:
    return tuple(schema.NEW.for_(call)(q, k, *call))


# --- calls that no public function makes -----------------------------------------------------------

STAGES = [
    Options(act=ACTS.index(act), gate=gate, direction=direction)
    for act in ("none", "silu", "softmax", "rms_norm")
    for gate in (schema.NO_GATE, LOG, SLOPE, FACTOR)
    for direction in (schema.FORWARD, TRANSPOSE, INVERSE)
    if (act != "none" or gate) and not (act != "none" and direction == INVERSE)
]
every_stage = pytest.mark.parametrize("options", STAGES, ids=lambda each: f"{each[7:9]}{each[3]}")


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    # Relative to the largest channel of each head, or to 1 if all are smaller.
    scale = wanted.abs().amax(-1, keepdim=True).clamp(min=1)
    assert_near(got.double() / scale, wanted / scale, "f and P, float32")


@pytest.mark.parametrize("source", schema.SOURCES[1 : schema.FULL])
@every_stage
def test_tables_between_acts_and_gates(options: Options, source: str) -> None:
    """Kernels agree with the definition, with their gradients."""
    x, k = X, noise(2, 5, 5, 8).transpose(1, 2)
    call = call_of(options, [x, k], source)
    call = *(WIDTHS[source](table) for table in call[:2]), *call[2:]
    tensors = [x, k, *call[:2], *(call[6] if call[6:] else ())]

    def run(operator: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
        more = (tensors[4:], call[7]) if call[6:] else ()
        return operator(*tensors[:4], *call[2:6], *more)

    assert_each(near, run(rotated, tensors), run(reference.compose, [t.double() for t in tensors]))
    if options.direction == schema.FORWARD:
        found = []
        for operator, dtype in ((rotated, torch.float32), (reference.compose, torch.float64)):
            leaves = [t.to(dtype, copy=True).requires_grad_() for t in tensors]
            loss = sum(y.sin().sum() for y in run(operator, leaves))
            found.append(torch.autograd.grad(loss, leaves))
        assert_each(near, *found)


@pytest.mark.parametrize("name", ["rotate", "rotate_", "rotate_into", "rotate_slots"])
def test_vmap_refuses_what_public_functions_leave_to_the_definition(name: str) -> None:
    plain = WORDS, None, None, 3, code(), 1.0
    with_gate = *plain[:4], code(gate=LOG), 1.0, [noise(1, 1, 1, 8)], 0.0
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "rotate": lambda x: rotated(x, None, *with_gate),
        "rotate_": lambda x: schema.rotate_(x, None, *plain),
        "rotate_into": lambda x: schema.rotate_into(x, None, x.clone(), None, *plain),
        "rotate_slots": lambda x: schema.rotate_slots(
            x, None, x.clone(), None, torch.arange(10).view(2, 5), *plain
        ),
    }
    with pytest.raises(RuntimeError, match=rf"\[{name}\] vmap: this call of the raw operator"):
        torch.vmap(lambda x: calls[name](x) or x)(noise(4, *X.shape))


# --- gradients, versions and devices -----------------------------------------------------------------


def writers(*call: Any) -> dict[str, Callable[[torch.Tensor], object]]:
    into = schema.rotate_extras_into if call[6:] else schema.rotate_into
    within = schema.rotate_extras_ if call[6:] else schema.rotate_
    return {
        "in place": lambda x: within(x, None, *call),
        "into": lambda x: into(x, None, torch.empty_like(x), None, *call),
    }


def test_no_gradient_is_lost() -> None:
    """Without kernels for Autograd, torch would silently take the gradient of the identity."""
    plain, theta = (WORDS, None, None, 3, code(), 1.0), torch.rand(1, 1, 1, 3).requires_grad_()
    of_list = *plain[:4], code(learned=True), 1.0, [theta], 0.0
    of_angles = *plain[:5], True, True
    tracked = X.clone().requires_grad_() * 1
    calls = [(run, tracked) for run in writers(*plain).values()]
    calls += [(run, X.clone()) for run in writers(*of_list).values()]
    calls += [(lambda x: schema.angle_gradients(x, None, X, None, *of_angles), tracked)]
    calls += [(lambda g: schema.angle_gradients(X, None, g, None, *of_angles), tracked)]
    for run, x in calls:
        with pytest.raises(RuntimeError, match=r"the raw operator has no gradient; call t"):
            run(x)
        with torch.no_grad():
            run(x)


def test_every_written_tensor_counts_a_version() -> None:
    q, k, *outs = (noise(2, 3, 5, 8) for _ in range(6))
    before = [x._version for x in (q, k, *outs)]
    call = WORDS, None, None, 3, code(), 1.0
    schema.rotate_into(q, k, *outs[:2], *call)
    gated = *call[:4], code(gate=LOG), 1.0, [torch.ones(1, 1, 1, 1)] * 2, 0.0
    schema.rotate_extras_into(q, k, *outs[2:], *gated)
    schema.rotate_(q, k, *call)
    assert all(x._version > old for x, old in zip((q, k, *outs), before, strict=True))


def test_devices_are_not_mixed() -> None:
    """One meta tensor selects the fake kernel, whose result would be uninitialised memory."""
    there, end = X.to("meta"), (None, None, 3, code(), 1.0)
    for x, words in ((X.clone(), WORDS.to("meta")), (there, WORDS)):
        for run in (*writers(words, *end).values(), lambda x: rotated(x, None, words, *end)):  # noqa: B023
            with pytest.raises(RuntimeError, match="must be on one device"):
                run(x)
    at, options = torch.zeros(1, 1, 5), code(add_index=False)
    of_angles = [X, None, X, None, WORDS, torch.zeros_like(WORDS), at, 0, options, True, True]
    of_gates = [X, None, X, None, noise(1, 3, 1, 8), None, None, 3, code(gate=LOG)]
    for operator, arguments, which in (
        (schema.angle_gradients, of_angles, (2, 4, 5, 6)),
        (schema.gate_gradients, of_gates, (4,)),
    ):
        for index in which:
            changed = [*arguments]
            changed[index] = changed[index].to("meta")
            with pytest.raises(RuntimeError, match="must be on one device"):
                operator(*changed)
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        moved = [x.to("meta", dtype) if isinstance(x, torch.Tensor) else x for x in of_gates]
        (made,) = schema.gate_gradients(*moved)
        assert (made.device.type, made.shape, made.dtype) == ("meta", (1, 3, 1, 8), wanted)


# --- arguments that do not fit ------------------------------------------------------------------------

# Changes of valid calls, in raw_refusals.jsonl: of `rotate`, with a list of extra tensors or phases too, and of
# `angle_gradients`, which reads the same angles.
ROWS = rows_of(Path(__file__).with_name("raw_refusals.jsonl"))
ANGLES = {"words": WORDS, "turns": None, "positions": None, "offset": 0, "options": code()}
GRADIENTS = {"y": X, "z": None, "grad_y": X, "grad_z": None, **ANGLES}
GRADIENTS |= {"by_positions": True, "by_frequencies": True}


def changes(of: str) -> list[dict[str, Any]]:
    makers = {"strided": lambda x: x.repeat_interleave(2, -1)[..., ::2]}
    found = []
    for row in ROWS:
        if of in row["of"]:
            change = {
                key: value_of(row[key], makers) for key in row if key not in ("of", "options")
            }
            found.append(change | {"options": options_of(row.get("options", {}), start=1)})
    return found


def test_arguments_that_do_not_fit_are_refused() -> None:
    """What the options do not declare, by the definition too, which checks its own bounds."""
    for change in changes("extras"):
        for operator in (schema.rotate_extras, reference.compose):
            call = *{**ANGLES, "options": change["options"]}.values(), 1.0
            with pytest.raises((NotImplementedError, RuntimeError), match="tightrope"):
                operator(X, None, *call, change["extras"], change["eps"])
    for change in changes("phases"):
        for operator in (schema.rotate, reference.compose):
            with pytest.raises((RuntimeError, IndexError)):
                operator(X, None, *{**ANGLES, **change}.values(), 1.0)


@needs_kernel
def test_kernels_read_nothing_outside_their_tensors() -> None:
    schema.angle_gradients(**GRADIENTS)
    for change in changes("gradients"):
        with pytest.raises(RuntimeError, match="tightrope: "):
            schema.angle_gradients(**{**GRADIENTS, **change})
    x = X.clone()
    for change in changes("rotate"):
        for operator in (schema.rotate, schema.rotate_):
            with pytest.raises(RuntimeError, match="tightrope"):
                operator(x, None, *{**ANGLES, **change}.values(), 1.0)
        assert torch.equal(x, X), change


def test_options_are_one_integer_and_back() -> None:
    for options in (
        Options(),
        Options(5, 2**20 - 1, True, INVERSE, False, 4, True, 255, 15, 2, 2, True, True, True),
        Options(start=77, add_index=False),
    ):
        assert schema.options_of(options.pack()) == options
        assert 0 <= options.pack() < 2**63
    with pytest.raises(RuntimeError, match="start must lie in"):
        Options(start=2**20).pack()
