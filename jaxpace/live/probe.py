"""The probe as users call it: measures, judges, and keeps what was found in the run directory."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import pathlib
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpace.core import own_context
from jaxpace.diagnose.links import FILE, ProbedLinks, infer
from jaxpace.files.folders import Folder

# Times messages between pairs of devices, all processes together, each by its own clock, in rounds
# of disjoint pairs.

_LOG = logging.getLogger("jaxpace")
_AXIS = "ends"
Round = tuple[tuple[int, int], ...]
"""Pairs (sender, receiver); no process is in two of them."""


def rounds(ends: int, at_once: bool = True, seed: int = 0) -> list[Round]:
  """Every ordered pair of `ends`, in rounds of disjoint pairs, in an order that covers all evenly
  if it is cut short.

  A tournament by the circle method: one end stays, the others turn. Each of its rounds is played
  twice, once each way.

  Args:
    ends: how many there are, at least 2.
    at_once: whether pairs may be measured at the same time; otherwise each has a round of its own.
    seed: of the order.

  >>> sorted(pair for one in rounds(3) for pair in one)
  [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
  >>> len(rounds(4)), len(rounds(4, at_once=False))
  (6, 12)
  """
  seats = list(range(ends)) + ([-1] if ends % 2 else [])
  found: list[Round] = []
  for _ in range(len(seats) - 1):
    pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
    pairs = [pair for pair in pairs if -1 not in pair]
    found += [tuple(pairs), tuple((b, a) for a, b in pairs)]
    seats = [seats[0], seats[-1], *seats[1:-1]]
  if not at_once:
    found = [(pair,) for one in found for pair in one]
  random.Random(seed).shuffle(found)
  return found


class _Ends:
  """One device a process, or all devices of a process that is alone; values of every end, known to
  every process. To be used in the context of its mesh."""

  def __init__(self, devices: Sequence[Any]):
    self.devices = list(devices)
    self.count = len(self.devices)
    self.mesh = jax.sharding.Mesh(np.array(self.devices), (_AXIS,), axis_types=(AxisType.Auto,))
    own = jax.process_index()
    self.own = [i for i, device in enumerate(self.devices) if device.process_index == own]

  def spread(self, value: np.ndarray) -> jax.Array:
    """Makes [ends, ...] of which each end holds `value`."""
    shape = (self.count, *value.shape)
    return jax.make_array_from_callback(shape, NamedSharding(self.mesh, P(_AXIS)),
                                        lambda index: np.broadcast_to(value, shape)[index])

  @functools.cached_property
  def _gather(self) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(self.mesh, P()))

  def gather(self, value: np.ndarray) -> np.ndarray:
    """Returns every end's value, [ends, ...], the same on all processes."""
    return np.asarray(self._gather(self.spread(value)))

  def names(self, name: str) -> list[str]:
    """Returns the name of each end's host; `name` is that of this process's."""
    text = np.zeros((64,), np.int32)
    letters = name.encode("utf-8", errors="replace")[:64]
    text[:len(letters)] = list(letters)
    return [bytes(int(c) for c in row if c).decode("utf-8", errors="replace")
            for row in self.gather(text)]

  def pair_program(self, pairs: Round) -> Callable[[jax.Array], jax.Array]:
    """Compiles the program of a round."""
    hello = [*pairs, *((b, a) for a, b in pairs)]

    def local(payload: jax.Array) -> jax.Array:
      heard = jax.lax.ppermute(payload[:, :1], _AXIS, hello)
      # never -1: only after hearing
      ready = jnp.where(heard == jnp.float32(-1.0), jnp.zeros_like(payload), payload)
      return jax.lax.ppermute(ready, _AXIS, list(pairs))[:, :1]

    return jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=P(_AXIS), out_specs=P(_AXIS),
                                 check_vma=False))


def ends() -> list[Any]:
  """The devices that stand for the ends: the first of each process, or all of a process that is
  alone."""
  if jax.process_count() == 1:
    return list(jax.devices())
  first: dict[int, Any] = {}
  for device in jax.devices():
    first.setdefault(device.process_index, device)
  return [first[process] for process in sorted(first)]


