"""Find what a configuration class of transformers rotates, by running a small model of the class.

The model keeps the width of heads, the layers and the frequencies of the configuration. Every token of a layer
gets the same hidden state. So queries and keys differ between tokens by their rotation alone, and are compared
with the spec of the configuration where attention multiplies them.
"""

from __future__ import annotations

import contextvars
import copy
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .._tracing import undisturbed
from ..channels import join_pairs, split_pairs
from ..spec import RopeSpec
from .keys import HEADS, HIDDEN, LAYER_COUNT, LAYER_TYPES, LAYERS_WITHOUT_ATTENTION
from .specs import LayerSpecs

# No other dimension has this size. The first tokens are not compared: a convolution may mix them with padding.
_TOKENS, _SKIPPED = 13, 5
# Limits on the numbers of a model, on those of a tensor that may hold queries, and on the seconds of a run.
_MOST, _LARGEST, _SECONDS = 1 << 27, 1 << 18, 10
# Bounds, relative to the largest channel: of what changes without a rotation, and of two equal rotations.
_STILL, _CLOSE = 1e-11, 2e-6
_HEADS, _VOCABULARY = 2, 64
# The size in the small model -> a pattern of the names of settings.
_SMALL = {
    _VOCABULARY: r"(.*_)?vocab_size(_.*)?",
    32: r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_ff)(_.*)?|[qo]_lora_rank|kv_lora_rank",
    4: r"(.*_)?(n_routed_experts|num_experts|num_local_experts|moe_num_experts)",
    2: r"(.*_)?(num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts)",
    1: r"n_group|topk_group|num_expert_group",
}
_KEY_HEADS = r".*(num_key_value_heads|kv_n?_?heads?|num_kv_heads)"
# Functions that multiply queries and transposed keys -> the place of the queries.
_PRODUCTS = {"matmul": 0, "__matmul__": 0, "bmm": 0, "baddbmm": 1}


_running = contextvars.ContextVar("_running", default=False)


def is_running() -> bool:
    """Return whether the model that is built now is a small one, of :func:`find`."""
    return _running.get()


class _Unsettled(ValueError):
    """The small model does not show one rotation that a spec describes."""


class _Scores(NamedTuple):
    """Queries and keys of one attention, the layer, and the tensors that the layer made before."""

    layer: int | None
    q: torch.Tensor
    k: torch.Tensor
    made: list[torch.Tensor]


def find(
    config: Any, specs_of: Callable[..., RopeSpec | LayerSpecs | None]
) -> tuple[Mapping[str, Any], str] | None:
    """Find the answers with which the specs of a configuration are those of a small model.

    Args:
        config: a configuration object of one of transformers' own classes.
        specs_of: takes interleaved, rotary_dim, start and rope_layers, and returns the specs.

    Returns:
        The answers and the name of the model's class; None if no such model can be built or run, or if it
        does not show one rotation with the frequencies of the specs.
    """
    if _running.get():  # with exact angles for all models, the small one asks about itself
        return None
    token = _running.set(True)
    try:
        with undisturbed(), torch.no_grad(), _silenced():
            torch.manual_seed(0)
            kind, small = _class_of(config), _small(config)
            return _answers(small, _ran(kind, small), specs_of), kind.__name__
    except Exception:  # noqa: BLE001  # third-party code can raise anything
        return None
    finally:
        _running.reset(token)


@contextmanager
def _silenced() -> Iterator[None]:
    """Let transformers log nothing."""
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        yield
    finally:
        logger.setLevel(level)


# --- the model ------------------------------------------------------------------------------------


