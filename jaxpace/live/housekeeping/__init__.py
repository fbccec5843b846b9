"""Pauses of the host, coordinated: garbage collection, checkpoints, log flushes.

Host side only: nothing here touches the compiled step, the collectives or results.
"""
