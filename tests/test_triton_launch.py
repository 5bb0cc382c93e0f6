"""The launch of a compiled kernel, without a GPU."""

from __future__ import annotations

import pytest
import torch

from triton_cases import needs_triton


@needs_triton
def test_a_launch_passes_the_same_arguments_as_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hooks, a launch is made directly; with hooks, by Triton's own runner."""
    import triton
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from tightrope.backends.triton import launch

    class Driver:
        get_current_device = staticmethod(lambda: 3)
        get_current_stream = staticmethod(lambda index: f"stream of {index}")

    calls = []

    class Found(CompiledKernel):
        run = staticmethod(lambda *arguments: calls.append(arguments))  # type: ignore[assignment]
        function, packed_metadata, module = "function", "packed", None

        def __init__(self) -> None:
            pass

        def __del__(self) -> None:
            pass

        def _init_handles(self) -> None:
            pass

        def launch_metadata(self, *_: object) -> str:
            return "metadata"

    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", Driver())
    found, grid, device = Found(), (5, 2, 1), torch.device("cuda", 3)
    found[grid](1, None, 2.5)
    launch.runner(found, grid, device)(1, None, 2.5)
    usual, short = calls
    at = usual.index("metadata")
    assert usual[:at] == short[:at] == (5, 2, 1, "stream of 3", "function", "packed")
    assert usual[-3:] == short[-3:] == (1, None, 2.5)
    assert len(usual) == len(short)
    assert short[at:-3] == (None, None, None)
    hook = triton.knobs.runtime.launch_enter_hook
    if hook is not None:
        hook.add(print)
        launch.runner(found, grid, device)(1, None, 2.5)
        hook.remove(print)
        assert calls.pop()[at] == "metadata"
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    launch.runner(found, grid, device)(1, None, 2.5)
    assert calls.pop()[at] == "metadata"
