"""Numbers of all devices of a job on every process: gathered beside the step, by a program that
nobody waits for."""

from __future__ import annotations

import collections
import contextlib
import logging
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpace.core import own_context
from jaxpace.hosts import distributed

_LOG = logging.getLogger("jaxpace")
TOLD = 1 << 22
"""Numbers of steps are compared modulo this, which float32 holds."""
_SHOWN = 8
"""Counts, and processes, that a sentence names."""
_WAITS = (10.0, 110.0)
"""Seconds to wait for the other processes before the first exchange: until it is said, and then
until work stays shared evenly."""
_AGREES = 2.0
"""Seconds beside the time of eight steps to wait for the others' word on new counts. Who comes
later puts the change off to another exchange, and nothing is lost; who wants no change never
comes."""
_BEHIND = 8
"""Steps that a process may be behind another: none has new counts of an exchange before all have
begun it."""


class Gathered:
  """Gathers numbers of all devices of a mesh on every process, by a program that nobody waits
  for."""

  def __init__(self, mesh: Mesh, numbers: int):
    """Compiles the program; `numbers` are those of each device."""
    # A mesh of its own: the step's may have axes that are explicit.
    self._mesh = Mesh(mesh.devices.reshape(-1), ("devices",), axis_types=(AxisType.Auto,))
    self.own = [device for device in self._mesh.devices
                if device.process_index == jax.process_index()]
    """This process's devices, in the order of their rows."""
    self._alone = len(self.own) == self._mesh.size
    self._split = NamedSharding(self._mesh, PartitionSpec("devices"))
    self._sent: Any = None
    self._processes = [device.process_index for device in self._mesh.devices]
    self._members = sorted(set(self._processes))
    self._met, self._meeting = self._alone, ""
    # The step at which not all agreed the last time: processes count calls of a barrier, and no
    # more alike once it has failed.
    self._failed = 0
    if not self._alone:
      shape = jax.ShapeDtypeStruct((self._mesh.size, numbers), jnp.float32, sharding=self._split)
      with own_context.on(self._mesh):
        self._program = jax.jit(jnp.copy, out_shardings=NamedSharding(
            self._mesh, PartitionSpec())).lower(shape).compile()

  def send(self, rows: np.ndarray) -> None:
    """Begins to gather; every process of the mesh calls it. [own devices, n] float32."""
    if self._alone:
      self._sent = rows
      return
    with own_context.on(self._mesh):
      parts = [jax.device_put(row[None], device)
               for row, device in zip(rows, self.own, strict=True)]
      whole = jax.make_array_from_single_device_arrays(
          (self._mesh.size, rows.shape[1]), self._split, parts)
      self._sent = self._program(whole)
      self._sent.copy_to_host_async()

  def received(self) -> np.ndarray | None:
    """Returns what was sent last, [devices of the mesh, n] float32, the same on all processes; None
    where nothing was. Once."""
    sent, self._sent = self._sent, None
    return own_context.fetch(sent.addressable_data(0)) if isinstance(sent, jax.Array) else sent

  def begins(self, counts: np.ndarray) -> None:
    """Says what counts this process's first step runs, and raises ValueError where another's
    differ: a step in which some processes fetch would never end. It waits for nobody: whoever comes
    last knows of all."""
    if self._alone:
      return
    _meetings[tuple(self._members)] += 1
    of = zlib.crc32(repr(self._members).encode())
    self._meeting = f"jaxpace/shares/{of:x}/{_meetings[tuple(self._members)]}"
    # Short, since each process reads all: the first counts, for people, and a digest of all.
    shown = ", ".join(map(str, counts[:_SHOWN])) + (", ..." if len(counts) > _SHOWN else "")
    own, folder = f"{zlib.crc32(counts.tobytes()):x} {shown}", f"{self._meeting}/counts/"
    try:
      distributed.key_value_set(f"{folder}{jax.process_index()}", own, overwrite=True)
      found = distributed.key_value_directory(folder)
    except (ConnectionError, RuntimeError):
      _LOG.debug("shares", exc_info=True)
      return
    others = [f"process {key.rpartition('/')[2]} with {said.partition(' ')[2]}"
              for key, said in sorted(found.items()) if said != own]
    if others:
      raise ValueError(f"The job's processes begin with different counts: "
                       f"{', '.join(others[:_SHOWN])}, this one, process {jax.process_index()}, "
                       f"with {shown}. Did only some of them restore a checkpoint's feed.state(), "
                       "or another checkpoint's?")

  def meets(self, step: int) -> bool:
    """Waits until all processes come to the first exchange, where this is the first; without one of
    them it would never end. False, with a warning, where one doesn't."""
    if self._met:
      return True
    for seconds in _WAITS:
      name = f"{self._meeting}/{seconds:g}"
      try:
        distributed.barrier(name, seconds, self._members)
      except (TimeoutError, ConnectionError, RuntimeError) as error:
        _LOG.warning("No exchange of the ranks' speeds yet, at step %d: %s. Does every process "
                     "call feed.next(step), once a step? %s", step, error,
                     "Work stays shared evenly." if seconds == _WAITS[-1] else "It waits on.")
      else:
        self._met = True
        self._forget(f"{self._meeting}/counts/")
        return True
    return False

  def _forget(self, folder: str) -> None:
    """Deletes what all processes have read: keys stay in process 0's memory."""
    if jax.process_index() == self._members[0]:
      with contextlib.suppress(ConnectionError):
        distributed.key_value_delete(folder)

  def agree(self, step: int, wanted: np.ndarray, step_time: float) -> bool:
    """Whether all processes want these counts from a step on: one that some fetch for and some do
    not would never end. It waits for those who want the same, in s as long as a step takes eight
    times, and a little."""
    if self._alone:
      return True
    # One name for the same counts each time: those of barriers stay in process 0's memory.
    name = f"{self._meeting}/{self._failed}/{zlib.crc32(wanted.tobytes()):x}"
    try:
      distributed.barrier(name, _AGREES + _BEHIND * step_time, self._members)
    except (TimeoutError, ConnectionError, RuntimeError):
      _LOG.debug("shares", exc_info=True)
      self._failed = step
      return False
    return True

  def refuse_unequal(self, coming: np.ndarray) -> None:
    """Raises ValueError where processes are at different steps, on all of them at one call: by the
    number of the next step modulo `TOLD` of each device of the mesh, [devices] int64."""
    usual = collections.Counter(coming.tolist()).most_common(1)[0][0]
    others = sorted({(process, number) for process, number in zip(
        self._processes, coming.tolist(), strict=True) if number != usual})
    if others:
      said = ", ".join(f"process {process} at {number}" for process, number in others[:_SHOWN])
      raise ValueError(
          f"The job's processes are not at one step: {said}, the others at {usual}. They would "
          "load other examples, and run other counts. Did one of them call feed.next more often "
          "than the step, or restore another checkpoint? feed.next(step) comes once a step, on "
          "every process.")


_meetings: collections.Counter[tuple[int, ...]] = collections.Counter()
"""How often processes began to share work: a barrier has one name for good."""
