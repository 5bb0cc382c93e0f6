"""Checks and benchmarks of the Triton kernels on a GPU: `python -m benchmarks.gpu --help`."""
