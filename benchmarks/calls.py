"""The calls of cases of every kind: rotations, small calls, DTensors, blocks, whole models, the host.

All but rotations compare calls with other calls of this library or of the model that it patches, whose
results its tests compare; here they are timed only.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tightrope import RopeSpec, patch, phases, positions, rotate, unpatch
from tightrope.frequencies import DynamicNTK, Proportional
from tightrope.functional import (
    apply_rotary_pos_emb,
    rotary_pos_embedding,
    rotate_qk,
    rotate_qk_,
    write_kv,
)
from tightrope.patching import replaced

from . import peers
from .cases import KERNELS, Case
from .contenders import CONTENDERS, build as rotation
from .measure import OURS, Built, Call, Child, How, apart, measure, settings

EVERY = (*CONTENDERS, *peers.CONTENDERS)

#: Seconds without news after which the process of a case is killed.
LIMIT = 120.0

#: Tokens of the text in a block of an image or video model.
TEXT = 512


def build(case: Case, wanted: re.Pattern[str], note: Callable[[str], object] = str) -> Built:
    """Make the calls of a case.

    Args:
        wanted: contenders whose name it matches take part; this library always does.
        note: called with the name of each contender before it is made.

    Raises:
        RuntimeError: this library's own result is wrong.
    """
    if case.kind == "rotation":
        return rotation(case, EVERY, wanted, note)
    note(OURS)
    try:
        built = KINDS[case.kind](case)
    except ImportError as error:
        return Built(absent={OURS: f"it failed: {type(error).__name__}: {error}"})
    for name in list(built.calls):
        if name != OURS and not wanted.search(name):
            del built.calls[name]
    return built


# ---- small calls ----------------------------------------------------------------------------------


def _small(case: Case) -> Built:
    makers = _to_a_cache() if "key" in case.what else _one_token()
    ours, others = makers[case.what]
    return Built({OURS: ours, **others})


def _one_token() -> dict[str, tuple[Call, dict[str, Call]]]:
    """Return our call, and those beside it, of each case with one token, by name."""
    spec, whole = RopeSpec(128), RopeSpec(64, interleaved=True)
    dynamic = RopeSpec(128, scaling=DynamicNTK(2.0, 4096))
    q, k = (torch.randn(1, heads, 1, 128) for heads in (32, 8))
    many_q, many_k = (torch.randn(32, heads, 1, 128) for heads in (32, 8))
    x, ids = torch.randn(2, 12, 8, 64), torch.tensor([17])
    by_row = ids[None]
    at, at_ids = spec.at(17), spec.at(ids)
    offsets, more = (positions.per_row(torch.arange(n, n + 32)) for n in (5000, 5100))
    lengths, steps = itertools.count(5000), itertools.cycle((offsets, more))
    by_offset: dict[str, Call] = {"a plain spec": lambda: rotate_qk_(q, k, spec, 17)}
    by_ids: dict[str, Call] = {"prepared": lambda: rotate_qk_(q, k, at_ids)}
    of_rows: dict[str, Call] = {"a plain spec": lambda: rotate_qk_(many_q, many_k, spec, offsets)}
    return {
        "a spec and an offset": (
            lambda: rotate_qk_(q, k, spec, 17),
            {"prepared": lambda: rotate_qk_(q, k, at)},
        ),
        "a spec and ids": (lambda: rotate_qk_(q, k, spec, ids), by_ids),
        "a spec and ids of rows": (lambda: rotate_qk_(q, k, spec, by_row), by_ids),
        "rotary_pos_embedding": (
            lambda: rotary_pos_embedding(x),
            {"rotate": lambda: rotate(x, whole)},
        ),
        "dynamic NTK, a new length": (
            lambda: rotate_qk_(q, k, dynamic, next(lengths)),
            by_offset,
        ),
        "dynamic NTK, the same length": (lambda: rotate_qk_(q, k, dynamic, 5000), by_offset),
        # The first layer of a step has new lengths, the others find its phase words.
        "dynamic NTK, 32 rows": (lambda: rotate_qk_(many_q, many_k, dynamic, next(steps)), of_rows),
        "dynamic NTK, 32 rows, again": (
            lambda: rotate_qk_(many_q, many_k, dynamic, offsets),
            of_rows,
        ),
    }


def _to_a_cache() -> dict[str, tuple[Call, dict[str, Call]]]:
    """Return the same for keys, and values, that are written into a cache of packed tokens."""
    spec, count = RopeSpec(128), 512
    k, v, out = (torch.randn(count, 8, 128) for _ in range(3))
    keys, of_values = torch.zeros(2, 128, 16, 8, 128)
    flat, flat_values = keys.flatten(0, 1), of_values.flatten(0, 1)
    slots, ids = torch.randperm(len(flat))[:count], torch.arange(count)
    one, slot, at = k[:1], slots[:1], torch.tensor([700])

    def copied(values: bool) -> None:
        flat.index_copy_(0, slots, rotate(k, spec, ids, layout="thd"))
        if values:
            flat_values.index_copy_(0, slots, v)

    def to_slots(v: torch.Tensor | None = None) -> None:
        cache = keys, None if v is None else of_values
        write_kv(None, k, v, spec, ids, cache=cache, slots=slots, layout="thd")

    return {
        "1 key to a slot": (
            lambda: write_kv(
                None, one, None, spec, at, cache=(keys, None), slots=slot, layout="thd"
            ),
            {"a new tensor": lambda: rotate(one, spec, at, layout="thd")},
        ),
        "512 keys to slots": (
            to_slots,
            {
                "out=": lambda: rotate(k, spec, ids, layout="thd", out=out),
                "index_copy_": lambda: copied(False),
            },
        ),
        "512 keys and values to slots": (
            lambda: to_slots(v),
            {"index_copy_": lambda: copied(True)},
        ),
    }


# ---- DTensors -------------------------------------------------------------------------------------


def _sharded(case: Case) -> Built:
    """Call on DTensors of a mesh of one process, and on local tensors: almost all is Python's time."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return Built({OURS: _on(case, True), "local": _on(case, False)})


