"""The conformance vectors: this library meets them, and the command and the example agree with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import oracle
from tests.support.command import python
from tests.support.helpers import ROOT
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_same_bits, dynamic_drift, value
from tightrope import RopeSpec, positions, stacks
from tightrope.frequencies import RULES, DynamicNTK
from tightrope.functional import apply_rotary_pos_emb, rotate

FOLDER = ROOT / "conformance"
DESCRIBED: dict[str, Any] = json.loads((FOLDER / "vectors.json").read_text())
EXACT, STACKS = (load_file(FOLDER / f"{kind}.safetensors") for kind in ("exact", "stacks"))
KNOWN = {rule.names[0] for rule in RULES.values()}  # before tests define others
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def name_of(case: dict[str, Any]) -> str:
    return str(case["name"])


def units_apart(got: torch.Tensor, wanted: torch.Tensor, spec: RopeSpec) -> float:
    """Return the largest difference, in units of the last place of the longer channel of a pair."""
    size = wanted.double().abs()
    first, second = oracle.channels(spec.rotary_dim, spec.start, spec.interleaved)
    size[:, first] = torch.maximum(size[:, first], size[:, second])
    size[:, second] = size[:, first]
    step = torch.finfo(got.dtype).eps
    unit = torch.exp2(torch.floor(torch.log2(size + 1e-30))) * step
    return float(((got.double() - wanted.double()).abs() / unit).max())


@every_backend
@pytest.mark.parametrize("case", DESCRIBED["exact"], ids=name_of)
def test_exact_rotations(case: dict[str, Any], backend: str) -> None:
    """Results and gradients are the correctly rounded ones or next to them, in every dtype."""
    spec, name = RopeSpec.from_dict(case["spec"]), case["name"]
    ids = EXACT[f"{name}/positions"]
    where = ids[0] if ids.shape[0] == 1 else positions.multi_axis(ids)
    for kind, dtype in DTYPES.items():
        x = EXACT["x"].to(dtype).requires_grad_()
        y = rotate(
            x,
            spec,
            where,
            layout="sd",
            seq_len=case["seq_len"],
            inverse=case["inverse"],
            backend=backend,
        )
        (by_x,) = torch.autograd.grad(y, x, EXACT["grad_y"].to(dtype))
        for got, key in ((y.detach(), "y"), (by_x, "grad_x")):
            wanted = EXACT[f"{name}/{key}/{kind}"]
            assert wanted.dtype == dtype
            assert units_apart(got, wanted, spec) <= value("conformance")
            if dtype != torch.float32:
                assert float((got != wanted).double().mean()) <= value("conformance, differing")


@pytest.mark.parametrize("case", DESCRIBED["exact"], ids=name_of)
def test_frequencies_and_phase_words(case: dict[str, Any]) -> None:
    """Phase words have the expected bits (dynamic NTK's are within its bound), and frequencies are the nearest float64 numbers."""
    spec, name = RopeSpec.from_dict(case["spec"]), case["name"]
    words, _ = spec.words_for(case["seq_len"])
    exact = EXACT[f"{name}/phase_words"]
    if (
        isinstance(rule := spec.scaling, DynamicNTK)
        and case["seq_len"] > rule.original_max_position
    ):
        # The exception to exact angles, see docs/numerics.md: the vectors hold the exact words.
        drift = dynamic_drift(rule.factor, rule.original_max_position, case["seq_len"])
        off = (words[:, 0, 0] - exact).abs().double()
        assert bool((off <= drift * exact.abs().double() + 1).all())
    else:
        assert_same_bits(words[:, 0, 0], exact)
    found = spec.frequencies(case["seq_len"])
    assert_same_bits(found.inv_freq, EXACT[f"{name}/inv_freq"])
    assert found.attention_scaling == case["attention_scaling"]


@every_backend
@pytest.mark.parametrize("case", DESCRIBED["stacks"], ids=name_of)
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
    cos, sin = STACKS[f"{name}/cos"], STACKS[f"{name}/sin"]
    for kind, dtype in DTYPES.items():
        kept = stack.table_dtype or dtype
        x = STACKS["x"].to(dtype)[None].requires_grad_()
        y, _ = apply_rotary_pos_emb(
            x,
            None,
            cos.to(kept),
            sin.to(kept),
            0,
            tables="half",
            interleaved=spec.interleaved,
            rounding=stack.rounding,
            backend=backend,
        )
        (by_x,) = torch.autograd.grad(y, x, STACKS["grad_y"].to(dtype)[None])
        for got, key in ((y.detach()[0], "y"), (by_x[0], "grad_x")):
            wanted = STACKS[f"{name}/{key}/{kind}"]
            if stack.rounding == ("once", "once"):
                # Which product is fused with the sum is not pinned for another compiler.
                assert units_apart(got, wanted, spec) <= value("conformance")
            else:
                assert_same_bits(got, wanted)


def test_every_stack_and_every_rule_is_there() -> None:
    seen = {case["name"].partition("/")[0] for case in DESCRIBED["stacks"]}
    assert seen == set(stacks.names())
    rules = {
        (case["spec"]["scaling"] or {"rule": "default"})["rule"] for case in DESCRIBED["exact"]
    }
    assert rules == {"default", *KNOWN}
    assert sum(file.stat().st_size for file in FOLDER.iterdir() if file.is_file()) < 4_000_000


def test_the_command_writes_the_same_exact_vectors(tmp_path: Path) -> None:
    """Exact vectors are reproduced bit for bit; those of stacks up to the machine's cosines."""
    from conformance import generate as conformance

    conformance.write(tmp_path)
    exact = load_file(tmp_path / "exact.safetensors")
    assert exact.keys() == EXACT.keys()
    for name, found in exact.items():
        assert_same_bits(found, EXACT[name])
    assert json.loads((tmp_path / "vectors.json").read_text()) == DESCRIBED
    again = load_file(tmp_path / "stacks.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in again.items()} == {
        name: (t.shape, t.dtype) for name, t in STACKS.items()
    }


def test_exact_vectors_agree_with_the_oracle() -> None:
    """The oracle, which shares no code with the command, rounds to the same numbers."""
    for case in DESCRIBED["exact"]:
        if case["spec"]["scaling"] is not None or case["spec"]["axes"] is not None:
            continue
        spec, name = RopeSpec.from_dict(case["spec"]), case["name"]
        exact = oracle.rotate(
            EXACT["x"],
            EXACT[f"{name}/positions"][0],
            oracle.frequencies(spec.base, spec.rotary_dim),
            layout="sd",
            start=spec.start,
            interleaved=spec.interleaved,
            inverse=case["inverse"],
        )
        for kind, dtype in DTYPES.items():
            assert_same_bits(oracle.rounded(exact, dtype), EXACT[f"{name}/y/{kind}"])


# --- check.py -------------------------------------------------------------------------------


def run(*arguments: str, cwd: Path | None = None) -> CompletedProcess[str]:
    return python(FOLDER / "check.py", *arguments, cwd=cwd)


def test_check_passes_for_the_example() -> None:
    done = run()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    passed, total = done.stdout.splitlines()[-1].split(" checks")[0].split(" of ")
    assert passed == total
    assert int(total) == 7 * len(DESCRIBED["exact"]) + 6 * len(DESCRIBED["stacks"])


def test_check_needs_numpy_alone() -> None:
    for name in ("check.py", "rope.py"):
        lines = (FOLDER / name).read_text().splitlines()
        assert len(lines) < 150
        imported = {
            line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))
        }
        assert imported <= {*sys.stdlib_module_names, "numpy", "rope"}


