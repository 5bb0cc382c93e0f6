"""Test `register` with the real kernels package: `use_kernels` and `kernelize`, without a network.

A test that needs the package runs in a new process, because transformers looks for the package only
during its own import.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
from transformers.utils import import_utils

from tests.support.command import python
from tests.support.helpers import ROOT
from tightrope.integrations.transformers import register

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="the kernels package is not installed"
)

# transformers 5.23 requires kernels 0.18, but the newest release is 0.17. The layers, mapping and
# kernelize of 0.17 are the same, so the tests lower the required version.
START = """
import torch
from transformers.utils import import_utils
check = import_utils.is_kernels_available.__wrapped__
check.__defaults__ = ("0.17.0", check.__defaults__[1])
assert import_utils.is_kernels_available()
from kernels import Mode, kernelize, use_kernel_forward_from_hub, use_kernelized_func, use_kernel_mapping
from tests.support.models.of_transformers import gradients, outputs, small_inputs, small_model
from tests.support.models.of_transformers import assert_equal_runs
from tightrope import patch, unpatch
from tightrope.integrations.transformers import mapping, register
from transformers.models.llama import modeling_llama as llama

def runs_operator(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return any(event.key == "tightrope::rotate" for event in profile.key_averages())
"""


def run(code: str) -> None:
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", ".", "examples"))
    done = python("-c", START + code, cwd=ROOT, PYTHONPATH=paths, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-3000:]


# `use_kernels` in training and inference.
SERVED = """
model, given = small_model("Llama"), small_inputs()
before = gradients(model, given)
assert not runs_operator(lambda: outputs(model, given))
register()
for training in (True, False):
    model.train(training)
    model.set_use_kernels(True)
    assert type(llama.apply_rotary_pos_emb).__name__ == "Func"
    assert_equal_runs(gradients(model, given), before)
    assert runs_operator(lambda: outputs(model, given))
    model.set_use_kernels(False)
    del llama.apply_rotary_pos_emb.__dict__["forward"]
"""

# A compiled model.
COMPILED = """
from tightrope.integrations.transformers import _kernels
_kernels._served.clear()
model, given = small_model("Llama"), small_inputs()
before = gradients(model, given)
for mode in (Mode.TRAINING, Mode.INFERENCE):
    with use_kernel_mapping(mapping()):
        kernelize(model, mode=mode | Mode.TORCH_COMPILE, device="cpu")
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    if mode == Mode.TRAINING:
        after, grads = gradients(compiled, given)
        named = {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}
        assert_equal_runs((after, named), before)
    else:
        with torch.no_grad():
            assert torch.equal(outputs(compiled, given), before[0])
    assert "tightrope" in graphs[0].print_readable(print_output=False)
    _kernels._served.clear()
    del llama.apply_rotary_pos_emb.__dict__["forward"]
"""

# A function that is unknown runs unchanged.
STRANGE = """
@use_kernel_forward_from_hub("rotary_pos_emb")
def strange(q, k, cos, sin, unsqueeze_dim=1):
    return q * cos.unsqueeze(unsqueeze_dim) * 2, k

@use_kernelized_func(strange)
class Attention(torch.nn.Module):
    pass

q, table = torch.randn(2, 3, 5, 16), torch.rand(2, 5, 16)
wanted = strange(q, q, table, table)[0]
with use_kernel_mapping(mapping()):
    kernelize(Attention(), mode=Mode.TRAINING, device="cpu", use_fallback=False)
call = lambda: strange(q, q, table, table)[0]
assert torch.equal(call(), wanted) and not runs_operator(call)
"""

# The example trains two steps and says how many calls were served.
EXAMPLE = """
import contextlib, io
import plugs
with contextlib.redirect_stdout(io.StringIO()) as said:
    plugs.main(["slot"])
assert "served 8 of 8 rotations, forward and backward" in said.getvalue(), said.getvalue()
"""

# `patch` finds functions in the slot.
PATCHED = """
import copy
model, given = small_model("Llama"), small_inputs()
before = outputs(model, given)
report = patch(model)
assert [entry.name for entry in report.replaced] == ["apply_rotary_pos_emb"], str(report)
assert report.replaced[0].module == llama.__name__
assert runs_operator(lambda: outputs(model, given))
assert torch.equal(outputs(copy.deepcopy(model), given), before)
unpatch(model)
assert torch.equal(outputs(model, given), before)
assert type(llama.apply_rotary_pos_emb).__name__ == "Func"
assert torch.equal(outputs(model, given), before)
"""


@needs_kernels
@pytest.mark.slow
def test_models_and_functions_in_a_process_with_the_package() -> None:
    run(SERVED + COMPILED + STRANGE + PATCHED)


@needs_kernels
def test_the_example_trains_by_the_package() -> None:
    run(EXAMPLE)


@needs_kernels
def test_versions_that_do_not_go_together_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would take them as absent, and `use_kernels` would raise later."""
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    monkeypatch.setattr(import_utils, "KERNELS_MIN_VERSION", "7.0", raising=False)
    monkeypatch.setattr(import_utils, "KERNELS_MAX_VERSION", "7.1", raising=False)
    needs = r"\[register\] needs a version of kernels that transformers \S+ takes, from 7.0 to below 7.1, but \S+ is"
    with pytest.raises(ImportError, match=needs):
        register()
