"""Plugs for trainers: a callback that patches the model, and a hook that patches every model; see docs/plugs.md."""

from __future__ import annotations

import importlib
import os
import weakref
from typing import Any

from .._errors import sentence
from ..patching import patch

__all__ = ["patch_models", "trainer_callback"]


def patch_models() -> None:
    """Patch every model of transformers that this process builds from now on, for hooks that take a name.

    Trainers that start their processes by Ray call it in each of them if Ray's runtime environment names it as
    ``worker_process_setup_hook``. The environment variable ``TIGHTROPE_STACK`` is the option ``stack`` of
    :func:`tightrope.patch`; ``tightrope.unpatch()`` undoes it.

    Raises:
        ImportError: transformers is not installed.
        ValueError: ``TIGHTROPE_STACK`` is none of the stacks.

    >>> from tightrope import unpatch
    >>> patch_models()
    >>> unpatch()
    """
    patch(stack=os.environ.get("TIGHTROPE_STACK") or None)


def trainer_callback(**options: Any) -> Any:
    """Return a callback for the Trainer of transformers that patches the model, before it is wrapped.

    Trainers that derive from it, such as those of TRL and LLaMA-Factory, take it too.

    Args:
        options: those of :func:`tightrope.patch`, such as ``stack="vllm"``.

    Returns:
        A ``TrainerCallback``. Its attribute ``report`` is the report of ``patch`` for the last model; None before that.

    Raises:
        ImportError: transformers is not installed.

    >>> trainer_callback(stack="vllm").report
    """
    try:
        base: Any = importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        needs = "needs transformers: pip install transformers"
        raise ImportError(sentence("trainer_callback", needs)) from error

    class Patch(base):  # type: ignore[misc]
        report: Any = None
        patched: Any = None  # a weak reference to the model

        def on_init_end(self, *_: Any, **given: Any) -> None:
            self._patch(given.get("model"))

        def on_train_begin(self, *_: Any, **given: Any) -> None:
            # With `model_init`, a Trainer builds another model here. The one of before may be wrapped.
            self._patch(given.get("model"))

        def _patch(self, model: Any) -> None:
            known = None if self.patched is None else self.patched()
            if model is not None and not any(part is known for part in model.modules()):
                self.report, self.patched = patch(model, **options), weakref.ref(model)

    return Patch()
