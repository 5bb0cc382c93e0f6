"""``patch()``: patch every model of transformers that is built from now on."""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import _patch, _small_model
from .._classes import base_of
from .._report import Entry, Report

_NONE = "no model of transformers was built since patch()"
_LATER = "models of transformers that are built from now on are patched, and listed here"


class _Active:
    """The active patch: its options, its report and how to undo it."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.report = Report(notes=[_LATER], if_empty=_NONE, _undo=self.end)
        self.models: weakref.WeakKeyDictionary[torch.nn.Module, Report] = (
            weakref.WeakKeyDictionary()
        )
        self.base: Any = importlib.import_module("transformers").PreTrainedModel
        self.original: Callable[..., Any] = self.base.post_init

    def start(self) -> None:
        """Patch each model at the end of its ``__init__``, where transformers calls ``post_init``."""

        @functools.wraps(self.original)
        def post_init(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = self.original(model, *args, **kwargs)
            # Another library may have wrapped this function.
            if _active is self and not _small_model.is_running():
                self.add(model)
            return result

        self.wrapped = post_init
        self.base.post_init = post_init

    def add(self, model: torch.nn.Module) -> None:
        """Patch a model that was built now."""
        try:
            made = self.models[model] = _patch.patch(model, **self.options)
        except Exception as error:  # noqa: BLE001  # such as one without rotations; it is built nevertheless
            cls = base_of(type(model))
            made = Report([Entry(cls.__module__, cls.__qualname__, None, False, str(error))])
        self.report.add(made)

    def end(self) -> None:
        """Undo the patch, at the end of a block ``with patch():``."""
        if _active is self:
            unpatch()

    def stop(self) -> None:
        """Undo the patch of every model that still exists and has no newer one."""
        if self.base.post_init is self.wrapped:
            self.base.post_init = self.original
        for model, made in list(self.models.items()):
            if _patch.latest.get(model) is made:
                _patch.unpatch(model)


_active: _Active | None = None


def patch(options: dict[str, Any]) -> Report:
    """Patch every model that is built from now on; see :func:`tightrope.integrations.transformers.patch`."""
    global _active
    if _active is None or _active.options != options:
        unpatch()
        _active = _Active(**options)
        _active.start()
    return _active.report


def unpatch() -> None:
    """Undo :func:`patch`."""
    global _active
    if _active is not None:
        active, _active = _active, None
        active.stop()
