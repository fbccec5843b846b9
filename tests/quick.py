"""What keeps tests short: how their own process compiles, and what `make test` does less of.

Most tests run a program a few times, so that compiling it takes longer than anything else. XLA's flags are read once a
process, and those of one program can be given to `jax.jit` alone: that all programs of a file are compiled alike takes
a private function of JAX. Where it is gone, or an option is, tests are slower and nothing else.
"""

import functools
import os
from typing import Any

import jax

QUICK = os.environ.get("JAXPACE_QUICK_TESTS") == "1"
"""Whether a newcomer waits, who runs `make test`, and not CI: fewer steps and seconds of what looks at random, and most
files marked `optimized` compile as the others do."""
OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1, "xla_cpu_use_onednn": False}
"""Loops written by the older, quicker emitters, and each program compiled by one thread."""


def install() -> None:
  """Has programs compiled with `OPTIONS` while `jax_disable_most_optimizations` is on, as far as this JAX can."""
  try:
    from jax._src import compiler  # noqa: TID251  # the public API has no such seam
    made = compiler.get_compile_options
  except (ImportError, AttributeError):
    return
  if hasattr(made, "__wrapped__") or not _known():
    return

  @functools.wraps(made)
  def quickly(*args: Any, **kwargs: Any) -> Any:
    options = made(*args, **kwargs)
    if jax.config.read("jax_disable_most_optimizations"):
      options.env_option_overrides = [*OPTIONS.items(), *options.env_option_overrides]
    return options

  compiler.get_compile_options = quickly


def _known() -> bool:
  """Whether XLA knows the options."""
  try:
    jax.jit(lambda x: x + 1).lower(1).compile(compiler_options=dict(OPTIONS))
  except Exception:
    return False
  return True
