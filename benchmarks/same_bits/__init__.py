"""Bitwise comparison of results before and after a change: `python -m benchmarks.same_bits --help`."""
