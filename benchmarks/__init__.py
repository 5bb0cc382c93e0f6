"""Benchmarks for developers; `tightrope bench` itself is in `tightrope.workbench`."""
