"""Check inputs and outputs: mutation, strides, dtypes, shapes, linearity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._guard import CallFailed
from ._log import Log
from ._memory import apart
from ._subject import Subject, like

_WHERE = (1, 3, 5, 9, 2)
_NUMBERS = 1e-5


def check_inputs(log: Log) -> None:
    """Run the checks of inputs and outputs."""
    with log.check("the input is not modified") as fresh:
        _mutation(log, fresh)
    with log.check("results do not depend on strides") as fresh:
        _strides(log, fresh)
    if log.subject.call.takes_positions:
        with log.check("results do not depend on the dtype of positions") as fresh:
            _position_types(log, fresh)
    with log.check("the result has the dtype of x"):
        _output_types(log)
    with log.check("edge shapes are accepted"):
        _shapes(log)
    if log.subject.call.takes_keys and log.subject.most_heads is None:
        with log.check("k may have fewer heads than q") as fresh:
            _grouped(log, fresh)
    with log.check("it is linear in x") as fresh:
        _linear(log, fresh)


# --- mutation ---------------------------------------------------------------------------------------


def _plain(subject: Subject) -> torch.Tensor:
    return subject.random(1, 2, len(_WHERE), seed=11)


def _transposed(subject: Subject) -> torch.Tensor:
    """Return x with tokens and heads exchanged in memory: bshd for bhsd, or the reverse."""
    x = _plain(subject)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.is_contiguous() else x.contiguous()


def _wide(subject: Subject) -> torch.Tensor:
    """Return x as a slice of wider rows, like q in a fused projection."""
    x = _plain(subject)
    room = subject.laid_out(torch.cat((x, x, x), -1))
    return room[..., subject.head_dim : 2 * subject.head_dim]


def _sparse(subject: Subject) -> torch.Tensor:
    """Return x with a stride of 2 in its channels."""
    x = _plain(subject)
    return torch.stack((x, x), -1)[..., 0]


def _expanded(subject: Subject) -> torch.Tensor:
    """Return x with heads that share memory."""
    x = _plain(subject)
    return x[:, :1].expand(-1, x.shape[1], -1, -1)


_STRIDES: tuple[tuple[str, str, Callable[[Subject], torch.Tensor]], ...] = (
    (
        "with tokens and heads exchanged in memory",
        "x.transpose(1, 2).contiguous().transpose(1, 2)",
        _transposed,
    ),
    ("that is a slice of a wider row", "torch.cat((x, x, x), -1)[..., {d} : 2 * {d}]", _wide),
    ("with heads expanded from one", "x[:, :1].expand_as(x)", _expanded),
    ("with a stride of 2 in its channels", "torch.stack((x, x), -1)[..., 0]", _sparse),
)


def _mutation(log: Log, subject: Subject) -> None:
    meant = getattr(subject.fn, "__name__", "").endswith("_")
    for name, make in (
        ("contiguous", _plain),
        ("transposed in memory", _transposed),
        ("a slice", _wide),
    ):
        x = make(subject)
        before = x.clone()
        ids = subject.ids(list(_WHERE), 1)
        ids_before = ids.clone()
        made: list[Any] = []
        _remember_tables(subject, made)
        try:
            like(subject.raw("rotate", x, ids), x)
        except CallFailed:
            continue
        base = f"x = torch.randn(1, {subject.heads(2)}, {len(_WHERE)}, {subject.head_dim})\n"
        if name != "contiguous":
            expression = _STRIDES[0 if make is _transposed else 1][1].format(d=subject.head_dim)
            base += f"x = {expression}\n"
        base += f"where = torch.tensor([{list(_WHERE)}])\n"
        if not torch.equal(x, before):
            log.add(
                "mutates",
                "note" if meant else "error",
                "x is overwritten."
                if name == "contiguous"
                else f"x is overwritten if it is {name}.",
                f"{int((x != before).sum())} of {x.numel()} elements of x change"
                + ("; the function's name ends in _" if meant else ""),
                base + "before = x.clone()\nrotate(x, where)\nassert torch.equal(x, before)",
            )
        if not torch.equal(ids, ids_before):
            log.add(
                "mutates-positions",
                "error",
                "The positions are overwritten.",
                f"{ids_before.tolist()} becomes {ids.tolist()}",
                base
                + "before = where.clone()\nrotate(x, where)\nassert torch.equal(where, before)",
            )
        if any(not torch.equal(table, kept) for table, kept in made):
            log.add(
                "mutates-tables",
                "error",
                "The given cosines and sines are overwritten.",
                "tables that all layers share are wrong from the second layer on",
                base + _TABLES_BODY,
            )


_TABLES_BODY = """
given = tables(x, where)
kept = [table.clone() for table in given]
tables = lambda *_: given
rotate(x, where)
assert all(torch.equal(*both) for both in zip(given, kept))
"""


def _remember_tables(subject: Subject, made: list[Any]) -> None:
    """Record the adapter's tables with copies, to detect whether the function writes to them."""
    if not subject.call.form.takes_tables:
        return
    make = subject.space["tables"]

    def remembered(*arguments: Any) -> Any:
        result = make(*arguments)
        tables = result if isinstance(result, tuple) else (result,)
        made.extend((table, table.clone()) for table in tables)
        return result

    subject.space["tables"] = remembered


