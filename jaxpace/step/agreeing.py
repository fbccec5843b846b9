"""One decision for all processes that run a program: timestamps in all of them, or in none."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from typing import Any

from jaxpace.hosts import distributed

_LOG = logging.getLogger("jaxpace")
_asked: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()
"""How often each question was asked: a key of the coordination service is used once."""


def all_say(yes: bool, question: str, devices: Sequence[Any], seconds: float) -> bool:
  """Whether the processes of all these devices say yes; no where that can't be found out.

  A program with timestamps and the same one without would meet, since they have the same
  collectives; but not in the same order for certain, so processes must not differ. They ask the
  coordination service, not each other by a program: no setting of JAX reaches it, and a process
  that fails before it could ask leaves the others waiting for so many seconds, not for good.

  Args:
    yes: what this process says.
    question: what is asked, alike in all of them.
    devices: the program's devices. Where they are all this process' own nothing is exchanged.
    seconds: how long to wait for the others. If one does not come in time, all hear no.
  """
  processes = tuple(sorted({device.process_index for device in devices}))
  if len(processes) < 2:
    return yes
  key = f"jaxpace/agree/{question}/{'-'.join(map(str, processes))}/{_asked[question, processes]}"
  _asked[question, processes] += 1
  try:
    if distributed.process_count() < 2:
      raise ConnectionError("jax.distributed.initialize was not called")
    if not yes:
      distributed.key_value_set(f"{key}/no/{distributed.process_index()}", "1")
    distributed.barrier(key, seconds, processes)
    return yes and not distributed.key_value_directory(f"{key}/no")
  except Exception as error:
    _LOG.warning("Processes could not agree on timestamps in %s: %s. Do all of them call "
                 "jaxpace.observe?", question, error)
    return False
