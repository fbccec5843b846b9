"""The one place that touches what JAX keeps private: its distributed client, and the address gloo
binds to. And the few words that processes exchange by it outside of the training step: strings by
key, and barriers. In a process that has joined no job these are no-ops of a job of one process.

Barriers and the key-value store have no public name in JAX (0.10), nor has gloo's address. If a
version of JAX moves them, this file is what to change.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax


def _state() -> Any:
  from jax._src import distributed
  return distributed.global_state


def client() -> Any | None:
  """Returns JAX's distributed client, or None when the process has joined no job."""
  return _state().client if jax.distributed.is_initialized() else None


def process_index() -> int:
  """Returns this process's index without starting a backend, as `jax.process_index` would; 0
  alone."""
  return int(_state().process_id) if jax.distributed.is_initialized() else 0


def process_count() -> int:
  """Returns the number of processes without starting a backend, as `jax.process_count` would; 1
  alone."""
  return int(_state().num_processes) if jax.distributed.is_initialized() else 1


def coordinator_address() -> str | None:
  """Returns "host:port" of process 0, or None when the process has joined no job."""
  return _state().coordinator_address if jax.distributed.is_initialized() else None


def coordinator_port() -> int | None:
  """Returns the port of process 0's coordination service, or None where there is none."""
  port = (coordinator_address() or "").rpartition(":")[2]
  return int(port) if port.isdecimal() else None


class _Asked:
  """JAX's preemption manager, and whether it was ever asked for the step at which to stop."""

  def __init__(self, manager: Any):
    self._manager, self.ever = manager, False

  def reached_sync_point(self, *args: Any, **kwargs: Any) -> Any:
    """Asks the manager, and notes that somebody did."""
    self.ever = True
    return self._manager.reached_sync_point(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._manager, name)


def asks_for_preemption() -> bool:
  """Whether the program has asked JAX for the step at which to stop, since this was called first.

  JAX swallows SIGTERM for the sake of programs that call `reached_preemption_sync_point` (orbax
  does), as they must, at every step. Where none does, nothing will ever come of the signal. True
  where this JAX doesn't let it be seen.
  """
  state = _state()
  manager = getattr(state, "preemption_sync_manager", None)
  if not isinstance(manager, _Asked):
    if not hasattr(manager, "reached_sync_point"):
      return True
    state.preemption_sync_manager = manager = _Asked(manager)
  return manager.ever


def exit_by(leave: Callable[[], None]) -> None:
  """Calls a function where JAX would wait for its devices and the other processes, at exit; at once
  where this JAX has that elsewhere."""
  from jax._src import api, distributed
  if not (hasattr(api, "clean_up") and hasattr(api, "clear_backends")):
    leave()
  api.clear_backends = lambda **_: leave()
  distributed.shutdown = leave  # It comes to this alone where there is no backend.


def bind_gloo_to(address: str) -> None:
  """Makes gloo listen on `address` in this process, instead of on what the host's name resolves to.

  Call it after `jax.distributed.initialize` and before a backend is started.

  Raises:
    AttributeError, ImportError, TypeError: if this JAX has no such thing any more.
  """
  from jax._src import xla_bridge
  from jax.extend.backend import register_backend_factory

  make_client, joined = xla_bridge.make_cpu_client, client()
  make_gloo = importlib.import_module("jaxlib._jax").make_gloo_tcp_collectives

  def start_cpu() -> Any:
    return make_client(collectives=make_gloo(distributed_client=joined, hostname=address))

  register_backend_factory("cpu", start_cpu, priority=0, fail_quietly=False)


# Strings by key, and barriers.

_SLICE_SECONDS = 1.0  # a longer wait would keep a thread from ending

_shared: collections.Counter[str] = collections.Counter()
"""How often `share_string` was called for a name: a key lives as long as the job, so each use needs
its own."""


def key_value_set(key: str, value: str, overwrite: bool = False) -> None:
  """Publishes a string to all processes. Keys live until deleted or the job ends. A no-op alone.
  Raises KeyError where the key exists and may not be replaced, ConnectionError where process 0 is
  gone."""
  service = client()
  if service is None:
    return
  with _explained(f"publishing {key!r}", "ALREADY_EXISTS", KeyError(
      f"{key!r} has a value already; pass overwrite=True to replace it")):
    service.key_value_set(key, value, allow_overwrite=overwrite)


