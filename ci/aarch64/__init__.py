"""The CPU kernel on aarch64, under an emulator: `python -m ci.aarch64 --help`."""