def _class_of(config: Any) -> type[Any]:
    """The plainest model class of transformers with this configuration class."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    found = [
        each
        for each in vars(importlib.import_module(name)).values()
        if isinstance(each, type)
        and each.__module__ == name
        and getattr(each, "config_class", None) is type(config)
        and not each.__name__.endswith("PreTrainedModel")
    ]
    return min(found, key=lambda each: (not each.__name__.endswith("Model"), len(each.__name__)))


def _small(config: Any) -> Any:
    """A copy with fewer heads of the same width, as many layers, and smaller other sizes."""
    small = copy.deepcopy(config)
    heads = max(n for key in HEADS if isinstance(n := getattr(config, key, None), int))
    factor = heads // _HEADS if heads % _HEADS == 0 else heads
    for name, value in vars(config).items():
        if type(value) is not int or value < 1:
            continue
        sizes = [size for size, pattern in _SMALL.items() if re.fullmatch(pattern, name)]
        if sizes:
            setattr(small, name, min(value, *sizes))
        elif name in (*HEADS, *HIDDEN):
            setattr(small, name, max(value // factor, 1))
        elif re.fullmatch(_KEY_HEADS, name):
            setattr(small, name, min(max(value // factor, 1), heads // factor))
        elif name.endswith("token_id") and value >= _VOCABULARY:
            setattr(small, name, 0)
    small._attn_implementation = small._experts_implementation = "eager"
    return small


def _ran(kind: type[Any], small: Any) -> list[_Scores]:
    """Run a model of random weights and return its queries and keys."""

    def built() -> Any:
        return kind._from_config(copy.deepcopy(small), dtype=torch.float64).eval()

    with torch.device("meta"):
        probe = built()
    if sum(x.numel() for x in [*probe.parameters(), *probe.buffers()]) > _MOST:
        raise _Unsettled
    model, watch = built(), _Watch()
    inside: set[torch.nn.Module] = set()  # such as a list of as many experts
    for stack in model.modules():
        if (
            type(stack) is torch.nn.ModuleList
            and len(stack) == _count(small)
            and stack not in inside
        ):
            for number, layer in enumerate(stack):
                watch.attach(layer, number)
                inside.update(layer.modules())
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names:
        given = {"input_ids": torch.arange(_TOKENS)[None]}
    else:
        given = {"inputs_embeds": torch.randn(1, _TOKENS, small.hidden_size).double()}
    with watch:
        model(**given, **({"use_cache": False} if "use_cache" in names else {}))
    return watch.scores


def _count(config: Any) -> int:
    return next(n for key in LAYER_COUNT if isinstance(n := getattr(config, key, None), int))


class _Watch(TorchFunctionMode):
    """Record the queries and keys of each layer, and give every token of a layer the same hidden state."""

    def __init__(self) -> None:
        self.scores: list[_Scores] = []
        self._layer: int | None = None
        self._made: list[torch.Tensor] = []
        self._end = monotonic() + _SECONDS

    def attach(self, layer: torch.nn.Module, number: int) -> None:
        def alike(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.dim() < 3 or x.shape[1] != _TOKENS:
                return x
            return torch.randn_like(x[:, :1]).expand_as(x).clone()

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._layer, self._made = number, []
            named = {"hidden_states": alike(kwargs["hidden_states"])} if not args else {}
            return (*map(alike, args[:1]), *args[1:]), {**kwargs, **named}

        def after(*_: Any) -> None:
            self._layer = None

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS:
            q, k = args[_PRODUCTS[name] :][:2]
            self._note(q, k.mT if k.dim() > 1 else k)
        elif name == "scaled_dot_product_attention":
            self._note(*[*args, *(kwargs or {}).values()][:2])
        if isinstance(result, torch.Tensor):
            if monotonic() > self._end or _is_positions(result):
                raise _Unsettled
            if result.is_floating_point() and result.numel() <= _LARGEST:
                self._made.append(result)
        return result

    def _note(self, q: torch.Tensor, k: torch.Tensor) -> None:
        if q.dim() > 2 and q.shape[-2] == _TOKENS and q.shape[-2:] == k.shape[-2:]:
            if not 0 < q.abs().max() < torch.inf or not k.isfinite().all():
                raise _Unsettled  # zeros show no rotation
            self.scores.append(_Scores(self._layer, q.clone(), k.clone(), self._made))


def _is_positions(x: torch.Tensor) -> bool:
    """Return whether a tensor has the positions of the tokens, in each of several coordinates."""
    if x.numel() not in (2 * _TOKENS, 3 * _TOKENS, 4 * _TOKENS) or _TOKENS not in x.shape:
        return False
    rows = x.movedim(x.shape.index(_TOKENS), -1).reshape(-1, _TOKENS)
    return bool((rows == torch.arange(_TOKENS)).all())


# --- what it rotates ------------------------------------------------------------------------------


def _answers(
    small: Any, scores: list[_Scores], specs_of: Callable[..., RopeSpec | LayerSpecs | None]
) -> Mapping[str, Any]:
    count = _count(small)
    types = next((t for key in LAYER_TYPES if (t := getattr(small, key, None))), [""] * count)
    layers = {n for n in range(count) if types[n] not in LAYERS_WITHOUT_ATTENTION}
    turning = [each for each in scores if _moving(each.q) or _moving(each.k)]
    rotating: set[Any] = {each.layer for each in turning}
    if not rotating <= layers <= {each.layer for each in scores}:
        raise _Unsettled
    on: Any = "all" if rotating == layers else sorted({types[n] for n in rotating})

    def specs(answers: Mapping[str, Any]) -> dict[Any, RopeSpec | None]:
        made = specs_of(**answers)
        return {n: made.of(n) if isinstance(made, LayerSpecs) else made for n in layers}

    width, channels = turning[0].q.shape[-1], _moving(turning[0].q)
    found: dict[str, Mapping[str, Any]] = {}
    # The last frequencies may be too low to be seen. A rotation may return pairs in another order.
    for first, behind in {(channels[0], channels[-1] + 1), (0, width)}:
        for out in (False, True):
            answers = {
                "interleaved": out,
                "rotary_dim": behind - first,
                "start": first,
                "rope_layers": on,
            }
            try:
                by_layer = specs(answers)
                if {n for n, spec in by_layer.items() if spec} != rotating:
                    continue
                if not all(_fits(each, by_layer[each.layer], out) for each in turning):
                    continue
                kinds = {types[each.layer or 0]: each for each in turning}.values()
                pairings = {_pairing(each, by_layer[each.layer], out) for each in kinds}
                (answers["interleaved"],) = pairings
                by_layer = specs(answers)
            except (TypeError, ValueError, NotImplementedError):
                continue
            if pairings == {spec.interleaved for spec in by_layer.values() if spec}:
                found[repr(by_layer)] = answers
    (only,) = found.values()
    return only


def _moving(x: torch.Tensor) -> list[int]:
    """The channels that differ between tokens."""
    x = x[..., _SKIPPED:, :]
    moved = (x - x[..., :1, :]).abs() > _STILL * x.abs().max()
    return moved.flatten(0, -2).any(0).nonzero().flatten().tolist()


def _fits(scores: _Scores, spec: Any, out: bool) -> bool:
    """Return whether queries and keys rotate by a spec, in pairs of the order of the results."""
    if spec.head_dim != scores.q.shape[-1]:
        return False
    for x in (scores.q[..., _SKIPPED:, :], scores.k[..., _SKIPPED:, :]):
        wanted = _rotated(x[..., :1, :], spec, out, torch.arange(x.shape[-2]))
        if (wanted - x).abs().max() > _CLOSE * x.abs().max():
            return False
    return True


def _rotated(x: torch.Tensor, spec: RopeSpec, out: bool, positions: torch.Tensor) -> torch.Tensor:
    """Rotate a token to other positions, without the spec's factor."""
    angles = positions[:, None] * spec.frequencies(_TOKENS).inv_freq.double()
    part = slice(spec.start, spec.start + spec.rotary_dim)
    u, v = split_pairs(x[..., part], out)
    turned = x.repeat_interleave(len(positions), dim=-2)
    cos, sin = angles.cos(), angles.sin()
    turned[..., part] = join_pairs(u * cos - v * sin, v * cos + u * sin, out)
    return turned


def _pairing(scores: _Scores, spec: Any, out: bool) -> bool:
    """The pairing of the channels before the rotation, which may return them in another order.

    It is that of the first tensor of the layer that has the channels of a query, up to a factor.
    """
    x = scores.q.flatten(0, -3)[0, _SKIPPED : _SKIPPED + 1]
    x = _rotated(x, spec, out, torch.tensor([-_SKIPPED]))[0]
    pairs = split_pairs(x[spec.start : spec.start + spec.rotary_dim], out)
    for made in scores.made:
        for interleaved in (False, True):
            wanted = join_pairs(*pairs, interleaved)
            if made.numel() >= len(wanted):
                parts = made.flatten().double().unfold(0, len(wanted), 1)
                likeness = parts @ wanted / (parts.norm(dim=1) * wanted.norm())
                if (likeness > 1 - 1e-6).any():
                    return interleaved
    raise _Unsettled
