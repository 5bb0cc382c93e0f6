"""The computations of `tightrope demo`: training side by side, timings, and one picture.

The model and its training are `examples/train_bytes.py`; rotations are timed by
:mod:`benchmarks.speed`.
"""

from __future__ import annotations

from . import polar as polar, race as race, rotations as rotations
from .results import Results as Results
from .sample import Sample as Sample, write_sample as write_sample
