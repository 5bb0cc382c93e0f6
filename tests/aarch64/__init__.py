"""The CPU kernel on aarch64, under an emulator: `python tests/aarch64 --help`."""
