"""Rings of marks as flight recorders: where each rank is, which collective is not finished, and who
keeps it."""
