"""Collectives' entries and exits of steps that nothing can be put into: from sampled traces of
JAX's profiler."""
