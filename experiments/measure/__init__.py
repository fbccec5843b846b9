"""Measurements of the package itself, one program a question."""
