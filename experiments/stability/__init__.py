"""Structural stability of large synchronised jobs: growth, survival, knee, projection."""
