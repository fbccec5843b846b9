"""Reads a run that still grows: each row once, a window of bounded size."""