def measure(here: _Ends, size: int, repeats: int, seconds: float,
            progress: Callable[[int, int], None] | None = None) -> np.ndarray:
  """Times every ordered pair by `repeats` messages of `size` bytes, after a first that does not
  count; no round begins later than `seconds`, which all processes decide alike. Every process of
  the job calls it, at the same point between steps. Returns [2, n, n] float64 s from row to column,
  the quickest and the median; NaN where not measured."""
  n = here.count
  payload = here.spread(np.ones((max(1, math.ceil(size / 4)),), np.float32))
  plan = rounds(n, at_once=len(here.own) == 1)
  own = np.full((2, n, n), np.nan, np.float32)  # quickest and median; from, to
  began = time.monotonic()
  here.gather(np.zeros((1,), np.float32))  # compiled, and all are here
  for done, pairs in enumerate(plan, 1):
    if float(here.gather(np.array([time.monotonic() - began], np.float32)).max()) > seconds:
      break
    program = here.pair_program(pairs)
    jax.block_until_ready(program(payload))
    taken = []
    for _ in range(repeats):
      before = time.monotonic()
      jax.block_until_ready(program(payload))
      taken.append(time.monotonic() - before)
    for a, b in pairs:
      if b in here.own:
        own[:, a, b] = min(taken), float(np.median(taken))
    if progress is not None:
      progress(done, len(plan))
  gathered = np.nan_to_num(here.gather(own), nan=np.inf).min(axis=0).astype(np.float64)
  gathered[np.isinf(gathered)] = np.nan
  return gathered


_LARGEST, _SMALLEST = 1 << 28, 1 << 10


def probe_links(directory: str | os.PathLike[str] | None = None, *, message_bytes: int = 1 << 20,
                repeats: int = 10, seconds: float = 60.0, devices: Sequence[Any] | None = None,
                progress: Callable[[int, int], None] | None = None) -> ProbedLinks:
  """Measures the links between the job's processes, pair by pair, and says which host or link is
  slow.

      if step == 1000:
        links = jaxpace.probe_links("runs/demo")
        print(links.text())

  A collective call: every process makes it, at the same point between two steps, with the same
  arguments. Each of n processes sends `repeats + 1` messages to each other one, n/2 pairs at a
  time: about 2 (n - 1) rounds. The devices' queues must be free: it waits for what was dispatched
  before.

  Args:
    directory: run directory; process 0 writes `links.json` there. None: nowhere.
    message_bytes: size of a message, 1 KiB to 256 MiB. Large enough that the rate counts, not the
      latency.
    repeats: messages per pair; the quickest counts. More of them where hosts are busy with other
      things.
    seconds: no new round begins after so long; pairs left out are NaN.
    devices: one device for each end, instead of each process's first.
    progress: called with rounds done and rounds in all.

  Returns:
    The same on every process.

  Raises:
    ValueError: an argument is out of range, or there is only one end.
  """
  if not _SMALLEST <= message_bytes <= _LARGEST or repeats < 1 or not seconds > 0:
    raise ValueError(f"message_bytes={message_bytes} must be {_SMALLEST} to {_LARGEST}, "
                     f"repeats={repeats} at least 1, and seconds={seconds} positive.")
  chosen = ends() if devices is None else list(devices)
  if len(chosen) < 2:
    raise ValueError("There is one process with one device: no link to probe. Start the job with "
                     "`jaxpace run`, srun or the like, and call "
                     "jaxpace.distributed.initialize() first.")
  began = time.monotonic()
  here = _Ends(chosen)
  with own_context.on(here.mesh):
    quickest, median = measure(here, message_bytes, repeats, seconds, progress)
    hosts = here.names(socket.gethostname())
  if len(set(hosts)) == 1:  # one host: its ends get numbers instead
    hosts = [f"{hosts[0]}/{i}" for i in range(len(hosts))]
  links = ProbedLinks(tuple(hosts), message_bytes, quickest, median, *infer(quickest, hosts),
                      time.monotonic() - began, time.time_ns())
  if directory is not None and jax.process_index() == 0:
    write_links(directory, links)
  return links


def write_links(directory: str | os.PathLike[str], links: ProbedLinks) -> None:
  """Writes `links.json`, whole or not at all. Trouble is a warning, no error: the job goes on."""
  path = pathlib.Path(os.path.abspath(directory)) / FILE
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    Folder(path.parent).write_text(
        FILE, json.dumps(links.to_json(), indent=1, allow_nan=False) + "\n")
  except OSError as error:
    _LOG.warning("What the link probe found is not recorded: %s can't be written (%s).", path,
                 error.strerror or error)
