"""Compile and launch kernels.

Triton's own launcher inspects every argument of every call, and recompiles for integers that are 1 or a
multiple of 16. Here a kernel is specialised only on its constants, on the dtypes of its tensors and on
which of them are aligned; integers are int64 and never specialised. Lengths and offsets therefore never
trigger a compilation, and a launch costs little more than passing its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from . import kernels
from .blocks import Blocks
from .groups import CONSTANTS
from .views import ACCESS, address

#: Arguments of a kernel in the order of its parameters: dtypes in place of tensors, numbers, groups, None.
Values: TypeAlias = Sequence[Any]
#: What is known to divide addresses and strides, see :func:`source_of`.
Aligned: TypeAlias = Mapping[str, int]

_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}

# Compiled kernels by everything that they are specialised on; one entry per compilation.
compiled: dict[tuple[Any, ...], Any] = {}


#: Whether Triton's interpreter runs the kernels, on tensors of any device.
INTERPRETED = not hasattr(kernels.rotate.rotate, "cache_key")


def rounds_by_bits() -> bool:
    """Return whether the current device, or the interpreter, cannot round to float8 as torch does.

    NVIDIA's GPUs can from sm_89 on. AMD's round to other formats, or by many instructions.
    """
    if INTERPRETED:
        return True
    import triton

    target = triton.runtime.driver.active.get_current_target()
    return not (target.backend == "cuda" and target.arch >= 89)


def signature_of(kernel: Any, values: Values) -> tuple[Any, ...]:
    """Return the Triton type of each parameter; for a group of runtime values, of each field."""
    return tuple(
        [
            "constexpr" if parameter.is_constexpr else _type_of(value)
            for parameter, value in zip(kernel.params, values, strict=True)
        ]
    )


def _type_of(value: Any) -> Any:
    """Return a pointer type, "i64", "fp32", "constexpr" for None, or a group of these."""
    if value is None:
        return "constexpr"
    if isinstance(value, tuple):
        return type(value)(*map(_type_of, value))
    if isinstance(value, torch.dtype):
        return _TYPES[value]
    return "fp32" if isinstance(value, float) else "i64"


def leaves_of(
    names: Sequence[str], types: Sequence[Any], values: Values, aligned: Aligned, group: str = ""
) -> Iterator[Any]:
    """Yield path, type, value and known divisor of each parameter, and of each field of each group."""
    for i, (name, kind, value) in enumerate(zip(names, types, values, strict=True)):
        if isinstance(kind, str):
            of = name if kind[0] == "*" else group if kind == "i64" and name != "channel" else ""
            yield (
                (i,),
                kind,
                value,
                ACCESS if kind[0] == "*" and aligned.get(of) else aligned.get(of),
            )
        else:
            for path, *leaf in leaves_of(value._fields, kind, value, aligned, name):
                yield (i, *path), *leaf


def source_of(kernel: Any, values: Values, aligned: Aligned) -> Any:
    """Return the source object for ``triton.compile``.

    Args:
        kernel: a function of :mod:`.kernels`.
        values: for each parameter the dtype of a tensor, a number, a group of :mod:`.groups`, or None.
        aligned: for tensors that begin at a multiple of 16 bytes, by name, any positive number; for groups of
            strides, by name, a number that divides all but that of the channels; or 0.
    """
    from triton.compiler import ASTSource

    types = signature_of(kernel, values)
    leaves = list(leaves_of(kernel.arg_names, types, values, aligned))
    constants = {path: value for path, kind, value, _ in leaves if kind == "constexpr"}
    attributes = {path: [["tt.divisibility", by]] for path, _, _, by in leaves if by}
    return ASTSource(kernel, dict(zip(kernel.arg_names, types)), constants, attributes)


def options_of(blocks: Blocks, target: Any) -> dict[str, Any]:
    """Return the compiler options; the compiler adds no fused multiply-adds to those of the kernel.

    Args:
        blocks: block sizes of the kernel, for warps of 32 lanes.
        target: Triton's target, whose warps may have 64 lanes.
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
    aligned: Aligned,
    blocks: Blocks,
    device: torch.device,
) -> Callable[..., None]:
    """Return a function that launches the kernel on the current stream, given its :func:`flat` arguments.

    Args:
        kernel, values, aligned: see :func:`source_of`.
        grid: numbers of programs in three dimensions.
        blocks: block sizes of a program.
        device: the device, which must be current when the launching function is called.
    """
    if INTERPRETED:
        interpret: Callable[..., None] = kernel[grid]
        return interpret
    types = signature_of(kernel, values)
    constants = tuple(v for v, t in zip(values, types) if t == "constexpr")
    key = (kernel.__name__, device, types, constants, frozenset(aligned.items()), blocks)
    found = compiled.get(key)
    if found is None:
        import triton

        target = triton.runtime.driver.active.get_current_target()
        source = source_of(kernel, values, aligned)
        found = triton.compile(source, target=target, options=options_of(blocks, target))
        # Otherwise Triton's launcher would unpack groups in every launch, at up to twice the cost.
        source.signature = dict(enumerate(_members(types)))
        compiled[key] = found
    return runner(found, grid, device)


def runner(found: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., None]:
    """Return a function that launches a compiled kernel on the current stream.

    In every launch Triton's own runner looks up the device, which is known here, and collects metadata
    for launch hooks. Without hooks, the returned function passes the same arguments at half the cost.
    With hooks, or if a version of Triton lacks an attribute used here, Triton's own runner is used.

    Args:
        found: the result of ``triton.compile``.
        grid, device: see :func:`launcher`.
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
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # A hook is None or, since Triton 3.5, a chain.
        if (enter is None or not getattr(enter, "calls", True)) and (
            leave is None or not getattr(leave, "calls", True)
        ):
            run(x, y, z, stream_of(index), function, packed, None, None, None, *arguments)
        else:
            observed(*arguments)

    return launch


def flat(values: Values) -> tuple[Any, ...]:
    """Unpack the groups of runtime values for a launch; the interpreter takes them as they are."""
    return tuple(values) if INTERPRETED else tuple(_members(values))


def _members(values: Values) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple) and not isinstance(value, CONSTANTS):
            yield from _members(value)
        else:
            yield value


def handle_of(x: torch.Tensor | None) -> Any:
    """Return a tensor's address, which is cheaper to pass than the tensor; the interpreter needs the tensor."""
    if x is None:
        return None
    at = address(x)
    return x if INTERPRETED else at
