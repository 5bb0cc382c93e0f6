"""Phases from data: angles that are given for every token, or that accumulate over tokens.

A phase is an angle modulo one turn, held as an integer: a *phase word*, in units of 2^-64 turn, as in
:mod:`tightrope.angles`. Each increment becomes a phase word by itself, and integers add up exactly. So
the phase of a token has the same bits in a prefill, in chunks and token by token, and is as accurate
after a million tokens as after one.

Sources: Mamba-3 (arXiv 2603.15569), whose state rotates by increments that the data determine;
Selective RoPE (arXiv 2511.17388), the same for queries and keys.
"""

from __future__ import annotations

from ._phases import (
    Phases as Phases,
    PhaseState as PhaseState,
    given as given,
    running as running,
)

__all__ = ["PhaseState", "Phases", "given", "running"]
