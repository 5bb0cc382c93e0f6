"""The stub of NVIDIA's driver, driver_stub.c, in the place of libcuda: Triton's own launcher calls it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


LOAD = ctypes.CFUNCTYPE(ctypes.c_int)
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Config),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


class Driver:
    """The stub of the driver, and the current device and streams that torch reports.

    Attributes:
        streams: the current stream of each device; for torch 0 is the default one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.streams = {0: 0, 1: 0x7F12_3456_7890, 2: 2}
        self._callbacks = (
            LOAD(lambda: self.load()),
            LAUNCH(lambda config, *rest: self.launch(config.contents, *rest[:2], rest[2] - 1)),
        )
        self.library = _library(folder)
        self.library.observe(*self._callbacks)
        self.library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
        self.use(0)

    def load(self) -> int:
        """Answer the load of a module with an error, or 0."""
        return 0

    def launch(self, config: Any, function: int, parameters: Any, device: int) -> int:
        """Answer a launch with an error, or 0."""
        raise NotImplementedError

    def use(self, device: int) -> None:
        """Make a device current, as torch does."""
        self.library.cuCtxSetCurrent(device + 1)

    def current(self) -> int:
        """Return the current device."""
        context = ctypes.c_void_p()
        self.library.cuCtxGetCurrent(ctypes.byref(context))
        return (context.value or 0) - 1

    def looked_up(self) -> int:
        """Return the current device to Triton."""
        return self.current()

    @contextlib.contextmanager
    def using(self, device: int) -> Iterator[None]:
        """Stand in for ``torch.accelerator.device_index``."""
        before = self.current()
        self.use(device)
        try:
            yield
        finally:
            self.use(before)

    def pretend(self, capability: tuple[int, int]) -> None:
        """Let torch tell Triton that there are GPUs, and let Triton choose its driver for them."""
        torch.accelerator.current_device_index = self.current
        torch.accelerator.device_index = self.using
        torch.cuda.is_available = lambda: True
        torch.cuda.current_device = self.looked_up
        torch.cuda.get_device_capability = lambda *_: capability
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
        torch._C._cuda_getCurrentRawStream = self.streams.__getitem__
        os.environ["TRITON_LIBCUDA_PATH"] = str(self.folder)
        with triton.knobs.cache.scope():
            # What is linked with the stub is kept apart from the user's cache.
            triton.knobs.cache.dir = str(self.folder)
            triton.runtime.driver.active.utils  # noqa: B018


def _library(folder: Path) -> ctypes.CDLL:
    """Compile the stub and load it; Triton's launcher then finds it by its name."""
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    made = folder / "libcuda.so.1"
    source = Path(__file__).with_name("driver_stub.c")
    options = ("-shared", "-fPIC", "-w", f"-Wl,-soname,{made.name}", f"-I{include}")
    compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
    subprocess.run([compiler, *options, str(source), "-o", str(made)], check=True)
    (folder / "libcuda.so").symlink_to(made)  # for the linker, before Triton 3.6
    ctypes.CDLL(str(made))
    return ctypes.CDLL(made.name)  # the stub, unless another driver was loaded before
