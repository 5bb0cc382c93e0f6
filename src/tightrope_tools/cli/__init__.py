"""The commands of `tightrope`: options, output and exit codes. What they compute is beside this folder."""
