"""Try one model type: build it, run it, patch it, run it again, and check that a fault is detected."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from tightrope.integrations.transformers import Entry, patch, unpatch

from . import families
from .building import part_of, small_config, small_model
from .catalogue import ROTARY, ModelType, used_names
from .comparing import Run, Subject, run
from .inputs import Maker


@dataclass(frozen=True)
class Ready:
    """A model, its inputs, and the part of the model to call.

    `instead_of` names a more complete class that could not be built or run, with the reason.
    """

    model: Any
    inputs: dict[str, Any]
    part: str = ""
    instead_of: str = ""

    @property
    def name(self) -> str:
        """The names of the class and of the part that runs."""
        return ".".join(filter(None, (type(self.model).__name__, self.part)))

    def run(self) -> Run:
        """Run forward and backward."""
        return run(self.model, self.inputs, part_of(self.model, self.part))


def prepare(model_type: ModelType) -> tuple[Ready, Run]:
    """Build a small model of the type with inputs, and run it once."""
    family = families.of(model_type)
    if family.whole:
        model_type = replace(model_type, name=family.whole)
    classes = model_type.model_classes()
    if family.model:
        classes = [getattr(model_type.module, family.model)]
    if not classes:
        raise LookupError(f"no model class takes a {model_type.config_class.__name__}")
    failure: Exception | None = None
    instead = ""
    for model_class, grouped in itertools.product(classes[:3], (True, False)):
        try:
            config = small_config(model_type.config_class, family.config, grouped)
            model = small_model(model_class, config, family.attention, family.gain)
            inputs = Maker(model, config, family)()
            part = family.part
            if family.whole:
                model, part = part_of(model, part), ""
            ready = Ready(model, inputs, part, "" if model_class is classes[0] else instead)
            return ready, ready.run()
        except Exception as error:  # noqa: BLE001 - the next class may work
            if model_class is classes[0]:
                failure = error
                instead = f"{model_class.__name__}: {type(error).__name__}: {str(error)[:200]}"
    raise failure


def why_none(model: Any) -> str:
    """The reason why a model in which no rotary function ran cannot rotate; empty if it might."""
    names = used_names(model)
    if not any(ROTARY.match(name) for name in names):
        return "no method of its modules reaches a rotary function"
    if not names & {"cos", "polar"}:
        return "no method of its modules computes a cosine to rotate by"
    return ""


def trial(model_type: ModelType) -> dict[str, Any]:
    """The entries of the row that depend on the run."""
    ready, before = prepare(model_type)
    out: dict[str, Any] = {"model": ready.name, "calls": dict(before.calls)}
    own = [n for n in before.calls if n.startswith(model_type.folder.replace("/", ".") + ".")]
    if ready.instead_of:
        out["instead_of"] = ready.instead_of
    if not own:
        if reason := why_none(ready.model):
            return {**out, "status": "does not rotate", "reason": reason}
        return {**out, "status": "not exercised", "reason": "no rotary function ran"}
    subject = Subject(ready.model, ready.inputs, ready.run, own, patch, unpatch, name_of)
    return {**out, **subject.row(before)}


def name_of(entry: Entry) -> str:
    """`folder.function`, the name under which calls are counted."""
    folder = entry.module.removeprefix("transformers.models.").rpartition(".")[0]
    return f"{folder}.{entry.name}"
