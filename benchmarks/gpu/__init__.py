"""What the Triton kernels do on a GPU: `python -m benchmarks.gpu --help`."""
