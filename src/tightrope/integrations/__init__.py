"""Plugs for programs that load this library's rotation by themselves; see docs/plugs.md."""