def key_value_get(key: str, timeout: float) -> str | None:
  """Returns the string published under a key, waiting for it; None alone. Raises TimeoutError where
  nobody publishes one, ConnectionError where process 0 is gone."""
  service = client()
  if service is None:
    return None
  with _explained(f"waiting for {key!r}", "DEADLINE_EXCEEDED", TimeoutError(
      f"{_who()} waited {timeout:g} s for {key!r}, which no process published")):
    return str(service.blocking_key_value_get(key, _milliseconds(timeout)))


def key_value_directory(directory: str) -> dict[str, str]:
  """Returns all strings published below a directory at the moment, by their whole keys. Empty
  alone. Raises ConnectionError where process 0 is gone."""
  service = client()
  if service is None:
    return {}
  with contextlib.suppress(FileNotFoundError), _explained(
      f"reading {directory!r}", "NOT_FOUND", FileNotFoundError()):
    return dict(service.key_value_dir_get(directory))
  return {}


def key_value_delete(key: str) -> None:
  """Deletes a key, and all below it if it is a directory; one that does not exist is no error. A
  no-op alone."""
  service = client()
  if service is not None:
    with _explained(f"deleting {key!r}"):
      service.key_value_delete(key)


def barrier(name: str, timeout: float, processes: Sequence[int] | None = None) -> None:
  """Waits until all processes have called this with the same name. A no-op alone.

  Args:
    name: what is waited for, in words: it appears in the error.
    timeout: seconds.
    processes: those that are waited for, this one among them; None for all.

  Raises:
    TimeoutError: if some process did not come in time; the message names those.
    ConnectionError: if a process is gone.
  """
  service = client()
  if service is None:
    return
  try:
    with _explained(f"waiting for {name!r}", "DEADLINE_EXCEEDED", TimeoutError()):
      service.wait_at_barrier(name, _milliseconds(timeout),
                             process_ids=None if processes is None else list(processes))
  except TimeoutError as error:
    missing = missing_at_barrier(str(error.__cause__))
    who = (f"process {', '.join(map(str, missing))} did not come" if missing
           else "not all processes came")
    raise TimeoutError(f"{_who()} waited {timeout:g} s for {name!r}: {who}") from error.__cause__


def missing_at_barrier(message: str) -> list[int]:
  """Returns the indices of the processes that a barrier's time-out message says have not come."""
  listed = re.search(r"timed out task names:(.*?)(?:\n\s*\n|RPC:|$)", message, re.DOTALL)
  return (sorted({int(n) for n in re.findall(r"(?:task:)?\b(\d+)\b", listed.group(1))}) if listed
          else [])


def share_string(name: str, value: str | None, timeout: float,
                 given_up: threading.Event | None = None) -> str | None:
  """Returns process 0's value on every process. Call it equally often on all of them.

  Args:
    name: what is shared; may be used again.
    value: the string, on process 0; looked at nowhere else.
    timeout: seconds to wait for process 0.
    given_up: once it is set, the wait ends within a second. A daemon thread that waits in JAX's
      client while the interpreter ends aborts the process.

  Returns:
    Process 0's value; `value` itself in a process that is alone.

  Raises:
    ValueError: if process 0 has no value.
    TimeoutError: if process 0 did not publish one in time.
  """
  if process_index() == 0 and value is None and process_count() > 1:
    raise ValueError(f"process 0 shares {name!r} and must have a value, not None")
  if client() is None:
    return value
  key = f"jaxpace/shared/{name}/{_shared[name]}"
  _shared[name] += 1
  if process_index() == 0:
    assert value is not None
    key_value_set(key, value)
    return value
  end = time.monotonic() + timeout
  while True:
    left = end - time.monotonic()
    try:
      return key_value_get(key, max(min(left, _SLICE_SECONDS), 1e-3))
    except TimeoutError as error:
      if left > _SLICE_SECONDS and not (given_up and given_up.is_set()):
        continue
      raise TimeoutError(f"{_who()} waited {timeout:g} s for process 0 to share {name!r}. Is "
                         "process 0 alive, and does it run the same code?") from error


def _milliseconds(seconds: float) -> int:
  if not (math.isfinite(seconds) and seconds > 0):
    raise ValueError(f"timeout must be a positive number of seconds, not {seconds}")
  return max(1, math.ceil(seconds * 1e3))


def _who() -> str:
  return f"process {process_index()} of {process_count()}"


@contextlib.contextmanager
def _explained(doing: str, known: str = "", meaning: Exception | None = None) -> Iterator[None]:
  """Raises, for an error of JAX's client, what it means where its text has a known word; else that
  the job is lost."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if meaning is not None and known in str(error):
      raise meaning from error
    raise ConnectionError(
        f"{_who()} lost its job while {doing}: {str(error).splitlines()[0]}") from error