def _on(case: Case, sharded: bool) -> Call:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    q, k = (torch.randn(1, heads, 1, 128) for heads in (8, 2))
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        q, k = (DTensor.from_local(x, mesh, [Shard(1)]) for x in (q, k))
    learns = case.work == "training"
    q, k = q.requires_grad_(learns), k.requires_grad_(learns)
    spec = RopeSpec(128)
    rope, (cos, sin) = spec.at(1000), torch.ones(2, 1, 128)
    calls: dict[str, Call] = {
        "rotate": lambda: rotate(q, rope),
        "rotate_qk": lambda: rotate_qk(q, k, rope),
        "rotate_qk, a spec": lambda: rotate_qk(q, k, spec, 1000),
        "apply_rotary_pos_emb": lambda: apply_rotary_pos_emb(q, k, cos, sin),
        "q * q": lambda: q * q,
        "rotate_qk_": lambda: rotate_qk_(q, k, rope),
    }
    return calls[case.what]


# ---- stores past the caches -----------------------------------------------------------------------


def _streams(case: Case) -> Built:
    """Rotate with `out=` in two processes: the default, and without stores past the caches."""
    ordinary = Child(_read, case, environment={"TIGHTROPE_STREAM_BYTES": "0"})
    return Built({OURS: Child(_read, case, environment={}), "ordinary stores": ordinary})


def _read(case: Case) -> Call:
    torch.set_num_threads(case.threads)
    dtype, spec = getattr(torch, case.dtype), RopeSpec(case.head_dim)
    q, k, *out = (
        torch.randn(1, case.tokens, heads, case.head_dim).to(dtype).transpose(1, 2)
        for heads in (case.q_heads, case.k_heads) * 2
    )

    def call() -> None:
        y, z = rotate_qk(q, k, spec, out=(out[0], out[1]))
        if case.what == "a sum":
            y.sum(), z.sum()
        elif case.what == "attention":
            scaled_dot_product_attention(y, z, z, is_causal=True, enable_gqa=True)

    return call


# ---- models before and after patch ----------------------------------------------------------------


def _rotary(model: torch.nn.Module) -> tuple[dict[str, Any], str, Callable[..., Any]]:
    """Return the globals of the file of a model, and the name and function there that rotates.

    A function that another one defines is made from its code.
    """
    entries = patch(model).replaced
    unpatch(model)
    here = {type(module).__module__ for module in model.modules()}
    entry = next(entry for entry in entries if entry.module in here)
    names, (*path, name) = vars(sys.modules[entry.module]), entry.name.split(".")
    if not path:
        return names, name, names[name]
    outer: Any = names[path[0]]
    for part in path[1:-1]:
        outer = getattr(outer, part)
    codes = [one for one in outer.__code__.co_consts if getattr(one, "co_name", "") == name]
    return names, name, FunctionType(codes[0], names)


def _trained(call: Callable[[], Any], training: bool) -> Call:
    """Return the call, with its backward in training."""

    def both() -> None:
        ys = call()
        ys = ys if isinstance(ys, tuple) else (ys,)
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])

    return both if training else call


