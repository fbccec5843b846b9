"""Records a program that `jaxpace run` starts, or that runs with JAXPACE_RUN in its environment.

JAX imports every module of the namespace package `jax_plugins` on Python's path, and every module
that an installed package names as such, and has each begin when its backends do: before anything is
compiled, and wherever in a program that is.
"""

import os
import sys


def initialize():
  """Records what the environment asks for; whatever fails, the program runs."""
  if not os.environ.get("JAXPACE_RUN"):
    return
  try:
    from jaxpace.record.observed import attach
    attach()
  except Exception as error:
    if sys.stderr is not None:
      print(f"jaxpace: nothing is recorded: {error}. Is jaxpace installed for {sys.executable}?",
            file=sys.stderr)
