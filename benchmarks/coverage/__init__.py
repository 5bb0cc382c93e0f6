"""Coverage of a library by `patch`: `python -m benchmarks.coverage --help`."""
