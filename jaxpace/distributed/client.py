"""The one place that touches what JAX keeps private: its distributed client, and the address gloo binds to.

Barriers and the key-value store have no public name in JAX (0.10), nor has gloo's address. If a version of JAX
moves them, this file is what to change.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax


def _state() -> Any:
  from jax._src import distributed
  return distributed.global_state


def client() -> Any | None:
  """Returns JAX's distributed client, or None when the process has joined no job."""
  return _state().client if jax.distributed.is_initialized() else None


def process_index() -> int:
  """Returns this process's index without starting a backend, as `jax.process_index` would; 0 alone."""
  return int(_state().process_id) if jax.distributed.is_initialized() else 0


def process_count() -> int:
  """Returns the number of processes without starting a backend, as `jax.process_count` would; 1 alone."""
  return int(_state().num_processes) if jax.distributed.is_initialized() else 1


def coordinator_address() -> str | None:
  """Returns "host:port" of process 0, or None when the process has joined no job."""
  return _state().coordinator_address if jax.distributed.is_initialized() else None


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
