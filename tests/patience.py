"""Tests in which something real takes time, on machines that have other things to do."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

TIMES = (1, 6, 36)
LONGEST = 2.0
"""Delays that are still shorter, in seconds, grow further: a busy machine stalls for a second."""


def awaited(question: Callable[[], Any], seconds: float = 300.0) -> Any:
  """Asks until the answer is true, or for so long; returns the last answer."""
  deadline = time.monotonic() + seconds
  while not (found := question()) and time.monotonic() < deadline:
    time.sleep(0.02)
  return found


def patiently(**seconds: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
  """Runs a test with longer and longer injected delays until it passes.

  A busy machine adds its own delays to the injected ones, and those don't grow with them: what a
  comparison of two durations misses with 30 ms it finds with 2 s. A wrong formula finds it with
  neither. A test whose comparison holds whatever the machine does needs none of this.

  Args:
    seconds: constants of the test's module that hold injected delays, by name, and the value that
      the first try uses. The test gets a folder of its own at each try.
  """

  def decorate(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def patient(*args: Any, **kwargs: Any) -> None:
      module, given = test.__globals__, dict(kwargs)
      longest = max(seconds.values())
      tries = [*TIMES, *(times for times in (216, 1296) if times * longest <= LONGEST)]
      for times in tries:
        module.update({name: times * value for name, value in seconds.items()})
        if "tmp_path" in kwargs:
          given["tmp_path"] = kwargs["tmp_path"] / f"times{times}"
          given["tmp_path"].mkdir()
        try:
          test(*args, **given)
          break
        except AssertionError:
          if times == tries[-1]:
            raise
        finally:
          module.update(seconds)

    return patient

  return decorate
