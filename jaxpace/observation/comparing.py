"""Runs the first executions of a program with timestamps beside the unmodified one, and compares
what they give bit for bit: what `exact=True` asks for, of a step that is named and of one that is
found alike.

The comparison stands where JAX keeps the executable, below arguments and results: so donated
buffers, references and static arguments need no care. It runs the program with timestamps on copies
of what the step was given, and then the unmodified one, whose results are the step's.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import own_context
from jaxpace.hosts import distributed
from jaxpace.observation.partitioned import compiling

_LOG = logging.getLogger("jaxpace")
FIRST = 3
"""Executions of each program that are compared. After one, much of an optimizer's state is still
zero."""
WAIT_SECONDS = 120.0
"""How long processes wait for one another to agree, beside what compiling took them."""
_ELSEWHERE = "on another process they differ, or can't be compared"


class Comparison:
  """Stands in for an executable with timestamps until its first executions are compared."""

  def __init__(self, name: str, devices: Sequence[Any], timestamped: Any, bare: Any,
               refused: Callable[[str, bool], None]):
    """Has JAX execute this in place of `timestamped`.

    Args:
      name: the program's, alike on all processes that run it.
      devices: what it runs on. Its processes come to the same decision.
      timestamped: the executable that JAX is about to get.
      bare: the unmodified one.
      refused: told once that executions differ: the reason, and whether that is known or they could
        not be compared.

    Raises:
      RuntimeError: this JAX does not let anything stand in.
    """
    self._name, self._devices, self._refused = name, devices, refused
    self._timestamped, self._bare, self._left = timestamped, bare, FIRST
    self._stand_in = compiling.StandIn(timestamped, self)

  def execute_sharded(self, buffers: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Runs the step, as the executable would. By JAX."""
    if not self._left:
      # Another thread was here meanwhile.
      return self._stand_in.now.execute_sharded(buffers, *args, **kwargs)
    unknown, found = "", None
    try:
      with own_context.on(None):
        copies = [copied(one) for one in buffers]
    except Exception as error:
      unknown = in_a_line(error)
    # Before either of them runs: then all processes run both, or none.
    if not self._all_say(not unknown, "copied"):
      self._settle(unknown or _ELSEWHERE, False)
      return self._stand_in.now.execute_sharded(buffers, *args, **kwargs)
    try:
      found = self._timestamped.execute_sharded(copies, *args, **kwargs)
      found = jax.block_until_ready(found.disassemble_into_single_device_arrays())
    except Exception as error:
      unknown = in_a_line(error)
    results = self._bare.execute_sharded(buffers, *args, **kwargs)
    return _Results(results, lambda out: self._compare(out, found, unknown))

  def _compare(self, bare: Sequence[Any], found: Any, unknown: str) -> None:
    different = ""
    if not unknown:
      try:
        with own_context.on(None):
          different = differences(bare, found)
      except Exception as error:
        unknown = in_a_line(error)
    if self._all_say(not (different or unknown), "compared"):
      if self._left == 1:
        self._stand_in.leave(self._timestamped)
      self._left -= 1
    else:
      self._settle(different or unknown or _ELSEWHERE, bool(different) or not unknown)

  def _settle(self, reason: str, known: bool) -> None:
    try:
      self._refused(reason, known)
    finally:
      self._stand_in.leave(self._bare)
      self._left = 0

  def _all_say(self, yes: bool, what: str) -> bool:
    return all_say(yes, f"{self._name}, {what}", self._devices, WAIT_SECONDS)


class _Results:
  """What an execution gave, handed on; once its arrays are made of it they are compared."""

  def __init__(self, results: Any, compare: Callable[[Sequence[Any]], None]):
    self._results, self._compare = results, compare

  def consume_with_handlers(self, handlers: Sequence[Any], strict: bool = True) -> Any:
    """Makes arrays of the results; of the tokens before them, where not `strict`."""
    out = self._results.consume_with_handlers(handlers, strict=strict)
    if strict:
      self._compare(out)
    return out

  def __getattr__(self, name: str) -> Any:
    return getattr(self._results, name)


def copied(array: Any) -> Any:
  """Copies an array on its devices, laid out alike: the original may be donated."""
  if array.is_fully_addressable:
    return jax.device_put(array, may_alias=False)
  return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [
      jax.device_put(shard.data, may_alias=False) for shard in array.addressable_shards])


def differences(bare: Sequence[Any], found: Sequence[Sequence[Any]]) -> str:
  """In what two executions differ, in a sentence; empty where they are equal bit for bit.

  Args:
    bare: the unmodified program's results, arrays.
    found: those with timestamps: of each the part of every device of this process. NaNs are
      compared by their bits, too.
  """
  if len(bare) != len(found):
    return f"With timestamps the step gives {len(found)} arrays, and {len(bare)} without."
  different, largest = set[int](), 0.0
  for place, (one, parts) in enumerate(zip(bare, found, strict=True)):
    if jnp.issubdtype(one.dtype, jax.dtypes.extended):
      one = jax.random.key_data(one)
    there = {device: part for part in parts for device in part.devices()}
    for shard in one.addressable_shards:
      left, right = np.asarray(shard.data), np.asarray(there[shard.device])
      if left.dtype != right.dtype or left.shape != right.shape:
        return f"With timestamps result {place} of the step has another shape or type."
      if left.tobytes() != right.tobytes():
        different.add(place)
        largest = max(largest, _relative(left, right))
  if not different:
    return ""
  return (f"With timestamps {len(different)} of {len(bare)} results of a first step differ, by "
          f"{largest:.1e} relative at most (results {', '.join(map(str, sorted(different)[:3]))}).")


def _relative(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
  try:
    one, two = left.astype(np.float64), right.astype(np.float64)
  except (TypeError, ValueError):
    return float("nan")
  scale = float(np.max(np.abs(one), initial=0.0)) or 1.0
  return float(np.max(np.abs(one - two), initial=0.0)) / scale


def all_say(yes: bool, question: str, devices: Sequence[Any], seconds: float) -> bool:
  """One decision for all processes that run a program: whether all say yes; no where that can't be
  found out.

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
    _LOG.warning("Processes could not agree on timestamps in %s: %s. Do all of them observe it "
                 "alike?", question, error)
    return False


_asked: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()
"""How often each question was asked: a key of the coordination service is used once."""


def in_a_line(error: Exception) -> str:
  """What an error says, as the end of a sentence."""
  return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".") + "."
