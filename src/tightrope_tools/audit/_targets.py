"""Resolve the target of an audit: a function, ``MODULE:FUNCTION``, a model of transformers, or a stack."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import itertools
import operator
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightrope import functional, stacks
from tightrope._errors import bad_type, bad_value
from tightrope.config import LayerSpecs, from_config, recorded, source_of
from tightrope.config.files import load
from tightrope.positions import multi_axis
from tightrope.spec import RopeSpec

from ._call import describe_error, undisturbed
from ._search import NoCallFound, subject_of
from ._together import Target, together

_FILE = re.compile(r"^(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.]*)$")
_NAME = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


_STACK = "stack:"
# A part of the names of classes for images.
_VISION = "Vision"


def names_stack(target: object) -> bool:
    """Return True for ``"stack:NAME"``."""
    return isinstance(target, str) and target.startswith(_STACK)


def resolve(
    target: object,
    *,
    make: bool = False,
    layer_type: str | None = None,
    spec: RopeSpec | None = None,
    partner: object = None,
    **stated: Any,
) -> Target:
    """Resolve the ``target`` argument of an audit, together with its partner, if any.

    Args:
        spec: the rotation of ``"stack:NAME"``; other targets do not use it.
        stated: form, layout, tables and head_dim, as in :func:`tightrope_tools.audit.audit`.

    Raises:
        ValueError, TypeError: the target does not exist or cannot be called.
    """
    found = _found(target, make, layer_type, spec)
    if partner is not None:
        found = together(found, _found(partner))
    given = {name: value for name, value in stated.items() if value is not None}
    return replace(found, **given)


def _found(
    target: object,
    make: bool = False,
    layer_type: str | None = None,
    spec: RopeSpec | None = None,
) -> Target:
    if isinstance(target, Target):
        return target
    if isinstance(target, str) and names_stack(target):
        return from_stack(target.removeprefix(_STACK), spec)
    model = target if isinstance(target, nn.Module) and _is_model(target) else None
    if model is not None:
        if any("_tightrope_patch" in vars(each) for each in model.modules()):
            raise bad_value(
                "target must be a model as transformers made it, whose functions an audit calls by themselves, but "
                "this one is patched; call tightrope.unpatch(model) first, or compare what the patched model "
                "computes, as docs/parity.md shows"
            )
        target = model.config
    if isinstance(target, str) and (file := _FILE.match(target)):
        where = Path(file["file"])
        raise bad_value(
            f"target must name a function by its module, not by its file: run from the folder {where.parent.resolve()} "
            f"and pass {where.stem}:{file['name']}, but got {target!r}"
        )
    if isinstance(target, str) and _NAME.match(target):
        name, fn = target, _imported(target)
    elif isinstance(target, str | Path) or is_config(target):
        found = from_model(config_of(target), layer_type, model)
        return replace(found, recorded=recorded_in(target))
    elif callable(target):
        name, fn = getattr(target, "__qualname__", None) or type(target).__qualname__, target
    else:
        raise bad_type(
            "target must be a function, a module, 'MODULE:FUNCTION', a model or config of transformers, its "
            f"file, or the name of a model type, but got {type(target).__name__}"
        )
    if make:
        return _made(name, fn)
    if inspect.isclass(fn):
        raise bad_type(
            f"{name} must be a function or an object but is a class: pass a function "
            "without arguments that makes an instance, with make=True (--make)"
        )
    return Target(name, fn)


def from_stack(name: str, spec: RopeSpec | None) -> Target:
    """Return a target that rotates with a stack's arithmetic, or with exact angles for "exact"."""
    if spec is None:
        raise bad_value(
            f"{_STACK}{name} must have a spec: give spec= (--meant, or --base and --head-dim), or compare "
            "it with a configuration"
        )
    stack = None if name == "exact" else stacks.named(name).name
    if stack is not None and spec.by_length and (length := stacks.get(stack).length):
        raise bad_value(
            f"{_STACK}{name} must have frequencies that do not depend on the length but got {spec.scaling!r}; it goes by "
            f"a length that an audit does not know: {length}"
        )

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        where = positions if spec.axis_count == 1 else multi_axis(positions)
        return functional.rotate(x, spec.at(where, stack=stack))

    form = "x, positions"
    return Target(f"{_STACK}{name}", fn, None, spec, form, "bhsd", head_dim=spec.head_dim)


