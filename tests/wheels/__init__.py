"""The wheels of a release for Linux: `make wheels`, or `python tests/wheels --help`."""
