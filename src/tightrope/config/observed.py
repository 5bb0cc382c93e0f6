"""Answer questions about a family of transformers by running a small model of its class.

The function that runs one is imported only when a question is open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ..spec import RopeSpec
from .source import Source, Stated
from .specs import LayerSpecs, Provenance


def object_of(config: object, prefix: str) -> object | None:
    """The part of a configuration object that a prefix such as ``text_config.`` names.

    None if a class of it is not one of transformers' own: code from elsewhere is never run.
    """
    for name in [*prefix.split(".")[:-1], ""]:
        if not type(config).__module__.startswith("transformers."):
            return None
        config = getattr(config, name, None) if name else config
    return config


def answer(
    source: Source,
    stated: Stated,
    names: Collection[str],
    read: Callable[[Source, Stated], Provenance],
) -> Stated | None:
    """The arguments with the open ones as a small model shows them; None if it does not settle them."""
    if source.config is None or "layer_type" in names:
        return None
    from ._small_model import find

    if "rotary_dim" in names and stated.start is None:
        names = {*names, "start"}
    # The weights may be in another order than those of the class.
    reordered = stated.interleaved is not None or source.recorded is not None
    tried = {*names, "interleaved"} if reordered else names

    def specs(**found: Any) -> RopeSpec | LayerSpecs | None:
        given = {name: found[name] for name in tried}
        return read(source, replace(stated, layer_type=None, **given)).spec

    seen = find(source.config, specs)
    if seen is None:
        return None
    found, name = seen
    origin = tuple((each, f"a small {name}, which was run") for each in names)
    return replace(stated, **{each: found[each] for each in names}, found=origin)
