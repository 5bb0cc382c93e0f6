"""The entry points of an audit and the order of its checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tightrope._errors import bad_type, bad_value, public
from tightrope.frequencies import LONGEST
from tightrope.spec import RopeSpec

from . import _calls, _corrections, _ids, _rotation
from ._call import CallFailed, Subject, describe_error, undisturbed
from ._log import Log
from ._profile import Near
from ._report import Report, unseen
from ._search import NoCallFound, subject_of
from ._targets import resolve

_DTYPES = (torch.float32, torch.bfloat16)
_LONGEST = 2**20


@public("audit")
def audit(  # noqa: PLR0913  (one argument for each option)
    target: object,
    *,
    spec: RopeSpec | None = None,
    partner: object = None,
    form: str | None = None,
    layout: str | None = None,
    tables: str | None = None,
    head_dim: int | None = None,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    longest: int = _LONGEST,
    make: bool = False,
    layer_type: str | None = None,
    device: str = "cpu",
) -> Report:
    """Test a rotary function as a black box: identify its rotation and find its faults.

    The audit calls the function with unit vectors and random vectors and does not read its source. An
    exception in the function becomes a finding; a call that does not return does not return here either, while
    the command ``tightrope audit`` ends it. The function's output to ``sys.stdout`` is dropped.

    Args:
        target: a function or module; a model of transformers; ``"MODULE:FUNCTION"``, imported from the
            current directory or an installed package; ``"stack:NAME"``, a library of :mod:`tightrope.stacks`,
            with ``spec``; or a config of transformers, its file or folder, or a model type such as
            ``"llama"``. For a config or a model type, the rotary module and the apply function of
            the installed transformers are audited together, against the spec of the config.
        spec: the intended rotation. Without it the audit identifies the rotation and reports what
            would be a fault in any rotation; with it, also deviations from the spec. If the spec has
            several axes (M-RoPE), the function gets positions ``(axes, rows, tokens)``: first those of
            text, whose coordinates are equal, then others to test which coordinate turns which pairs.
        partner: if the target makes cosines and sines, a function or ``"MODULE:FUNCTION"`` that applies them; if it
            takes them, the function that makes them. The two are audited as one, with what the one returns passed
            to the other in the same order. Each alone may be right where the two do not fit each other.
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
        device: the device of the tensors passed to the function.

    Returns:
        A :class:`Report`. Its ``ok`` is False if there are errors or warnings; ``findings`` are the errors, warnings
        and notes, each with ``code``, ``severity``, ``sentence``, ``evidence`` and ``mend``; ``codes`` are
        those of errors and warnings; ``facts``, ``checks`` and ``angle_errors`` are what was measured.

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
    stated = {"form": form, "layout": layout, "tables": tables, "head_dim": head_dim}
    found = resolve(target, make=make, layer_type=layer_type, spec=spec, partner=partner, **stated)
    declared = found.spec if spec is None else spec
    check_options(declared, head_dim, device, dtypes, longest)
    with undisturbed():
        try:
            subject = subject_of(found, declared, device)
        except NoCallFound as error:
            return unseen(found.name, "cannot-call", str(error))
        log = Log(found.name, subject, declared, tuple(dtypes), longest, recorded=found.recorded)
        log.facts.update(_facts(subject))
        if declared is not None:
            log.facts["declared"] = repr(declared)
        elif found.unread:
            log.facts["declared"] = "nothing: the configuration cannot be read"
            log.add("config-unread", found.unread)
        if subject.way.takes_tables or subject.way.form.gives_tables:
            does = "makes" if subject.way.takes_tables else "applies"
            log.add("partner-unseen", does=does)
        try:
            check_all(log)
        except CallFailed as error:
            log.add("raises", str(error))
        return log.report()


