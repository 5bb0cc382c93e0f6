"""A program that is not installed is named by the error."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.support.helpers import Call
from tests.support.matrix import needs_kernel
from tightrope.integrations import comfyui, onnx, plugins, sglang, vllm
from tightrope.integrations.transformers import register

# The modules that cannot be imported, the call, and its error.
MISSING: dict[str, tuple[str, Call, str]] = {
    "vLLM": ("vllm", vllm.register, "[register] needs vLLM: pip install vllm"),
    "SGLang": ("sglang", sglang.register, "[register] needs SGLang: pip install sglang."),
    "comfy-kitchen": (
        "comfy_kitchen comfy_kitchen.registry",
        comfyui.register,
        "[register] needs comfy-kitchen, which ComfyUI installs.",
    ),
    "kernels": ("kernels", register, "[register] needs the kernels package: pip install kernels."),
    "Lightning": (
        "lightning lightning.pytorch",
        plugins.lightning_callback,
        "[lightning_callback] needs Lightning: pip install lightning.",
    ),
    "transformers": (
        "transformers",
        plugins.trainer_callback,
        "[trainer_callback] needs transformers: pip install transformers.",
    ),
    "onnxscript": (
        "onnxscript",
        lambda: onnx.export(torch.nn.Identity()),
        "[onnx.export] onnxscript must be installed, as by pip install 'tightrope[onnx]'.",
    ),
}


@needs_kernel
@pytest.mark.parametrize("name", MISSING)
def test_what_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, call, text = MISSING[name]
    for module in modules.split():
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises((ImportError, NotImplementedError)) as caught:
        call()
    assert text in str(caught.value)
