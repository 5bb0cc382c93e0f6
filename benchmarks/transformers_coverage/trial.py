"""One model type: build it, run it, patch it, run it again, and see that a fault would be seen."""

from __future__ import annotations

import itertools
from typing import Any

from . import families
from .building import small_config, small_model
from .catalogue import ModelType
from .comparing import difference, fault, run
from .inputs import Maker


def prepare(model_type: ModelType) -> tuple[Any, dict[str, Any], Any]:
    """A small model of the type, inputs for it, and its first run."""
    family = families.of(model_type)
    classes = model_type.model_classes()
    if family.model:
        classes = [c for c in classes if c.__name__ == family.model] or classes
    if not classes:
        raise LookupError(f"no model class takes a {model_type.config_class.__name__}")
    failure: Exception | None = None
    for model_class, grouped in itertools.product(classes[:3], (True, False)):
        try:
            config = small_config(model_type.config_class, family.config, grouped)
            model = small_model(model_class, config)
            inputs = Maker(model, config, family)()
            return model, inputs, run(model, inputs)
        except Exception as error:
            if model_class is classes[0]:
                failure = error
    raise failure


def trial(model_type: ModelType) -> dict[str, Any]:
    """The row's part that depends on the run."""
    model, inputs, before = prepare(model_type)
    out: dict[str, Any] = {"model": type(model).__name__, "calls": dict(before.calls)}
    again = difference(before, run(model, inputs))
    if again.output or again.gradient:
        out["unstable"] = [again.output, again.gradient, again.where]
    with fault(model):
        spoilt = difference(before, run(model, inputs))
    out["fault"] = [spoilt.output, spoilt.gradient]
    out["outputs"] = len(before.outputs)
    out["gradients"] = len(before.gradients)
    own = [n for n in before.calls if n.startswith(model_type.folder.replace("/", "_") + ".")]
    if not own:
        return {**out, "status": "not exercised", "reason": "none of its file's rotary functions ran"}
    if spoilt.within:
        return {**out, "status": "not exercised", "reason": "outputs do not depend on the rotation"}
    return {**out, "status": "equal", "reason": "(not patched)"}
