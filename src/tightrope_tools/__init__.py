"""The computations behind the commands, for use from Python; they print nothing."""
