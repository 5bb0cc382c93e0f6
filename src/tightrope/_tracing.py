"""Conditions under which Python code may read the values of a tensor, or cache a new tensor."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")

# A value in a form that Dynamo can pass to a function whose result it treats as a constant, which takes
# strings and tuples, but before torch 2.12 no frozen dataclass: the number of its class and its pickle in
# hexadecimal digits, or, for a value that was made inside the compiled function, its class and fields. None
# stands for itself.
Constant: TypeAlias = "T | str | tuple[type[T], tuple[Any, ...]]"

#: How exported code rotates, in place of the definition's own arithmetic; the last one counts. None stands
#: for that arithmetic. Set by the blocks of :mod:`tightrope.integrations.onnx`.
lowerings: list[Any] = []


# The dispatch modes under which tensors have no data of their own: fake tensors, proxies and
# functionalization.
_TRACING_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # of make_fx(pre_dispatch=True)
_has_key = torch._C._dispatch_tls_is_dispatch_key_included
_count_modes = torch._C._len_torch_dispatch_stack
_interpreter = torch._C._functorch.peek_interpreter_stack  # of functorch
_UNCHANGED = nullcontext()


def is_tracing() -> bool:
    """Return True if tensors may be stand-ins: under torch.compile, fake tensors, proxies,
    functionalization or a functorch transform.

    Dispatch modes that only watch real tensors (FLOP counters, selective activation checkpointing,
    memory trackers) are not tracing.
    """
    return (
        torch.compiler.is_compiling()
        or (_count_modes() > 0 and _has_tracing_mode())
        or _interpreter() is not None
        or _has_key(_PRE_DISPATCH)
    )


def _has_tracing_mode() -> bool:
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING_MODES)


def is_repeated() -> bool:
    """Return True under selective activation checkpointing.

    It saves the results of some operators, and does not run these again when it repeats a forward pass in
    the backward pass.
    """
    if torch.compiler.is_compiling() or _count_modes() == 0:
        return False
    modes = map(torch._C._get_dispatch_stack_at, range(_count_modes()))
    # By name: the classes are private, and other libraries derive theirs from them.
    return any(base.__name__ in _REPEATING for mode in modes for base in type(mode).__mro__)


_REPEATING = {"_CachingTorchDispatchMode", "_CachedTorchDispatchMode"}


def outside_modes() -> AbstractContextManager[object]:
    """Return a context outside of inference mode in which dispatch modes see nothing.

    While tracing it changes nothing. Use it for all work whose result is cached, on tensors that do not
    handle operators themselves. Autograd can then save the result, and a dispatch mode sees the same
    operators whether or not there is one in the cache: selective activation checkpointing counts them.
    """
    if torch.compiler.is_compiling():
        return _UNCHANGED
    watched = _count_modes() > 0
    if not (watched or torch.is_inference_mode_enabled()) or is_tracing():
        return _UNCHANGED
    return _unseen() if watched else torch.inference_mode(False)


@contextmanager
def _unseen() -> Iterator[None]:
    # The modes stay on their stack: without one, Dynamo would compile the code inside.
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        yield


def needs_plain() -> bool:
    """Return True while code is exported for a runtime that lacks the operators, such as ONNX Runtime.

    The compiler treats the result as a constant, False.
    """
    if torch.compiler.is_dynamo_compiling() or not torch.compiler.is_exporting():
        return False
    return bool(lowerings) or torch.onnx.is_in_onnx_export()


def as_constant(value: T) -> Constant[T]:
    """Return a value as a constant, or the value itself if it cannot be pickled; not while compiling."""
    if value is None:
        return value
    try:
        data = pickle.dumps(value).hex()
    except (pickle.PicklingError, AttributeError, TypeError):
        return value  # its class was made in a function
    kind = type(value)
    if kind not in _kinds:
        _kinds.append(kind)
    return f"{_kinds.index(kind)} {data}"


# The classes of constants. A class may be defined again under its name, in a notebook for example.
_kinds: list[type] = []


class _Reader(pickle.Unpickler):
    """Unpickle a value of a class, whatever its name stands for by now."""

    def __init__(self, kind: type, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kind = kind

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (self._kind.__module__, self._kind.__qualname__):
            return self._kind
        return super().find_class(module, name)


def value_of(constant: Constant[T]) -> T:
    """Return the value of a constant.

    >>> value_of(as_constant(1 + 2j)), value_of((complex, (1, 2)))
    ((1+2j), (1+2j))
    """
    if isinstance(constant, str):
        kind, data = constant.split()  # from as_constant
        value: T = _Reader(_kinds[int(kind)], bytes.fromhex(data)).load()
        return value
    if isinstance(constant, tuple):
        made_of, fields = constant
        return made_of(*fields)
    return constant


def exact_factor(number: float, x: torch.Tensor) -> float | torch.Tensor:
    """Return a number as a factor of x that keeps its digits.

    torch's export to ONNX rounds Python numbers to float32 also in float64 graphs, but no tensors.
    """
    if x.dtype == torch.float64 and needs_plain():
        return torch.tensor(number, dtype=torch.float64, device=x.device)
    return number


def is_transformed() -> bool:
    """Return True if a functorch transform (grad, vmap, ...) is active."""
    # While compiling, `top` is never None, so `is not None` would always hold.
    top = torch._C._functorch.peek_interpreter_stack()
    return isinstance(top, torch._C._functorch.CInterpreter)


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context outside of all functorch transforms, which Dynamo enters while it traces them."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def have_tangents(tensors: Iterable[torch.Tensor], transformed: bool) -> bool:
    """Return True if tensors may have forward-mode tangents; a registered operator would ignore them.

    The forward-mode level is global to all threads, so outside transforms each tensor is inspected.
    """
    if forward_ad._current_level < 0:
        return False
    return transformed or any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def broadcasts(own: int, size: int) -> bool:
    """Return True if a dimension is 1 or ``size``.

    The two comparisons are written out: in ``own in (1, size)`` Dynamo does not recognise that a
    size equals a symbolic size of the same value.

    >>> broadcasts(1, 8), broadcasts(8, 8), broadcasts(4, 8)
    (True, True, False)
    """
    return own == 1 or own == size


def handles_operators(x: torch.Tensor) -> bool:
    """Return True for tensors that handle operators themselves, such as fake tensors and DTensors."""
    return type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_readable(values: torch.Tensor) -> bool:
    """Return True if reading the values needs no device synchronisation and breaks no graph."""
    return values.device.type == "cpu" and not is_tracing() and not handles_operators(values)


def may_keep(device: torch.device) -> bool:
    """Return True if a tensor made now may be cached: not while tracing or capturing a CUDA graph."""
    if is_tracing():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


@contextmanager
def undisturbed(device: str = "cpu") -> Iterator[None]:
    """Run code that is not ours: on one type of device, in float32, without modes and warnings; random numbers stay.

    Inside ``from_pretrained`` of transformers the default dtype is that of the model, and the device may be meta.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.autocast(device, enabled=False),
            torch.device(device),
            _disable_current_modes(),  # such as FakeTensorMode, in which a model may be loaded
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(default)
