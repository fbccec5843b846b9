"""Collectives' entries and exits of steps that nothing can be put into, sampled by JAX's
profiler."""
