"""Test what the tools do with frequencies that depend on the weights of a model."""

from pathlib import Path

import pytest
import torch

from tests.support.command import call
from tests.support.learned import large
from tightrope import RopeSpec
from tightrope_tools.audit import audit
from tightrope_tools.command import main
from tightrope_tools.convert import Stated
from tightrope_tools.convert.files import open_checkpoint
from tightrope_tools.convert.model import read_model
from tightrope_tools.inspect import inspect


def test_inspect_and_audit_read_the_values_of_a_model(tmp_path: Path) -> None:
    model = large()
    spec = RopeSpec.from_config(model, layer_type="rope")
    assert inspect(model).parts[0].spec == spec
    assert audit(model).ok
    for config in (model.config, model.config.to_dict()):
        with pytest.raises(ValueError, match="only its weights hold"):
            inspect(config)
        given = inspect(config, inv_freq=spec.frequencies().inv_freq)
        assert torch.equal(given.parts[0].spec.frequencies().inv_freq, spec.frequencies().inv_freq)
    model.save_pretrained(tmp_path)
    assert read_model(open_checkpoint(tmp_path), Stated(naming="mistral")).interleaved


def test_the_command_names_the_call_for_a_model(tmp_path: Path) -> None:
    large().config.save_pretrained(tmp_path)
    code, _, error = call(main, "inspect", tmp_path)
    assert code == 2
    assert "load the model and call tightrope_tools.inspect.inspect(model)." in error
