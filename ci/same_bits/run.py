"""Run a drawn call in one of many modes, and describe its results."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jvp, vmap

from tightrope import RopeSpec

from .calls import FAMILIES, PLAIN, STRIDES, Call, Draw, laid_out

Tensors = Sequence[torch.Tensor]
Function = Callable[..., list[torch.Tensor]]

CONTEXTS: dict[str, Callable[[], Any]] = {
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "inference tensors": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
# In these modes an in-place call changes the drawn tensors; in the others copies of them, because a leaf
# that requires grad cannot be changed in place.
GIVEN = (*PLAIN, "vmap", "functionalize", "compiled", "compiled vmap", "exported")
# The compiler's report of an error in the code that it compiles.
RAISED = re.compile(r"raised exception ([^\n]*)")


def outcome(seed: int, number: int) -> dict[str, dict[str, str]]:
    """Run call `number` of a seed; return its arguments and its results or error."""
    d, result = Draw(seed, number), dict[str, str]()
    torch.set_num_threads(d.pick("threads", 1, 1, 2))
    before: dict[str, tuple[str, int | None]] = {}
    try:
        with torch.inference_mode("inference tensors" in d.mode):
            call = FAMILIES[d.verb](d)
            if d.mode == "meta":
                d.tensors = {name: value.to("meta") for name, value in d.tensors.items()}
        before = state(d)
        with CONTEXTS.get(d.mode, nullcontext)():
            if d.mode in PLAIN or not d.tensors:
                plain(d, call, result)
            else:
                transformed(d, call, result)
    except Exception as error:  # noqa: BLE001  (an error is a result)
        found = RAISED.search(str(error))
        sentence = found[1] if found else str(error).partition("\n")[0]
        result["error"] = f"{type(error).__name__}: {sentence}"
    for name, (bits, version) in state(d).items() if before else ():
        kept, since = before[name]
        if bits != kept or version != since:
            result[f"changed {name}"] = f"{bits}, version {since} -> {version}"
    if "compiled" in d.mode or d.mode == "exported":
        torch.compiler.reset()
    return {"call": d.choices, "result": result}


def state(d: Draw) -> dict[str, tuple[str, int | None]]:
    """Return the digest and the version counter of each tensor."""
    return {
        name: (bits(x), None if x.is_inference() else x._version) for name, x in d.tensors.items()
    }


def bits(x: Any) -> str:
    """Describe a tensor by dtype, shape, strides and a digest that treats all NaNs alike.

    Other values are described by their repr.
    """
    if not isinstance(x, torch.Tensor):
        return repr(x)
    strides = [s for s, size in zip(x.stride(), x.shape) if size > 1]
    form = f"{str(x.dtype)[6:]}{list(x.shape)} {strides}"
    if x.is_meta:
        return f"{form} meta"
    with torch.inference_mode():
        x = x.detach().clone(memory_format=torch.contiguous_format).flatten()
        if x.is_floating_point():
            x[x.isnan()] = torch.nan
        return f"{form} {hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]}"


def named(prefix: str, values: Iterable[Any], own: Iterable[torch.Tensor] = ()) -> dict[str, str]:
    """Describe results by name, and mark those that are input tensors themselves."""
    own = list(own)
    same = " (its input)"
    return {
        f"{prefix}{i}": bits(x) + (same if any(x is one for one in own) else "")
        for i, x in enumerate(values)
    }


def flat(result: Any) -> list[Any]:
    """Return the results of a call as a flat list, without None."""
    if isinstance(result, (tuple, list)):
        return [each for part in result for each in flat(part)]
    return [] if result is None else [result]


def plain(d: Draw, call: Call, result: dict[str, str]) -> None:
    """Run a call in a mode of `PLAIN`, which computes no gradients."""
    if d.mode == "no grad":
        for value in d.tensors.values():
            value.requires_grad_()
    arguments = call.arguments(d.tensors)
    if d.mode == "bad":
        spoil(d, arguments)
    result |= named("y", flat(call.function(**arguments)), d.tensors.values())


def spoil(d: Draw, arguments: dict[str, Any]) -> None:
    """Replace one argument by an invalid or unusual value."""
    name = d.pick("spoiled", *arguments)
    x = arguments[name]
    others: dict[str, Callable[[], Any]] = {
        repr(value): lambda value=value: value
        for value in ("junk", -3, 2.5, None, True, [], 10**30, (1, 2, 3), RopeSpec(6))
    }
    others |= {"a tensor": lambda: torch.zeros(2), "bytes": lambda: torch.zeros(2).byte()}
    if isinstance(x, torch.Tensor):
        others = {
            "integers": lambda: x.int(),
            "complex numbers": lambda: x.to(torch.complex64),
            "another type": lambda: x.to(torch.float32 if x.element_size() > 4 else torch.float64),
            "a channel less": lambda: x[..., :-1],
            "a row more": lambda: torch.cat((x, x[:1])),
            "another dimension": lambda: x[None],
            "a list": lambda: x.tolist(),
            "sparse": lambda: x.to_sparse(),
            "meta": lambda: x.to("meta"),
            "None": lambda: None,
            "a leaf": lambda: x.detach().clone().requires_grad_(),
            "unbound": lambda: (torch.stack((x, x)).requires_grad_() * 1).unbind()[0],
            "expanded": lambda: x[..., :1].expand(x.shape),
            "overlapping": lambda: (
                x.flatten().unfold(0, 1, 1)[:1].expand(x.numel(), 1).view(x.shape)
            ),
        }
    arguments[name] = others[d.pick("by", *others)]()


def transformed(d: Draw, call: Call, result: dict[str, str]) -> None:
    """Run a call with gradients, or under a compiler or a transform."""
    learns = [name for name in d.tensors if d.random.random() < 0.6]
    if not learns or "vmap" in d.mode or d.mode == "functionalize":
        # A tensor that is changed in place must be an input of the transform.
        learns = [*d.tensors][: d.pick("how many learn", len(call.changes) or 1, len(d.tensors))]
    d.choices["learns"] = ", ".join(learns)
    tensors = [d.tensors[name] for name in learns]
    copied = () if d.mode in GIVEN else call.changes

    def f(*given: torch.Tensor) -> list[torch.Tensor]:
        t = {**d.tensors, **dict(zip(learns, given))}
        t |= {name: laid_out(t[name] * 1, d.strides[name]) for name in copied}
        found = flat(call.function(**call.arguments(t)))
        return [y for y in found if isinstance(y, torch.Tensor)]

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return torch.stack([y.double().square().sum() for y in f(*given)]).sum()

    slopes = grad(loss, tuple(range(len(learns))))
    like = [d.noise(*x.shape).to(x.dtype) for x in tensors]
    stacked = [torch.stack((x, x * 0.5)) for x in tensors]
    options = {"backend": "aot_eager", "fullgraph": True}
    # Compiling these two with symbolic shapes takes half a minute.
    slow = d.verb in ("polar_scan", "Llama")
    options["dynamic"] = d.pick("dynamic", None, None, None if slow else True)
    mode = d.mode
    if mode in ("grad", "second", "batched", "compiled grad"):
        run = torch.compile(f, **options) if mode == "compiled grad" else f
        differentiated(d, run, [x.requires_grad_() for x in tensors], result)
    elif mode == "dual":
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, tangent) for x, tangent in zip(tensors, like)]
            result |= named("y", [part for y in f(*duals) for part in forward_ad.unpack_dual(y)])
    elif mode == "exported":

        class Module(torch.nn.Module):
            def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
                return f(*given)

        program = torch.export.export(Module(), tuple(tensors))
        result |= named("y", program.module()(*tensors))
    else:
        ways: dict[str, Callable[[], Any]] = {
            "vmap": lambda: vmap(f)(*stacked),
            "func.grad": lambda: slopes(*tensors),
            "vmap of grad": lambda: vmap(slopes)(*stacked),
            "jvp": lambda: jvp(f, tuple(tensors), tuple(like)),
            "jvp of grad": lambda: jvp(slopes, tuple(tensors), tuple(like)),
            "functionalize": lambda: functionalize(f)(*tensors),
            "compiled": lambda: torch.compile(f, **options)(*tensors),
            "compiled vmap": lambda: torch.compile(lambda *t: vmap(f)(*t), **options)(*stacked),
            "compiled func.grad": lambda: torch.compile(slopes, **options)(*tensors),
        }
        result |= named("y", flat(ways[mode]()))


def differentiated(d: Draw, run: Function, tensors: Tensors, result: dict[str, str]) -> None:
    """Run a call and its backward pass; differentiate again if the gradients require grad."""
    ys = run(*tensors)
    result |= named("y", ys)
    if "compiled" not in d.mode:
        result["versions"] = repr([y._version for y in ys])
    ys = [y for y in ys if y.requires_grad]
    if not ys:
        result["grad"] = "none"
        return
    kind = d.pick("strides of the gradient", *STRIDES)
    of_ys = [laid_out(d.noise(*y.shape).to(y.dtype), kind) for y in ys]
    if d.mode == "batched":
        of_ys = [torch.stack((y, 2 * y)) for y in of_ys]
    options = {"create_graph": d.mode == "second", "is_grads_batched": d.mode == "batched"}
    found = torch.autograd.grad(ys, tensors, of_ys, allow_unused=True, **options)
    result |= named("grad", found)
    again = [x for x in found if x is not None and x.requires_grad]
    if again:
        like = [d.noise(*x.shape).to(x.dtype) for x in again]
        found = torch.autograd.grad(again, tensors, like, allow_unused=True)
        result |= named("second", found)
