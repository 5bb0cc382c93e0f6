"""The C++ backend: fused loops for each instruction set, parallel on torch's own thread pool.

This module finds and loads the native library, whose kernels register themselves for CPU tensors.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from pathlib import Path

import torch

__all__ = ["instruction_set", "instruction_sets", "library_path", "use_instruction_set"]

#: Device types that this backend serves.
DEVICES = ("cpu",)

_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
_PATH = Path(__file__).parents[1] / f"_native{_SUFFIX}"

_HOW = (
    "install a ready-made wheel, or build one on a machine with torch and a C++ compiler: "
    "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps tightrope"
)

_library: ctypes.CDLL | None = None
_missing: str | None = "the native library is not loaded yet"


def register() -> None:
    """Load the library unless it is switched off; warn if it is missing or does not load."""
    global _library, _missing
    if os.environ.get("TIGHTROPE_NATIVE") == "0":
        _missing = "the native library is switched off by TIGHTROPE_NATIVE=0"
        return
    if not _PATH.exists():
        _missing = f"the native library is not built; {_HOW}"
    else:
        # It tells csrc/bind_compiled.cpp that the operators are defined.
        os.environ["TIGHTROPE_DEFINED"] = "1"
        try:
            torch.ops.load_library(str(_PATH))
        except OSError as error:
            _missing = f"the native library does not load ({error}); {_HOW}"
        else:
            _library = _open()
            if sets := instruction_sets():
                _missing = None
                _check_choice(sets)
                return
            _missing = "the kernel needs a processor with AVX2, FMA and F16C, or with NEON"
        finally:
            del os.environ["TIGHTROPE_DEFINED"]
    warnings.warn(f"tightrope runs on plain torch, which is slower: {_missing}", stacklevel=2)


def why_not(x: torch.Tensor | None = None) -> str | None:
    """Return the reason why this backend cannot run, or None if it can.

    Args:
        x: the tensor to rotate; None to check only whether the backend can run at all.
    """
    if _missing is not None:
        return _missing
    if x is not None and x.device.type != "cpu":
        return f"the tensor is on {x.device}"
    return None


def is_ready() -> bool:
    """Return whether the kernels are registered."""
    return _missing is None


def library_path() -> Path | None:
    """Return the path of the native library, for programs without Python; None if it is not built.

    >>> path = library_path()
    """
    return _PATH if _PATH.exists() else None


def instruction_set() -> str | None:
    """Return the instruction set in use, such as "avx2" or "neon"; None without the library."""
    if _library is None:
        return None
    name: bytes | None = _library.tightrope_instruction_set()
    return None if name is None else name.decode()


def instruction_sets() -> list[str]:
    """Return the supported instruction sets, best first; an empty list without the library."""
    names: list[str] = []
    while _library is not None and (name := _library.tightrope_supported_set(len(names))):
        names.append(name.decode())
    return names


def use_instruction_set(name: str) -> None:
    """Use another instruction set for the rest of the process, to compare or to debug.

    The environment variable TIGHTROPE_CPU_ISA selects one at start-up.

    Raises:
        ValueError: this processor does not support the set, or the native library is not loaded.
    """
    if _library is None or _missing is not None:
        raise ValueError(f"[use_instruction_set] the native library must be loaded but {_missing}.")
    if not _library.tightrope_use(name.encode()):
        raise ValueError(
            f"[use_instruction_set] name must be one of {', '.join(instruction_sets())} on this "
            f"processor but got {name!r}."
        )


def _open() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_PATH))
    library.tightrope_instruction_set.restype = ctypes.c_char_p
    library.tightrope_supported_set.restype = ctypes.c_char_p
    library.tightrope_supported_set.argtypes = [ctypes.c_int]
    library.tightrope_use.restype = ctypes.c_bool
    library.tightrope_use.argtypes = [ctypes.c_char_p]
    return library


def _check_choice(sets: list[str]) -> None:
    if instruction_set() is None:
        raise ImportError(
            f"[tightrope] TIGHTROPE_CPU_ISA must be one of {', '.join(sets)} on this processor but "
            f"got {os.environ.get('TIGHTROPE_CPU_ISA')!r}."
        )
