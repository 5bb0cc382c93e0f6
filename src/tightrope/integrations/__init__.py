"""Integrations with other libraries: one package each, which imports the library only when used."""
