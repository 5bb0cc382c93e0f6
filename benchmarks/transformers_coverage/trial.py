"""Try one model type: build it, run it, patch it, run it again, and check that a fault is detected."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tightrope.integrations.transformers import Entry, patch, unpatch

from . import families
from .building import small_config, small_model
from .catalogue import ModelType, called_names, models_folder
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
        return run(self.model, self.inputs, self.model.get_submodule(self.part))


def prepare(model_type: ModelType) -> tuple[Ready, Run]:
    """Build a small model of the type with inputs, and run it once."""
    family = families.of(model_type)
    classes = model_type.model_classes()
    if family.model:
        classes = [c for c in classes if c.__name__ == family.model] or classes
    if not classes:
        raise LookupError(f"no model class takes a {model_type.config_class.__name__}")
    failure: Exception | None = None
    instead = ""
    for model_class, grouped in itertools.product(classes[:3], (True, False)):
        try:
            config = small_config(model_type.config_class, family.config, grouped)
            model = small_model(model_class, config, family.attention, family.gain)
            inputs = Maker(model, config, family)()
            same = model_class is classes[0]
            ready = Ready(model, inputs, family.part, "" if same else instead)
            return ready, ready.run()
        except Exception as error:  # noqa: BLE001 - the next class may work
            if model_class is classes[0]:
                failure = error
                instead = f"{model_class.__name__}: {type(error).__name__}: {str(error)[:200]}"
    raise failure


def trial(model_type: ModelType) -> dict[str, Any]:
    """The entries of the row that depend on the run."""
    ready, before = prepare(model_type)
    out: dict[str, Any] = {"model": ready.name, "calls": dict(before.calls)}
    own = [n for n in before.calls if n.startswith(model_type.folder.replace("/", ".") + ".")]
    if ready.instead_of:
        out["instead_of"] = ready.instead_of
    if not own:
        unused = not called_names(models_folder() / model_type.file)
        reason = (
            "its file defines a rotation but never calls it" if unused else "no rotary function ran"
        )
        return {**out, "status": "not exercised", "reason": reason}
    subject = Subject(ready.model, ready.inputs, ready.run, own, patch, unpatch, name_of)
    return {**out, **subject.row(before)}


def name_of(entry: Entry) -> str:
    """`folder.function`, the name under which calls are counted."""
    folder = entry.module.removeprefix("transformers.models.").rpartition(".")[0]
    return f"{folder}.{entry.name}"
