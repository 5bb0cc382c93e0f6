"""The CPU kernel has the same bits on aarch64, under an emulator: see ci/aarch64."""

from __future__ import annotations

import pytest

from ci.aarch64 import bits, emulator

REASON = emulator.missing() or (
    None if emulator.prepared() else "needs downloads: run `python -m ci.aarch64` once"
)


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"aarch64 {REASON}")
def test_aarch64_has_the_bits_of_avx2() -> None:
    emulator.prepare()
    families = bits.compare(*emulator.bits())
    assert len(families) == 12
    for name, family in families.items():
        assert family.cases > 10
        assert family.agrees(), f"{name}: {family}"
