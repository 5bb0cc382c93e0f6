"""The computations behind the commands, for use from Python: one package per command, without output."""
