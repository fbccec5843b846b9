"""Synthetic runs whose truth is known, for tests and experiments."""
