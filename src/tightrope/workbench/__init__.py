"""What the commands compute, for programs: one package per command, none of which prints."""
