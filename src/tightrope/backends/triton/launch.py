"""From a kernel and its arguments to a launch: what is compiled, and when again.

Triton's own launcher looks at every argument of every call, and compiles anew for an integer that is 1
or a multiple of 16. Here a kernel is compiled for what it is given as constants, for the types of its
tensors and for one alignment of all of them; integers are int64 and nothing of their values is
known. So lengths and offsets never compile anything, and a launch costs what it takes to hand over
its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from . import kernels
from .blocks import Blocks
from .groups import CONSTANTS

#: What a kernel is given, in the order of its parameters: tensors as types, numbers, groups, None.
Values: TypeAlias = Sequence[Any]

_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}

# Compiled kernels by all that they are compiled for. Their number is the number of compilations.
compiled: dict[tuple[Any, ...], Any] = {}


#: Whether Triton's interpreter runs the kernels, on tensors of any device.
INTERPRETED = not hasattr(kernels.rotate, "cache_key")


def signature_of(kernel: Any, values: Values) -> tuple[Any, ...]:
    """The type of each parameter, and of each member of a group that is not of constants."""
    return tuple(
        [
            "constexpr" if parameter.is_constexpr else _type_of(value)
            for parameter, value in zip(kernel.params, values, strict=True)
        ]
    )


def _type_of(value: Any) -> Any:
    """A pointer, i64, fp32, "constexpr" for None, or a group of these."""
    if value is None:
        return "constexpr"
    if isinstance(value, tuple):
        return type(value)(*map(_type_of, value))
    if isinstance(value, torch.dtype):
        return _TYPES[value]
    return "fp32" if isinstance(value, float) else "i64"


def _leaves(names: Sequence[str], types: Sequence[Any], values: Values) -> Iterator[Any]:
    """What parameters and groups consist of: the path, name, type and value of each."""
    for i, (name, kind, value) in enumerate(zip(names, types, values, strict=True)):
        if isinstance(kind, str):
            yield (i,), name, kind, value
        else:
            for path, *leaf in _leaves(value._fields, kind, value):
                yield (i, *path), *leaf


def source_of(kernel: Any, values: Values, aligned: frozenset[str]) -> Any:
    """What ``triton.compile`` takes.

    Args:
        kernel: a function of :mod:`.kernels`.
        values: for each of its parameters the dtype of a tensor, a number, a group of
            :mod:`.groups`, or None.
        aligned: the tensors that begin at a multiple of 16 bytes.
    """
    from triton.compiler import ASTSource

    types = signature_of(kernel, values)
    leaves = list(_leaves(kernel.arg_names, types, values))
    constants = {path: value for path, _, kind, value in leaves if kind == "constexpr"}
    attributes = {
        path: [["tt.divisibility", 16]]
        for path, name, kind, _ in leaves
        if name in aligned and kind[0] == "*"
    }
    return ASTSource(kernel, dict(zip(kernel.arg_names, types)), constants, attributes)


def options_of(blocks: Blocks, target: Any) -> dict[str, Any]:
    """How kernels are compiled: multiply-adds are those that are written, on every path.

    Args:
        blocks: of the kernel, with warps of 32 lanes.
        target: whose warps may have 64; Triton's.
    """
    warps = max(1, blocks.warps * 32 // target.warp_size)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if blocks.registers and target.backend == "cuda":
        options["maxnreg"] = blocks.registers
    return options


def launcher(
    kernel: Any,
    grid: tuple[int, int, int],
    values: Values,
    aligned: frozenset[str],
    blocks: Blocks,
    device: torch.device,
) -> Callable[..., None]:
    """A function of all arguments of the kernel, :func:`flat`, that launches it on the current stream.

    Args:
        kernel, values, aligned: as of :func:`source_of`.
        grid: how many programs.
        blocks: what a program takes on.
        device: that is current when it is called.
    """
    if INTERPRETED:
        interpret: Callable[..., None] = kernel[grid]
        return interpret
    types = signature_of(kernel, values)
    constants = tuple(v for v, t in zip(values, types) if t == "constexpr")
    key = (kernel.__name__, device, types, constants, aligned, blocks)
    found = compiled.get(key)
    if found is None:
        import triton

        target = triton.runtime.driver.active.get_current_target()
        source = source_of(kernel, values, aligned)
        found = triton.compile(source, target=target, options=options_of(blocks, target))
        # Triton's launcher would take groups apart in every launch, at up to twice the price.
        source.signature = dict(enumerate(_members(types)))
        compiled[key] = found
    return runner(found, grid, device)


def runner(found: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., None]:
    """A function that launches a compiled kernel on the current stream.

    Triton's own asks in every launch for the device, which is known, and for what observers of launches
    want to be told; where there are none, this hands over the same at half the price. Triton's own is
    what there is otherwise, or if a version should lack one of these attributes.

    Args:
        found: of ``triton.compile``.
        grid, device: as of :func:`launcher`.
    """
    observed: Callable[..., None] = found[grid]
    if device.type != "cuda":
        return observed
    import triton

    try:
        run, function, packed = found.run, found.function, found.packed_metadata
        stream_of = triton.runtime.driver.active.get_current_stream
        hooks = triton.knobs.runtime
    except AttributeError:
        return observed
    (x, y, z), index = grid, device.index

    def launch(*arguments: Any) -> None:
        if _is_idle(hooks.launch_enter_hook) and _is_idle(hooks.launch_exit_hook):
            run(x, y, z, stream_of(index), function, packed, None, None, None, *arguments)
        else:
            observed(*arguments)

    return launch


def _is_idle(hook: Any) -> bool:
    """Whether nobody observes launches: nothing, or since Triton 3.5 a chain of nothing."""
    return hook is None or not getattr(hook, "calls", True)


def flat(values: Values) -> tuple[Any, ...]:
    """Arguments as a launch takes them: without groups, unless they are of constants."""
    return tuple(values) if INTERPRETED else tuple(_members(values))


def _members(values: Values) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple) and not isinstance(value, CONSTANTS):
            yield from _members(value)
        else:
            yield value


def handle_of(x: torch.Tensor | None) -> Any:
    """A tensor as a launch takes it: its address, which costs less to read than the tensor."""
    return x if x is None or INTERPRETED else x.data_ptr()
