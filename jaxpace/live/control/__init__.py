"""Changing a pacer's settings while the job runs: the control file, and the loop's side of it.

`request` and `file` need no JAX: the `jaxpace control` command uses them.
"""
