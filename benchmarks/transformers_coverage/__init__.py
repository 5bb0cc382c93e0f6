"""Coverage of transformers by `patch`: `python -m benchmarks.transformers_coverage --help`."""
