"""The conformance vectors: this library meets them, and the command and the example agree with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import oracle
from tests.support.command import python
from tests.support.helpers import ROOT, on
from tests.support.matrix import every_backend
from tests.support.stated import call
from tests.support.tolerances import assert_same_bits, dynamic_drift, value
from tightrope import RopeSpec, positions, stacks
from tightrope.frequencies import RULES, DynamicNTK
from tightrope.functional import apply_rotary_pos_emb, rotate

FOLDER = ROOT / "docs" / "conformance"
DESCRIBED: dict[str, Any] = json.loads((FOLDER / "vectors.json").read_text())
EXACT, STACKS = (load_file(FOLDER / f"{kind}.safetensors") for kind in ("exact", "stacks"))
KNOWN = {rule.names[0] for rule in RULES.values()}  # before tests define others
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def each(kind: str) -> Any:
    return pytest.mark.parametrize("case", DESCRIBED[kind], ids=lambda case: str(case["name"]))


def units_apart(got: torch.Tensor, wanted: torch.Tensor, spec: RopeSpec) -> float:
    """Return the largest difference, in units of the last place of the longer channel of a pair."""
    size = wanted.double().abs()
    first, second = oracle.channels(spec.rotary_dim, spec.start, spec.interleaved)
    size[:, first] = size[:, second] = torch.maximum(size[:, first], size[:, second])
    unit = torch.exp2(torch.floor(torch.log2(size + 1e-30))) * torch.finfo(got.dtype).eps
    return float(((got.double() - wanted.double()).abs() / unit).max())


def run(rotated: Any, vectors: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """The result and the gradient of a rotation of x."""
    x = vectors["x"].to(dtype).requires_grad_()
    y = rotated(x)
    return y.detach(), *torch.autograd.grad(y, x, vectors["grad_y"].to(dtype))


@every_backend
@each("exact")
def test_exact_rotations(case: dict[str, Any], backend: str) -> None:
    """Results and gradients are the correctly rounded ones or next to them, in every dtype."""
    spec, name = RopeSpec.from_dict(case["spec"]), case["name"]
    ids = EXACT[f"{name}/positions"]
    where = ids[0] if ids.shape[0] == 1 else positions.multi_axis(ids)
    how: dict[str, Any] = {"layout": "sd", "backend": backend, "seq_len": case["seq_len"]}
    how["inverse"] = case["inverse"]
    for kind, dtype in DTYPES.items():
        found = run(lambda x: call(rotate, x, spec, where, **how), EXACT, dtype)
        for got, key in zip(found, ("y", "grad_x"), strict=True):
            wanted = EXACT[f"{name}/{key}/{kind}"]
            assert wanted.dtype == dtype
            assert units_apart(got, wanted, spec) <= value("conformance")
            if dtype != torch.float32:
                assert float((got != wanted).double().mean()) <= value("conformance, differing")


@each("exact")
def test_frequencies_and_phase_words(case: dict[str, Any]) -> None:
    """Phase words have the expected bits, those of dynamic NTK within its bound; frequencies are the nearest float64 numbers."""
    spec, name = RopeSpec.from_dict(case["spec"]), case["name"]
    words, wanted = spec.words_for(case["seq_len"])[0][:, 0, 0], EXACT[f"{name}/phase_words"]
    rule = spec.scaling
    if isinstance(rule, DynamicNTK) and case["seq_len"] > rule.original_max_position:
        # The exception to exact angles, see docs/numerics.md: the vectors hold the exact words.
        drift = dynamic_drift(rule.factor, rule.original_max_position, case["seq_len"])
        off = (words - wanted).abs().double()
        assert bool((off <= drift * wanted.abs().double() + 1).all())
    else:
        assert_same_bits(words, wanted)
    found = spec.frequencies(case["seq_len"])
    assert_same_bits(found.inv_freq, EXACT[f"{name}/inv_freq"])
    assert found.attention_scaling == case["attention_scaling"]


@every_backend
@each("stacks")
def test_stacks(case: dict[str, Any], backend: str) -> None:
    """Given the stored tables, results and gradients have the expected bits.

    Frequencies and tables may differ in the last bit from those of another machine.
    """
    spec, name = RopeSpec.from_dict(case["spec"]), case["name"]
    stack = stacks.get(name.partition("/")[0])
    assert [*stack.rounding] == case["rounding"]
    assert (stack.source, stack.verified) == (case["source"], case["verified"])
    inv_freq, scaling = stack.frequencies(spec, case["seq_len"])
    stored = STACKS[f"{name}/inv_freq"]
    assert scaling == case["attention_scaling"]
    assert inv_freq.dtype == stored.dtype
    assert torch.allclose(inv_freq, stored, rtol=4 * torch.finfo(stored.dtype).eps, atol=0)
    how: dict[str, Any] = {
        "tables": "half",
        "interleaved": spec.interleaved,
        "rounding": stack.rounding,
    }
    for kind, dtype in DTYPES.items():
        kept = stack.table_dtype or dtype
        cos, sin = (STACKS[f"{name}/{which}"].to(kept) for which in ("cos", "sin"))

        def rotated(x: torch.Tensor, cos: Any = cos, sin: Any = sin) -> torch.Tensor:
            y, _ = on(backend, apply_rotary_pos_emb, x[None], None, cos, sin, 0, **how)
            return y[0]

        for got, key in zip(run(rotated, STACKS, dtype), ("y", "grad_x"), strict=True):
            wanted = STACKS[f"{name}/{key}/{kind}"]
            if stack.rounding == ("once", "once"):
                # Which product is fused with the sum is not pinned for another compiler.
                assert units_apart(got, wanted, spec) <= value("conformance")
            else:
                assert_same_bits(got, wanted)


def test_every_stack_and_every_rule_is_there() -> None:
    assert {case["name"].partition("/")[0] for case in DESCRIBED["stacks"]} == {*stacks.names()}
    rules = [case["spec"]["scaling"] or {"rule": "default"} for case in DESCRIBED["exact"]]
    assert {rule["rule"] for rule in rules} == {"default", *KNOWN}


def test_the_command_writes_the_same_vectors(tmp_path: Path) -> None:
    """Exact vectors are reproduced bit for bit; those of stacks up to the machine's cosines."""
    done = python(FOLDER / "generate.py", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    exact, again = (load_file(tmp_path / f"{kind}.safetensors") for kind in ("exact", "stacks"))
    assert exact.keys() == EXACT.keys()
    for name, found in exact.items():
        assert_same_bits(found, EXACT[name])
    assert json.loads((tmp_path / "vectors.json").read_text()) == DESCRIBED
    kinds = [{n: (t.shape, t.dtype) for n, t in found.items()} for found in (again, STACKS)]
    assert kinds[0] == kinds[1]


CHECKS = 7 * len(DESCRIBED["exact"]) + 6 * len(DESCRIBED["stacks"])
# A module of another implementation -> the exit code of check.py, and what it prints.
SINE = "u * cos - v * sin, v * cos +", "u * cos + v * sin, v * cos -"
CAST = "bits + 0x7FFF + (bits >> 16 & 1)", "bits"
IMPLEMENTATIONS: dict[str, tuple[Any, int, str]] = {
    "the example": (lambda text: text, 0, f"{CHECKS} of {CHECKS} checks passed."),
    "the opposite sines": (lambda text: text.replace(*SINE), 1, "FAIL"),
    "truncated bfloat16": (lambda text: text.replace(*CAST), 1, "FAIL"),
    "frequencies alone": (lambda _: "from rope import frequencies", 0, "checks passed."),
    "nothing": (lambda _: "", 1, ""),
}


@pytest.mark.parametrize("what", IMPLEMENTATIONS)
def test_check_finds_what_is_wrong_in_an_implementation(what: str, tmp_path: Path) -> None:
    make, code, said = IMPLEMENTATIONS[what]
    text = (FOLDER / "rope.py").read_text()
    assert SINE[0] in text
    assert CAST[0] in text
    (tmp_path / "theirs.py").write_text(make(text))
    done = python(FOLDER / "check.py", "theirs", cwd=tmp_path)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout[-2000:] + done.stderr
