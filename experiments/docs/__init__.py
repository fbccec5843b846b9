"""Draws the figures of the documentation."""