FAULTS = {
    "angles in float32": (
        "angle = turns",
        "angle = positions[0][:, None].astype(np.float32) * turns",
    ),
    "sine negated": ("u * cos - v * sin, v * cos +", "u * cos + v * sin, v * cos -"),
    "rounded per product": ('if rounding == "each"', 'if rounding == "wide"'),
    "blend of YaRN reversed": (
        "plain * (1 - slowed) + plain / factor * slowed",
        "plain * slowed + plain / factor * (1 - slowed)",
    ),
    "truncated bfloat16": ("bits + 0x7FFF + (bits >> 16 & 1)", "bits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_planted_faults(fault: str, tmp_path: Path) -> None:
    right, wrong = FAULTS[fault]
    text = (FOLDER / "rope.py").read_text()
    assert right in text
    (tmp_path / "planted.py").write_text(text.replace(right, wrong))
    done = run("planted", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAIL" in done.stdout


def test_functions_that_are_missing_are_not_checked(tmp_path: Path) -> None:
    (tmp_path / "partial.py").write_text("from rope import frequencies")
    done = run("partial", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.endswith(
        f"{len(DESCRIBED['exact'])} of {len(DESCRIBED['exact'])} checks passed.\n"
    )
    (tmp_path / "empty.py").write_text("")
    assert run("empty", cwd=tmp_path).returncode == 1