def _imported(target: str) -> Callable[..., Any]:
    """Import ``MODULE:FUNCTION`` from the current directory or the installed packages."""
    module, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except BaseException as error:  # a module may do anything while it is imported
        if isinstance(error, KeyboardInterrupt):
            raise
        raise bad_value(
            f"module {module!r} must be importable from {here} but raised {describe_error(error)}"
        ) from None
    try:
        found = operator.attrgetter(name)(found)
    except AttributeError:
        raise bad_value(f"module {module!r} must define {name!r} but does not") from None
    if not callable(found):
        raise bad_type(f"{target} must be callable but is {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _made(name: str, make: Callable[..., Any]) -> Target:
    """Return the target with the function that a factory makes; each check gets a new one."""
    try:
        fn = make()
    except Exception as error:  # noqa: BLE001  # foreign code
        raise bad_value(
            f"{name}() must return a function to audit but raised {describe_error(error)}"
        ) from None
    if not callable(fn):
        raise bad_type(f"{name}() must return a callable but returned {type(fn).__name__}")
    return Target(f"{name}()", fn, make)


# --- models of transformers ------------------------------------------------------------------------


def is_config(target: object) -> bool:
    """Return True for a config of transformers."""
    return isinstance(getattr(target, "model_type", None), str) and callable(
        getattr(target, "to_diff_dict", None)
    )


def _is_model(target: nn.Module) -> bool:
    """True for a model of transformers, with a config and a rotary module among its parts."""
    return is_config(getattr(target, "config", None)) and any(
        type(each).__name__.endswith("RotaryEmbedding") for each in [*target.modules()][1:]
    )


def config_of(target: Any) -> Any:
    """Return a config as it is, load that of a file or folder, or make the defaults of a model type."""
    if is_config(target):
        return target
    name, path = str(target), Path(target)
    if importlib.util.find_spec("transformers") is None:
        raise bad_value(
            "to audit a model's configuration, transformers must be installed but is not"
        )
    library: Any = importlib.import_module("transformers")
    values: dict[str, Any] = {}
    if path.is_dir() or path.is_file():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise bad_value(f"{path} must hold a config.json but does not")
        values = dict(load(file))
        kind = values.pop("model_type", None)
        if not isinstance(kind, str):
            raise bad_value(f"{path} must have a model_type that is a string but has {kind!r}")
    elif name in library.CONFIG_MAPPING:
        kind = name
    else:
        raise bad_value(
            "target must be MODULE:FUNCTION, the path of a config.json or its folder, or a model type "
            f"of transformers, such as llama, but got {name!r}"
        )
    try:
        return library.AutoConfig.for_model(kind, **values)
    except Exception as error:  # noqa: BLE001  # config classes raise many types of errors
        raise bad_value(
            f"{name} must be a configuration but its class raised {describe_error(error)}"
        ) from None


def recorded_in(target: Any, section: str | None = None) -> bool | None:
    """Return whether the conversion record beside a config states "interleaved"; None if there is none."""
    record = recorded(target, section)
    return None if record is None else record.interleaved


def from_model(config: Any, layer_type: str | None, model: nn.Module | None = None) -> Target:
    """Return the target of a config: its rotary module and apply function in the installed transformers.

    Args:
        model: take the rotary module of this model, as it is, instead of building one from the config.
    """
    inner = config
    with suppress(AttributeError, ValueError):
        inner = config.get_text_config()
    spec, unread = _meant(inner, layer_type, model)
    try:
        module, rotary, called = _parts(inner, spec)
    except ValueError as error:
        # The reason why the config was not read explains more than the missing rotary module.
        raise unread or error from None
    name = module.__name__.rsplit(".", 1)[1].removeprefix("modeling_")
    name = f"{name}: {rotary.__name__}, {called}"
    apply = Target(called, getattr(module, called))
    types: list[str | None] = [None]
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        every = dict.fromkeys(getattr(inner, "layer_types", None) or ())
        types = [layer_type] if layer_type is not None else [*every]
    why = "it takes a layer_type, and the config lists none"
    # First whole heads, then the slice alone, which is all that Phi and DeepSeek pass to the function.
    for chosen, cut in itertools.product(types, (False, True)):
        if spec is not None and (cut or spec.start):
            spec = replace(spec, head_dim=spec.rotary_dim, start=0)
        make = partial(_maker, inner, rotary, chosen, model)
        try:
            with undisturbed():
                found = together(Target(name, make(), make, spec), apply)
                found = replace(found, name=name, unread=str(unread or ""))
                subject_of(found, spec, "cpu")
                return found
        except NoCallFound as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  # foreign code
            why = describe_error(error)
    raise bad_value(
        f"{rotary.__name__}, built from the config and called with (x, position_ids), must return cosines "
        f"and sines that {called} takes but did not: {why}"
    )


def _maker(
    config: Any, rotary: Any, layer_type: str | None, model: nn.Module | None
) -> Callable[..., Any]:
    """Return a function that makes tables, with a rotary module of its own: a copy of the model's, or a new one."""
    if model is None:
        module = rotary(config)
    else:
        module = next((each for each in model.modules() if isinstance(each, rotary)), None)
        if module is None:
            raise bad_value(f"the model must have a {rotary.__name__} but has none")
        module = copy.deepcopy(module)
    more = () if layer_type is None else (layer_type,)

    def tables(x: torch.Tensor, positions: torch.Tensor) -> Any:
        if _VISION in rotary.__name__:  # (rows, axes, tokens)
            positions = positions.expand(2, -1, -1).movedim(0, 1)
        return module(x, positions, *more)

    return tables


def _meant(
    config: Any, layer_type: str | None, model: nn.Module | None
) -> tuple[RopeSpec | None, ValueError | None]:
    """Return the spec of a config and None, or None and the error that explains why there is none."""
    try:
        source = replace(source_of(config.to_dict()), model=model)  # its weights may be read
        read = from_config(source, layer_type=layer_type, strict=False)
    except ValueError as error:
        if layer_type is not None:
            raise
        return None, error
    if isinstance(read, LayerSpecs):
        rotating = {name: spec for name, spec in read.items() if spec is not None}
        if len(rotating) > 1:
            names = ", ".join(rotating)
            raise bad_value(f"layer_type must be one of {names}, as layers differ, but got None")
        return next(iter(rotating.values())), None
    if read is None:
        what = "the config" if layer_type is None else f"layer type {layer_type!r}"
        raise bad_value(f"{what} must have RoPE but has none")
    return read, None


def _parts(config: Any, spec: RopeSpec | None) -> tuple[Any, Any, str]:
    """Return (module, rotary class, name of the apply function) of a model type."""
    where = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(where)
    except ImportError as error:
        raise bad_value(
            f"{config.model_type} must have a modeling file but importing it raised {describe_error(error)}"
        ) from None
    source = inspect.getsource(module)
    classes = re.findall(r"self\.rotary_emb\s*=\s*(\w+)\(", source)
    classes += [name for name in vars(module) if name.endswith("RotaryEmbedding")]
    images = "vision" in config.model_type or config.model_type == "pixtral"
    classes = [name for name in classes if (_VISION in name) == images and hasattr(module, name)]
    functions = ["apply_rotary_pos_emb"]
    if images:
        functions.insert(0, "apply_rotary_pos_emb_vision")
    if getattr(config, "rope_interleave", False) or (spec is not None and spec.interleaved):
        functions.insert(0, "apply_rotary_pos_emb_interleave")
    found = [name for name in functions if hasattr(module, name)]
    if not classes or not found:
        raise bad_value(
            f"{config.model_type} must have a rotary module and apply_rotary_pos_emb in {where} but "
            "does not: write a function of q, k and positions that computes the same, and audit that"
        )
    return module, getattr(module, classes[0]), found[0]
