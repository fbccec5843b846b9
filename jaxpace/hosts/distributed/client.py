"""The one place that touches what JAX keeps private: its distributed client, and the address gloo
binds to.

Barriers and the key-value store have no public name in JAX (0.10), nor has gloo's address. If a
version of JAX moves them, this file is what to change.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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
