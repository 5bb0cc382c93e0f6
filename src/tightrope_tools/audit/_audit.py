"""The entry point of an audit and the order of its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tightrope._errors import bad_value, public
from tightrope.frequencies import LONGEST
from tightrope.spec import RopeSpec

from . import _angles, _declared, _gradients, _inputs, _memory, _rotation
from ._adapter import Adapter
from ._guard import CallFailed, Guard, Hangs, check_limits, isolated
from ._log import Log
from ._probe import Hints, NoCallFound, check_hints
from ._report import Finding, Report
from ._subject import Subject
from ._targets import Target, resolve, subject_of

_DTYPES = (torch.float32, torch.bfloat16)
_LONGEST = 2**20


@public("audit")
def audit(  # noqa: PLR0913  (one argument for each option)
    target: object,
    *,
    spec: RopeSpec | None = None,
    form: str | None = None,
    layout: str | None = None,
    tables: str | None = None,
    head_dim: int | None = None,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    longest: int = _LONGEST,
    make: bool = False,
    layer_type: str | None = None,
    timeout: float = 20.0,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Test a rotary function as a black box: identify its rotation and find its faults.

    The audit calls the function with impulses and random vectors and does not read its source. An
    exception in the function, or a call that does not return, becomes a finding. The function's
    output to ``sys.stdout`` is dropped.

    Args:
        target: a function or module; a model of transformers; ``"MODULE:FUNCTION"``, imported from the current directory or an
            installed package; ``"stack:NAME"``, a library of :mod:`tightrope.stacks`, with ``spec``; or a
            config of transformers, its file or folder, or a model type such as
            ``"llama"``. For a config or a model type, the rotary module and the apply function of
            the installed transformers are audited together, against the spec of the config.
        spec: the intended rotation. Without it the audit identifies the rotation and reports what
            would be a fault in any rotation; with it, also deviations from the spec. If the spec has
            several axes (M-RoPE), the function gets positions ``(axes, rows, tokens)``: first those of
            text, whose coordinates are equal, then others to test which coordinate turns which pairs.
        form: the arguments of a call, such as ``"x, positions"``, ``"q, k, cos, sin"``,
            ``"x, seq_dim"``, ``"x, positions -> cos, sin"``; by default found from the
            signature and by trying.
        layout: the layout of x, q and k: ``"bhsd"``, ``"bshd"``, ``"sbhd"``, ``"thd"``, ``"bsd"``,
            ``"sd"``; by default found by trying.
        tables: the format of the cosines and sines that the function takes: ``"cat"`` (all pairs, then all
            again), ``"repeat"`` (each pair twice in a row), ``"half"`` (each pair once); by default
            found by trying.
        head_dim: channels of one head; by default from the spec or the function, or found by trying.
        dtypes: dtypes of x to test: float32 and, optionally, bfloat16 and float16.
        longest: the largest position to test, at least 128.
        make: whether the target is a factory without arguments. If so, each check gets a new function
            from it; if not, a deep copy of the target, which does not reset state kept outside the object.
        layer_type: the layer type of a model to audit, if its layers differ.
        timeout: seconds after which one call counts as hanging.
        device: the device of the tensors passed to the function.
        progress: called with the name of each check before it starts; it must not print to
            ``sys.stdout``, which is redirected during the audit.

    Returns:
        A :class:`Report`; ``report.ok`` is False if there are errors or warnings.

    Raises:
        ValueError, TypeError: the target does not exist or is not callable, or an option is wrong.

    >>> def rotate_half(x):
    ...     return torch.cat((-x[..., 32:], x[..., :32]), -1)
    >>> def rope(x, positions):
    ...     inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    ...     angle = (positions[..., None] * inv_freq).repeat(1, 1, 2)[:, None]
    ...     return x * angle.cos() - rotate_half(x) * angle.sin()
    >>> report = audit(rope, dtypes=[torch.float32])
    >>> print(report.codes, report.facts["frequencies"])
    ('sign',) geometric, base 10000
    """
    found = resolve(target, make=make, layer_type=layer_type, spec=spec)
    spec = found.spec if spec is None else spec
    _declared.check_spec(spec, head_dim)
    hints = Hints(form, layout, tables, head_dim)
    check_hints(hints)
    _check_extent(dtypes, longest)
    check_limits(timeout, device)
    with isolated(timeout) as guard:
        return _run(
            found,
            guard,
            spec,
            hints,
            dtypes=tuple(dtypes),
            longest=longest,
            device=device,
            progress=progress,
        )


