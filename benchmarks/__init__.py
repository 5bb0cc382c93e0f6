"""Benchmarks of the rotation. `python -m benchmarks.rotate --help` states the method and runs them."""
