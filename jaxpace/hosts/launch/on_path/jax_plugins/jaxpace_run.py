"""Records a program that `jaxpace run` starts, or that runs with JAXPACE_RUN in its environment.

JAX imports every module of the namespace package `jax_plugins` on Python's path, and every module
that an installed package names as such, and has each begin when its backends do: before anything is
compiled, and wherever in a program that is.
"""

import contextlib
import os
import sys


def initialize():
  """Records what the environment asks for; whatever fails, the program runs."""
  environment = _environment()
  if not environment.get("JAXPACE_RUN") or _is_second():
    return
  try:
    from jaxpace.record.observed import attach
    attach(environment)
  except Exception as error:
    asked = f" Is jaxpace installed for {sys.executable}?" if isinstance(error, ImportError) else ""
    if sys.stderr is not None:
      print(f"jaxpace: nothing is recorded: {error}.{asked}", file=sys.stderr)
    # It has been said why, so `jaxpace run` need not at the end.
    with contextlib.suppress(OSError):
      os.unlink(environment.get("JAXPACE_RUN_UNSEEN", ""))


def _is_second():
  """Whether this file is on Python's path as well, where `jaxpace run` has put it."""
  folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  return __name__ != "jax_plugins.jaxpace_run" and folder in sys.path


def _environment():
  """The environment; where a program of `jaxpace run` has emptied it, as that program began."""
  if "JAXPACE_RUN" in os.environ or "JAXPACE_RUN_UNSEEN" in os.environ:
    return os.environ
  try:
    with open("/proc/self/environ", "rb") as file:
      began = dict(os.fsdecode(entry).partition("=")[::2] for entry in file.read().split(b"\0"))
  except OSError:
    return os.environ
  return began if "JAXPACE_RUN_UNSEEN" in began else os.environ
