"""Benchmarks for developers, run from a clone: `python -m benchmarks` takes times."""