# --- strides ----------------------------------------------------------------------------------------


def _strides(log: Log, subject: Subject) -> None:
    for name, text, make in _STRIDES:
        if make is _expanded and log.found("mutates"):
            continue
        x = make(subject)
        # A clone, because an in-place function would overwrite heads that share memory.
        wanted = subject.rotate(subject.laid_out(x.clone()), list(_WHERE)).detach().clone()
        body = (
            f"x = torch.randn(1, {subject.heads(2)}, {len(_WHERE)}, {subject.head_dim})\n"
            f"x = {text.format(d=subject.head_dim)}\n"
            f"where = torch.tensor([{list(_WHERE)}])\n"
            "wanted = rotate(x.clone(memory_format=torch.contiguous_format), where)\n"
            "assert torch.allclose(rotate(x, where), wanted, atol=1e-5)"
        )
        try:
            seen = subject.rotate(x, list(_WHERE)).detach()
        except CallFailed as error:
            log.add(
                "strides-refused",
                # A stride in the channels is unusual; the other three cases are common.
                "note" if make is _sparse else "warning",
                f"An x {name} is refused.",
                str(error),
                body,
            )
            continue
        size = apart(seen.double(), wanted.double())
        if size > _NUMBERS:
            log.add(
                "strides",
                "error",
                f"An x {name} is rotated wrongly.",
                f"the result differs by up to {size:.3g} from that of a contiguous copy",
                body,
            )


# --- types ------------------------------------------------------------------------------------------


def _position_types(log: Log, subject: Subject) -> None:
    x = _plain(subject)
    where = torch.tensor([_WHERE])
    wanted = subject.rotate(x.clone(), where).detach()
    for dtype in (torch.int32, torch.float32, torch.float64):
        name = str(dtype)
        body = (
            f"x = torch.randn(1, {subject.heads(2)}, {len(_WHERE)}, {subject.head_dim})\n"
            f"where = torch.tensor([{list(_WHERE)}])\n"
            f"assert torch.allclose(rotate(x.clone(), where.to({name})), rotate(x, where), atol=1e-5)"
        )
        try:
            seen = subject.rotate(x.clone(), where.to(dtype)).detach()
        except CallFailed as error:
            if dtype is torch.int32:
                log.add(
                    "position-types", "note", "Positions in int32 are refused.", str(error), body
                )
            continue
        size = apart(seen.double(), wanted.double())
        if size > 1e-4:
            log.add(
                "position-type",
                "error",
                f"Positions in {name.removeprefix('torch.')} give a different result than in int64.",
                f"the results differ by up to {size:.3g} for positions below 10",
                body,
            )


def _output_types(log: Log) -> None:
    for dtype in (*log.dtypes, torch.float64):
        subject = log.subject.fresh()
        name = str(dtype).removeprefix("torch.")
        body = (
            f"x = torch.randn(1, {subject.heads(2)}, {len(_WHERE)}, {subject.head_dim}).{_method(name)}()\n"
            f"assert rotate(x, torch.tensor([{list(_WHERE)}])).dtype is x.dtype"
        )
        x = subject.random(1, 2, len(_WHERE), dtype=dtype)
        try:
            y = subject.rotate(x, list(_WHERE))
        except CallFailed as error:
            severity = "note" if dtype is torch.float64 else "warning"
            log.add(f"refuses-{name}", severity, f"An x of {name} is refused.", str(error), body)
            continue
        if y.dtype is not dtype:
            got = str(y.dtype).removeprefix("torch.")
            severity = "note" if dtype is torch.float64 else "warning"
            log.add(
                "output-dtype",
                severity,
                f"An x of {name} comes back as {got}.",
                "later operations then compute in that dtype, at its speed and memory use",
                body,
            )


def _method(name: str) -> str:
    return {"float32": "float", "float16": "half", "float64": "double"}.get(name, name)


# --- shapes -----------------------------------------------------------------------------------------

_SHAPES = (
    ("one token", 2, 3, 1),
    ("one row", 1, 3, 4),
    ("one head", 2, 1, 4),
    ("as many tokens as heads", 2, 4, 4),
    ("as many rows as tokens", 5, 3, 5),
    ("no tokens", 2, 3, 0),
)


