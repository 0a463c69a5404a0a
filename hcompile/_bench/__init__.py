"""Measurements behind the `hcompile` command; nothing here is imported by the library."""
