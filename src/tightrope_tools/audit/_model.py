"""Audit every part of a model that rotates: its sections, such as text and images, and its types of layers."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tightrope._errors import public
from tightrope.config import LayerSpecs, from_config, sections
from tightrope.spec import RopeSpec

from ._audit import audit, check_options
from ._report import Report, unseen, verdict
from ._targets import config_of, from_model, recorded_in


@dataclass(frozen=True)
class ModelReport:
    """The result of :func:`tightrope_tools.audit.audit_model`.

    Attributes:
        target: the name of the model.
        parts: the report of each part that rotates, by the name of its section and its type of layers. One that could
            not be called has the note ``not-seen``, and no facts but what the configuration declares.
    """

    target: str
    parts: dict[str, Report]

    @property
    def ok(self) -> bool:
        """True if no part has errors or warnings. A part that could not be called has none: see :attr:`unseen`."""
        return all(report.ok for report in self.parts.values())

    @property
    def unseen(self) -> tuple[str, ...]:
        """The names of the parts that could not be called."""
        return tuple(name for name, report in self.parts.items() if not report.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types, with a format version."""
        parts = {name: report.to_dict() for name, report in self.parts.items()}
        return {"version": 2, "ok": self.ok, "target": self.target, "parts": parts}

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for each part: the verdict, its name, what was not seen and what was declared."""
        rows: list[tuple[str, ...]] = []
        for name, report in self.parts.items():
            said = verdict(report) if report.checks else "not seen"
            unseen = [each.name for each in report.checks if each.outcome.startswith("skipped")]
            unseen += ["all of it"] * (not report.checks)
            declared = str(report.facts.get("declared", "nothing"))
            rows.append((said, name, ", ".join(unseen) or "nothing", declared))
        return rows

    def __str__(self) -> str:
        lines = [f"audit of {self.target}", *("  ".join(row) for row in self.rows())]
        return "\n\n".join(("\n".join(lines), *map(str, self.parts.values())))


@public("audit_model")
def audit_model(
    target: object,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    longest: int = 2**20,
    device: str = "cpu",
) -> ModelReport:
    """Audit every part of a model of transformers that rotates.

    Each section of its configuration that uses RoPE, such as text and images, and each type of layers is audited by
    itself: the code of the installed transformers against what the configuration declares for it.

    Args:
        target: a config, its file or folder, or a model type such as ``"llama"``.
        dtypes, longest, device: as in :func:`audit`.

    Returns:
        A :class:`ModelReport`, with a report for every part; one that cannot be called is listed with the reason.

    Raises:
        ValueError, TypeError: as in :func:`audit`.

    >>> found = audit_model("gemma3_text", dtypes=[torch.float32], longest=4096)  # doctest: +SKIP
    >>> [*found.parts]  # doctest: +SKIP
    ['sliding_attention', 'full_attention']
    """
    config = config_of(target)
    check_options(None, None, device, dtypes, longest)
    parts = {}
    for section, layer_type, spec in _parts_of(config):
        name = ": ".join(filter(None, (section, layer_type)))
        try:
            own = operator.attrgetter(section)(config) if section else config
            found = from_model(own, layer_type)
            title = ", ".join(filter(None, (name, found.name)))
            found = replace(found, name=title, recorded=recorded_in(target, section))
            report = audit(found, dtypes=dtypes, longest=longest, device=device)
        except (AttributeError, ValueError) as error:
            declared = "nothing" if spec is None else repr(spec)
            report = unseen(name, "not-seen", str(error), declared=declared)
        parts[name or "whole model"] = report
    return ModelReport(str(config.model_type), parts)


def _parts_of(config: Any) -> Iterator[tuple[str, str | None, RopeSpec | None]]:
    """Yield the section, the type of layers, and the spec, if it can be read, of each part that rotates."""
    values = config.to_dict()
    for section in sections(values):
        try:
            read = from_config(values, section=section, strict=False)
        except (ValueError, TypeError):
            read = None  # the audit of the part says so
        if isinstance(read, LayerSpecs):
            yield from ((section, kind, spec) for kind, spec in read.items() if spec is not None)
        else:
            yield section, None, read
