"""Measure how much of transformers is served: `python -m benchmarks.transformers_coverage --help`."""