def _check_extent(dtypes: Sequence[torch.dtype], longest: int) -> None:
    allowed = (torch.float32, torch.bfloat16, torch.float16)
    if any(dtype not in allowed for dtype in dtypes):
        raise bad_value(f"dtypes must be among float32, bfloat16, float16 but got {list(dtypes)}")
    if torch.float32 not in dtypes:
        raise bad_value(f"dtypes must include float32 but got {list(dtypes)}")
    if longest < 128:
        raise bad_value(f"longest must be at least 128 but got {longest}")
    if longest > LONGEST:
        raise bad_value(f"longest must be at most {LONGEST} but got {longest}")


def _run(
    found: Target,
    guard: Guard,
    spec: RopeSpec | None,
    hints: Hints,
    *,
    dtypes: tuple[torch.dtype, ...],
    longest: int,
    device: str,
    progress: Callable[[str], None] | None,
) -> Report:
    log: Log | None = None
    declared, axes = spec, 1 if spec is None else spec.axis_count
    spec = None if spec is None else _declared.text_of(spec)
    try:
        subject = subject_of(found, hints, spec, guard, device, axes)
        log = Log(found.name, subject, spec, dtypes, longest, progress=progress)
        log.facts.update(_facts(subject.call, subject))
        if spec is not None:
            log.facts["declared"] = repr(declared)
        elif found.unread:
            log.facts["declared"] = f"nothing: {found.unread}"
        _check_all(log, declared)
    except NoCallFound as error:
        return _not_called(found, error)
    except Hangs:
        finding = Finding(
            "hangs",
            "error",
            f"A call did not return within {guard.seconds:g} s.",
            f"call {guard.calls} of the audit"
            + ("" if log is None or not log.doing else f", checking: {log.doing}"),
        )
        if log is None:
            return Report(found.name, {}, (finding,), ())
        log.findings.append(finding)
    except CallFailed as error:
        if log is None:
            raise
        log.add("raises", "error", "A call that worked at first raised an error.", str(error))
    return log.report()


def _facts(call: Adapter, subject: Subject) -> dict[str, str]:
    facts = {"called as": f"fn({call})", "layout": call.layout, "head_dim": str(subject.head_dim)}
    if call.form.takes_tables:
        facts["tables"] = f"{call.width}, made by the audit"
    elif call.form.gives_tables:
        facts["tables"] = f"{call.width}, applied by the audit"
    elif call.takes_positions:
        facts["positions"] = "(tokens,)" if call.shared_positions else "(rows, tokens)"
        if call.axes > 1:
            facts["positions"] = f"({call.axes}, {facts['positions'][1:]}"
    else:
        facts["positions"] = (
            "its own, from an offset" if "offset" in call.roles else "its own, 0 to n − 1"
        )
    return facts


def _not_called(found: Target, error: NoCallFound) -> Report:
    finding = Finding(
        "cannot-call",
        "error",
        "No call was found that returns a rotated x of the same shape.",
        f"{error.reasons}; specify form=, layout= and head_dim=",
    )
    return Report(found.name, {}, (finding,), ())


def _check_all(log: Log, meant: RopeSpec | None) -> None:
    # First, because state that calls leave in the function would falsify all other checks.
    _memory.check_memory(log)
    if log.found("nondeterminism", "not-finite"):
        return
    uses_positions = _memory.check_ids(log)
    _memory.check_rows(log)
    _inputs.check_inputs(log)
    if uses_positions and _rotation.check_rotation(log):
        declared = _declared.check_declared(log)
        if declared and meant is not None:
            _declared.check_axes(log, meant)
        _declared.check_identity(log)
        model = _angles.model_of(log, declared)
        if model is not None:
            _angles.check_angles(log, model)
            _angles.check_type_history(log, model)
        _rotation.check_relative(log)
    if meant is not None and log.subject.call.form.takes_tables:
        _declared.add_unchecked(log, meant)
    _rotation.check_keys(log)
    _gradients.check_gradients(log)
