"""The wheels of a release for Linux: `make wheels`, or `python -m ci.wheels --help`."""
