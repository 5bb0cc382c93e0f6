"""Plugs for trainers and servers: callbacks that patch a model, and entry points that programs load by themselves.

An entry point does nothing unless the environment variable ``TIGHTROPE_PLUGINS`` names its program:
``TIGHTROPE_PLUGINS=vllm vllm serve …``. ``TIGHTROPE_STACK=vllm`` gives those that patch models the
option ``stack="vllm"``. See docs/plugs.md.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

from .._errors import sentence
from ..patching import patch

__all__ = ["lightning_callback", "patch_models", "trainer_callback"]

_VARIABLE = "TIGHTROPE_PLUGINS"
_PROGRAMS = ("axolotl", "lightning", "sglang", "verl", "vllm")


def _options() -> dict[str, Any]:
    stack = os.environ.get("TIGHTROPE_STACK")
    return {"stack": stack} if stack else {}


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
    patch(**_options())


def trainer_callback(**options: Any) -> Any:
    """Return a callback for the Trainer of transformers that patches the model, before it is wrapped.

    Trainers that derive from it, such as those of TRL and LLaMA-Factory, take it too.

    Args:
        options: those of :func:`tightrope.patch`, such as ``stack="vllm"``.

    Returns:
        A ``TrainerCallback``. Its attribute ``report`` is the report of ``patch``; None before that.

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

        def on_init_end(self, *_: Any, **given: Any) -> None:
            self._patch(given.get("model"))

        def on_train_begin(self, *_: Any, **given: Any) -> None:
            self._patch(given.get("model"))  # of a Trainer with `model_init`, which has none before

        def _patch(self, model: Any) -> None:
            if model is not None and self.report is None:
                self.report = patch(model, **options)

    return Patch()


def lightning_callback(**options: Any) -> Any:
    """Return a callback for Lightning's Trainer that patches the module before it is trained or tested.

    Args:
        options: those of :func:`tightrope.patch`, such as ``stack="vllm"``.

    Returns:
        A ``Callback``. Its attribute ``report`` is the report of ``patch``; None before that.

    Raises:
        ImportError: Lightning is not installed.

    >>> lightning_callback()  # doctest: +SKIP
    """
    try:
        base: Any = importlib.import_module("lightning.pytorch").Callback
    except ImportError as error:
        needs = "needs Lightning: pip install lightning"
        raise ImportError(sentence("lightning_callback", needs)) from error

    class Patch(base):  # type: ignore[misc]
        report: Any = None

        def on_fit_start(self, _: Any, pl_module: Any) -> None:
            # After `configure_model`, in which a module may be built.
            if self.report is None:
                self.report = patch(pl_module, **options)

        on_validation_start = on_test_start = on_predict_start = on_fit_start

    return Patch()


def is_chosen(program: str) -> bool:
    """Return whether the environment variable names a program; warn of names that are none.

    >>> is_chosen("vllm")
    False
    """
    chosen = [name.strip() for name in os.environ.get(_VARIABLE, "").split(",") if name.strip()]
    unknown = [name for name in chosen if name not in _PROGRAMS]
    if unknown:
        warnings.warn(
            f"{_VARIABLE} may name {', '.join(_PROGRAMS)}, but names {', '.join(unknown)}",
            stacklevel=2,
        )
    return program in chosen


def for_vllm() -> None:
    """Entry point in the group ``vllm.general_plugins``: register this library's rotation."""
    if is_chosen("vllm"):
        from .vllm import register

        register()


def for_lightning() -> list[Any]:
    """Entry point in the group ``lightning.pytorch.callbacks_factory``: return the callback."""
    return [lightning_callback(**_options())] if is_chosen("lightning") else []


def for_sglang() -> None:
    """Entry point in the group ``sglang.srt.plugins``: hook SGLang's rotary methods."""
    if is_chosen("sglang"):
        from .sglang import register

        register()


def __getattr__(name: str) -> Any:
    """Make the entry points whose programs only load them.

    ``axolotl.plugins`` is a class, whose base exists only in Axolotl. verl loads ``verl.plugins`` and calls nothing.
    """
    if name == "for_verl":
        return patch_models() if is_chosen("verl") else None
    if name != "ForAxolotl":
        raise AttributeError(name)
    base: Any = importlib.import_module("axolotl.integrations.base").BasePlugin

    class ForAxolotl(base):  # type: ignore[misc]
        def post_model_build(self, cfg: Any, model: Any) -> None:  # noqa: ARG002
            if is_chosen("axolotl"):
                patch(model, **_options())

    return ForAxolotl
