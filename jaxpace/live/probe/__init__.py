"""Measures the links between a job's hosts, on request and between steps, and says which host or
link is slow."""
