"""Bitwise comparison of results before and after a change: `python -m ci.same_bits --help`."""