def _shapes(log: Log) -> None:
    for name, rows, heads, tokens in _SHAPES:
        subject = log.subject.fresh()
        rows = subject.most_rows or rows
        if not tokens and not subject.call.takes_ids:
            continue
        x = subject.random(rows, heads, tokens)
        body = (
            f"x = torch.randn({rows}, {subject.heads(heads)}, {tokens}, {subject.head_dim})\n"
            f"where = torch.arange({tokens})[None].repeat({rows}, 1)\n"
            "y = rotate(x.clone(), where)\n"
            "assert y.shape == x.shape\n"
            "for row in range(len(x)):\n"
            f"    for head in range({subject.heads(heads)}):\n"
            "        one = x[row : row + 1, head : head + 1].clone()\n"
            "        alone = rotate(one, where[:1])[0, 0]\n"
            "        assert torch.allclose(y[row, head], alone, atol=1e-5), (row, head)"
        )
        if not tokens:
            body = (
                f"x = torch.randn({rows}, {subject.heads(heads)}, 0, {subject.head_dim})\n"
                f"where = torch.zeros({rows}, 0, dtype=torch.int64)\n"
                "assert rotate(x.clone(), where).shape == x.shape"
            )
        try:
            y = subject.rotate(x.clone(), list(range(tokens))).detach()
            wanted = (
                [
                    torch.cat(
                        [
                            subject.rotate(
                                x[r : r + 1, h : h + 1].clone(), list(range(tokens))
                            ).detach()
                            for h in range(x.shape[1])
                        ],
                        1,
                    )
                    for r in range(rows)
                ]
                if tokens and name != "one head"
                else []
            )
        except CallFailed as error:
            severity = "warning" if tokens else "note"
            log.add("shapes", severity, f"An x with {name} is refused.", str(error), body)
            continue
        if (
            wanted
            and apart(torch.cat(wanted).double(), y.double()) > _NUMBERS
            and not log.found("heads")
        ):
            log.add(
                "shape-dependent",
                "error",
                f"An x with {name} is rotated differently from its heads and rows one by one.",
                f"the results differ by up to {apart(torch.cat(wanted).double(), y.double()):.3g}",
                body,
            )


def _grouped(log: Log, subject: Subject) -> None:
    q, k = subject.random(1, 4, 5, seed=12), subject.random(1, 2, 5, seed=13)
    body = (
        f"q, k = torch.randn(1, 4, 5, {subject.head_dim}), torch.randn(1, 2, 5, {subject.head_dim})\n"
        f"where = torch.tensor([{list(_WHERE)}])\n"
        "wide = rotate_qk(q.clone(), k.repeat(1, 2, 1, 1), where)[1][:, :2]\n"
        "assert torch.allclose(rotate_qk(q.clone(), k.clone(), where)[1], wide, atol=1e-5)"
    )
    wide = subject.rotate_qk(q.clone(), subject.laid_out(k.repeat(1, 2, 1, 1)), list(_WHERE))
    try:
        seen = subject.rotate_qk(q.clone(), k.clone(), list(_WHERE))
    except CallFailed as error:
        log.add("grouped", "warning", "k with fewer heads than q is refused.", str(error), body)
        return
    size = max(
        apart(seen[0].double(), wide[0].double()), apart(seen[1].double(), wide[1][:, :2].double())
    )
    if size > _NUMBERS:
        log.add(
            "grouped",
            "error",
            "The result is different if k has fewer heads than q.",
            f"it differs by up to {size:.3g} from that of a k with repeated heads",
            body,
        )


def _linear(log: Log, subject: Subject) -> None:
    x, z = subject.random(1, 2, 5, seed=14), subject.random(1, 2, 5, seed=15)

    def turn(value: torch.Tensor) -> torch.Tensor:
        return subject.rotate(subject.laid_out(value), list(_WHERE)).detach().double()

    size = apart(turn(3 * x - 2 * z), 3 * turn(x.clone()) - 2 * turn(z.clone()))
    if size > 1e-4:
        log.add(
            "not-linear",
            "error",
            "The function does more than rotate x: it is not linear, as with a norm or an activation.",
            f"f(3x − 2z) and 3f(x) − 2f(z) differ by up to {size:.3g}",
            f"x, z = torch.randn(2, 1, {subject.heads(2)}, {len(_WHERE)}, {subject.head_dim})\n"
            f"where = torch.tensor([{list(_WHERE)}])\n"
            "seen = rotate(3 * x - 2 * z, where)\n"
            "wanted = 3 * rotate(x, where) - 2 * rotate(z, where)\n"
            "assert torch.allclose(seen, wanted, atol=1e-4), float((seen - wanted).abs().max())",
        )
