"""Watches beside the loop that steps complete, and names the processes that keep the others
waiting.

Threads of the host only: nothing here starts an operation on a device. What the processes say of
themselves goes through the key-value store that `jax.distributed` runs, one key a process.
"""
