"""Whether a change leaves every result as it was, to the bit: `python -m benchmarks.same_bits --help`."""
