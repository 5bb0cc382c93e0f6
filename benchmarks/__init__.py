"""Benchmarks for developers, run from a clone; `benchmarks.speed` times rotations on a CPU."""