def check_options(
    spec: RopeSpec | None,
    head_dim: int | None,
    device: str,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    longest: int = _LONGEST,
) -> None:
    """Refuse what an audit cannot test: a device that is not there, some specs, dtypes and lengths."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise bad_value(
            f"device {device!r} must be available but torch raised {describe_error(error)}"
        ) from None
    if spec is not None and not isinstance(spec, RopeSpec):
        raise bad_type(f"spec must be a RopeSpec or None but got {spec!r}")
    if spec is not None and head_dim not in (None, spec.head_dim):
        raise bad_value(
            f"head_dim must be that of the spec, {spec.head_dim}, or None but got {head_dim}"
        )
    if spec is not None and len(spec.frequencies().inv_freq.shape) > 1:
        raise bad_value(
            "spec must have the same frequencies for all heads, as the audit measures one head, but "
            f"got {spec!r}"
        )
    if not {*dtypes} <= {torch.float32, torch.bfloat16, torch.float16}:
        raise bad_value(f"dtypes must be among float32, bfloat16, float16 but got {list(dtypes)}")
    if torch.float32 not in dtypes:
        raise bad_value(f"dtypes must include float32 but got {list(dtypes)}")
    if not 128 <= longest <= LONGEST:
        bound = "at least 128" if longest < 128 else f"at most {LONGEST}"
        raise bad_value(f"longest must be {bound} but got {longest}")


def _facts(subject: Subject) -> dict[str, str]:
    way = subject.way
    facts = {"called as": f"fn({way})", "layout": way.layout, "head_dim": str(subject.head_dim)}
    if way.takes_tables:
        facts["tables"] = f"{way.width}, made by the audit"
    elif way.form.gives_tables:
        facts["tables"] = f"{way.width}, applied by the audit"
    elif way.takes_positions:
        facts["positions"] = "(tokens,)" if way.shared_positions else "(rows, tokens)"
        if way.axes > 1:
            facts["positions"] = f"({way.axes}, {facts['positions'][1:]}"
    else:
        known = "its own, from an offset" if way.takes_offset else "its own, 0 to n − 1"
        facts["positions"] = known + " for each row" * (way.row_offsets or way.packed)
    return facts


def check_all(log: Log) -> None:
    """Run all checks of an audit.

    Raises:
        CallFailed: a call failed that the checks need.
    """
    _calls.check_equal(log)
    if log.found("nondeterminism", "not-finite"):
        return
    log.near = Near.of(log.subject)
    if not log.near.is_finite:
        log.add("not-finite", "unit vectors at positions near 0")
        return
    _calls.check_linear(log)
    if log.found("not-linear", "not-finite"):
        log.skip("results of other calls", "the function is not linear, so none can be predicted")
    else:
        _calls.check_heads(log)
        _ids.check_ids(log)
        _ids.check_rows(log)
        _calls.check_memory(log)
        _calls.check_calls(log)
    _calls.check_results(log)
    spec = log.spec
    if spec is not None and log.subject.way.takes_tables:
        _add_unchecked(log, spec)
    if log.along_heads:
        log.skip("it rotates pairs of channels", "tokens are not rotated by their positions")
        return
    sound = _rotation.check_rotation(log)
    profile = log.profile
    if profile is None or not profile.pairs:
        return
    _rotation.check_record(log, profile)
    if sound:
        same = spec is not None and _rotation.check_declared(log, spec, profile)
        if same and spec is not None:
            _rotation.check_axes(log, spec, profile)
        _rotation.check_identity(log, profile)
        meant = _corrections.meant_of(log, profile, same)
        if meant is not None:
            _corrections.check_angles(log, meant)
    _calls.check_keys(log, profile)
    _calls.check_gradients(log)


def _add_unchecked(log: Log, spec: RopeSpec) -> None:
    """Add the note that tables of the caller leave a part of the declared spec unchecked."""
    log.skip("frequencies are as declared", "the caller provides them")
    parts = ["base", *(name for name in ("scaling", "axes") if getattr(spec, name) is not None)]
    what = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    log.add("frequencies-unchecked", what=what)