def _block(case: Case) -> Built:
    """A block of Wan 1.3B (12 heads of 128 channels) or of Flux (24 heads), with random weights."""
    torch.manual_seed(0)
    make = _wan if case.what.endswith("Wan") else _flux
    block, arguments, (x, *tables) = make(case.tokens, getattr(torch, case.dtype))
    training = case.work == "training"
    whole = _trained(partial(block, **arguments), training)
    if not case.what.startswith("rotations"):
        renew: dict[str, Call] = {OURS: partial(patch, block), "before": partial(unpatch, block)}
        return Built({OURS: whole, "before": whole}, renew=renew)
    x.requires_grad_(training)
    *_, original = _rotary(block)
    options = {"sequence_dim": 1} if make is _flux else {}

    def rotations(function: Any) -> Call:
        one = _trained(partial(function, x, *tables, **options), training)
        return lambda: (one(), one())

    ours = rotations(replaced(original))
    return Built({OURS: ours, "before": rotations(original), "the whole block": whole})


def _wan(tokens: int, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    """Return a block, its arguments, and the arguments of one rotation."""
    from diffusers.models.transformers import transformer_wan as wan

    text = min(TEXT, tokens)
    block = wan.WanTransformerBlock(1536, 8960, 12, cross_attn_norm=True).to(dtype)
    frames = max(1, tokens // 1024)
    side = 64 if tokens >= 1024 else 2 * int(tokens**0.5)
    rope = wan.WanRotaryPosEmbed(128, (1, 2, 2), 1024)
    tables = rope(torch.empty(1, 16, frames, side, side))
    count = tables[0].shape[1]
    arguments = {
        "hidden_states": torch.randn(1, count, 1536).to(dtype),
        "encoder_hidden_states": torch.randn(1, text, 1536).to(dtype),
        "temb": torch.randn(1, 6, 1536).to(dtype),
        "rotary_emb": tables,
    }
    return block, arguments, (torch.randn(1, count, 12, 128).to(dtype), *tables)


def _flux(tokens: int, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    """Return a block, its arguments, and the arguments of one rotation."""
    from diffusers.models.transformers import transformer_flux as flux

    text = min(TEXT, tokens)
    block = flux.FluxTransformerBlock(3072, 24, 128).to(dtype)
    side = int(max(4, tokens - text) ** 0.5)
    image = torch.stack(
        torch.meshgrid(torch.arange(1), torch.arange(side), torch.arange(side), indexing="ij"), -1
    )
    ids = torch.cat((torch.zeros(text, 3), image.reshape(-1, 3).float()))
    tables = flux.FluxPosEmbed(10000, [16, 56, 56])(ids)
    arguments = {
        "hidden_states": torch.randn(1, side * side, 3072).to(dtype),
        "encoder_hidden_states": torch.randn(1, text, 3072).to(dtype),
        "temb": torch.randn(1, 3072).to(dtype),
        "image_rotary_emb": tables,
    }
    return block, arguments, (torch.randn(1, len(ids), 24, 128).to(dtype), tables)


def _model(case: Case) -> Built:
    """A Llama-shaped model of 4 layers and 2048 channels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": case.q_heads * case.head_dim // 2,
        "intermediate_size": case.q_heads * case.head_dim * 11 // 8,
        "num_hidden_layers": 4,
        "num_attention_heads": case.q_heads,
        "num_key_value_heads": case.k_heads,
        "head_dim": case.head_dim // 2,
        "vocab_size": 1024,
        "max_position_embeddings": 2**21,
        "attn_implementation": "sdpa",
    }
    config = LlamaConfig(**shape)
    dtype, training = getattr(torch, case.dtype), case.work == "training"
    model = LlamaForCausalLM(config).to(dtype)
    ids = torch.randint(0, config.vocab_size, (1, case.tokens))

    def whole(run: Callable[..., Any]) -> Call:
        def step() -> None:
            if training:
                model.zero_grad(set_to_none=True)
                run(ids, labels=ids, use_cache=False).loss.backward()
            else:
                # Logits of the last token only, so that mostly the layers are measured.
                run(ids, logits_to_keep=1, use_cache=False)

        return step

    # Compiled code guards its globals: the replacement is made once.
    names, name, original = _rotary(model)
    ours, before = ({name: one} for one in (replaced(original), original))
    renew: dict[str, Call] = {
        OURS: partial(names.update, ours),
        "before": partial(names.update, before),
    }
    if not case.what.startswith("rotations"):
        runs = [torch.compile(model) if case.what == "compiled" else model for _ in renew]
        return Built(dict(zip(renew, map(whole, runs), strict=True)), renew=renew)
    q, k = (
        torch.randn(1, case.tokens, heads, case.head_dim // 2).to(dtype).transpose(1, 2)
        for heads in (case.q_heads, case.k_heads)
    )
    cos, sin = model.model.rotary_emb(q, torch.arange(case.tokens)[None])
    q, k = q.requires_grad_(training), k.requires_grad_(training)

    def rotations(function: Any) -> Call:
        one = _trained(partial(function, q, k, cos, sin), training)
        return lambda: [one() for _ in model.model.layers]

    calls = {OURS: rotations(ours[name]), "before": rotations(original)}
    return Built(calls | {"the whole model": whole(model)})


# ---- the host of a GPU ----------------------------------------------------------------------------


def _host(case: Case) -> Built:
    """One call of many that the device's queue takes without blocking."""
    q, k = (
        torch.randn(1, heads, 1, case.head_dim, device=case.device).to(getattr(torch, case.dtype))
        for heads in (case.q_heads, case.k_heads)
    )
    ids = torch.zeros(1, 1, dtype=torch.int64, device=case.device)
    spec, pairs = RopeSpec(case.head_dim), case.head_dim // 2
    at, leaf = spec.at(ids, device=case.device), q.clone().requires_grad_()
    alone = RopeSpec(case.head_dim, scaling=Proportional(0.0)).at(0, device=case.device)
    step = torch.rand(1, 1, 1, pairs, device=case.device)
    state = phases.running(step).state

    def with_gradients() -> None:
        with torch.enable_grad():
            rotate_qk(leaf, k, at)

    calls: dict[str, Call] = {
        "rotate_qk_ prepared": lambda: rotate_qk_(q, k, at),
        "rotate_qk prepared": lambda: rotate_qk(q, k, at),
        "rotate_qk_, an offset": lambda: rotate_qk_(q, k, spec, 7),
        "rotate_qk prepared, with gradients": with_gradients,
        "phases.running": lambda: phases.running(step, state),
        "rotate_qk_, running phases": lambda: rotate_qk_(
            q, k, alone.having(phases=phases.running(step, state))
        ),
    }
    return Built({OURS: calls[case.what]})


def _kernels(case: Case) -> Built:
    """Count the kernels that new lengths and offsets compile, after a few and after many tokens."""
    from tightrope.backends.triton import launch

    def call(length: int, offset: int) -> None:
        x = torch.randn(1, 4, length, case.head_dim, device=case.device)
        rotate_qk_(x, None, RopeSpec(case.head_dim), offset)

    most = min(9999, 5 * case.tokens)
    call(5, 3)
    call(most, 3)
    first = len(launch.compiled)
    for length in (1, 2, 3, 15, 16, 17, 100, 255, 256, 1000, 4096, 9999):
        for offset in (0, 1, 16, 2**31, -(2**40)):
            call(min(length, most), offset)
    return Built(numbers={KERNELS: float(len(launch.compiled) - first)})


KINDS: dict[str, Callable[[Case], Built]] = {
    "small": _small,
    "sharded": _sharded,
    "streams": _streams,
    "block": _block,
    "model": _model,
    "host": _host,
    "kernels": _kernels,
}


# ---- from a case to its result --------------------------------------------------------------------


def measured(
    note: Callable[[str], object], case: Case, wanted: re.Pattern[str], how: How
) -> dict[str, Any]:
    """Make the calls of a case, check them, and time them in turns."""
    with settings(case):
        built = build(case, wanted, note)
        note("")
        return measure(case, built, how)


def result_of(case: Case, wanted: re.Pattern[str], how: How) -> dict[str, Any]:
    """Return the result of a case, from a process of its own if a contender may crash.

    A contender that ends that process, or takes longer than `LIMIT`, is left out of another try.

    Raises:
        RuntimeError: this library is wrong, or ended the process.
    """
    if not case.alone:
        return measured(str, case, wanted, how)
    crashed: dict[str, str] = {}
    while True:
        names = "".join(f"(?!{re.escape(name)}$)" for name in crashed)
        left = re.compile(f"^{names}(?=.*({wanted.pattern}))") if names else wanted
        found, last = apart(measured, case, left, how, limit=LIMIT)
        if found is not None:
            absent = found.get("absent", {}) | crashed
            return {**found, "absent": absent} if crashed else dict(found)
        if last in ("", OURS) or last in crashed:
            raise RuntimeError(f"[benchmarks] {case.name} must end but its process died or hung.")
        crashed[last] = "it crashed or hung"
