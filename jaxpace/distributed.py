"""The job's processes: joining them, and the few words they exchange outside the training step.

`initialize()` lets one script run unchanged under plain `python`, `jaxpace launch`, `srun`, `mpirun` and Kubernetes.
Barriers and the key-value store exist only on a client that JAX keeps private; `_client` below is the one place of the
package that touches it. Without a joined job everything here is a no-op of a job of one process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
import socket
import time
from collections.abc import Mapping
from os import environ
from typing import Any

import jax

from jaxpace import _failing

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
POD_INDEX = "JOB_COMPLETION_INDEX"  # an indexed Kubernetes Job sets it in every pod

_shared: collections.Counter[str] = collections.Counter()
"""How often `share_string` was called for a name: keys of the store live as long as the job, so each use needs its own."""


@dataclasses.dataclass(frozen=True)
class Place:
  """A process's place in its job.

  Attributes:
    index: 0 to count - 1.
    count: number of processes.
    source: what told it: "environment" (`jaxpace launch`, or the variables set by hand), "cluster" (JAX's own detection
      of SLURM, Open MPI, Kubernetes or Cloud TPU), "mpi" (Open MPI 5 and other MPIs), "joined" (`jax.distributed` was
      initialized before) or "alone".
    coordinator: "host:port" of process 0 where it is known here.
  """

  index: int
  count: int
  source: str
  coordinator: str | None = None


def initialize(timeout: float = 300.0) -> Place:
  """Joins this process to its job, whatever started it. Call it before anything that uses a device.

  Looks, in this order, for the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (`jaxpace
  launch` sets them), for what `jax.distributed.initialize` detects by itself, and for the variables of other MPI
  launchers. Finding none of them it does nothing: the process is a job of its own. Calling it again does nothing.

  CPU collectives across processes go through gloo unless `jax_cpu_collectives_implementation` says otherwise. An
  uncaught exception ends a joined process without the wait for its peers that JAX does at exit (they wait for this one:
  that would take minutes); what was registered with `atexit` after this call still runs.

  Args:
    timeout: seconds to wait for the other processes.

  Returns:
    The place of this process.

  Raises:
    RuntimeError: if a device has been used already, or the job's variables contradict each other.
    TimeoutError: if process 0 cannot be reached.
  """
  if jax.distributed.is_initialized():
    return Place(process_index(), process_count(), "joined")
  place = place_from_environment(environ)
  with _explained(place):
    if jax.config.jax_cpu_collectives_implementation is None:
      jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if place is not None:
      assert place.coordinator is not None
      if place.index != 0:
        _wait_for_coordinator(place, timeout)
      jax.distributed.initialize(
          place.coordinator, place.count, place.index, initialization_timeout=math.ceil(timeout),
          # else SLURM_LOCALID and the like of an outer job choose the GPUs; JAX_LOCAL_DEVICE_IDS still may
          cluster_detection_method="deactivate")
    elif _joined_by_detection(timeout):
      place = Place(process_index(), process_count(), "cluster")
    else:
      _refuse_to_split(environ)
      return Place(0, 1, "alone")
  _failing.install()
  return place


def place_from_environment(env: Mapping[str, str]) -> Place | None:
  """Returns the place that variables give, or None where they leave it to JAX's own detection.

  Args:
    env: environment variables.

  Raises:
    RuntimeError: if a variable is missing beside the others or is not a sensible number.
  """
  index = env.get(INDEX) or (env.get(POD_INDEX) if env.get(COUNT) else None)
  if env.get(COUNT) or index:
    given = {ADDRESS: env.get(ADDRESS), COUNT: env.get(COUNT), INDEX: index}
    if missing := [name for name, value in given.items() if not value]:
      raise RuntimeError(f"{' and '.join(n for n in given if n not in missing)} set, but not {' and '.join(missing)}. "
                         "Set all three (`jaxpace launch` does), or none to let JAX detect the cluster.")
    return Place(*_numbers(given, INDEX, COUNT), "environment", _checked_address(str(given[ADDRESS])))
  if "OMPI_MCA_orte_hnp_uri" in env:  # Open MPI 4 and older: JAX detects them itself
    return None
  for count_name, index_name, local_name in (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
                                             ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS")):
    if env.get(count_name, "1") == "1" or index_name not in env or "SLURM_STEP_NODELIST" in env:
      continue
    address = env.get(ADDRESS)
    if not address and env.get(local_name) == env[count_name]:
      address = f"127.0.0.1:{_port_of_job(env)}"
    if not address:
      raise RuntimeError(f"An MPI launcher started {env[count_name]} processes on several hosts, and JAX cannot find "
                         f"process 0 by itself. Pass its address: mpirun -x {ADDRESS}=<first host>:<free port> ...")
    return Place(*_numbers(env, index_name, count_name), "mpi", _checked_address(address))
  return None


def _numbers(env: Mapping[str, str | None], index_name: str, count_name: str) -> tuple[int, int]:
  try:
    index, count = int(str(env[index_name])), int(str(env[count_name]))
  except ValueError:
    raise RuntimeError(f"{index_name}={env[index_name]!r} and {count_name}={env[count_name]!r} must be whole numbers.")
  if not 0 <= index < count:
    raise RuntimeError(f"{index_name}={index} must be at least 0 and less than {count_name}={count}.")
  return index, count


def _checked_address(address: str) -> str:
  host, _, port = address.rpartition(":")
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise RuntimeError(f"{ADDRESS}={address!r} must be host:port of process 0, for example 10.0.0.1:12345.")
  return address


def _port_of_job(env: Mapping[str, str]) -> int:
  """Returns a port that all processes of one MPI job on one host derive alike, other jobs most likely not."""
  name = env.get("PMIX_NAMESPACE") or env.get("PMI_ID") or env.get("PMI_JOBID") or "mpi"
  return 61440 + sum((position + 1) * ord(letter) for position, letter in enumerate(name)) % 4096


def _refuse_to_split(env: Mapping[str, str]) -> None:
  """Raises where one job would silently become many jobs of one process."""
  if "KUBERNETES_SERVICE_HOST" in env and POD_INDEX in env:
    raise RuntimeError(
        f"This is a pod of an indexed Kubernetes Job, but neither {ADDRESS} and {COUNT} are set nor is the "
        "`kubernetes` package installed, with which JAX could ask the cluster. Set the two in the manifest "
        "(docs/examples/job.yaml), or pip install jax[k8s].")


def _joined_by_detection(timeout: float) -> bool:
  try:
    jax.distributed.initialize(initialization_timeout=math.ceil(timeout))
  except ValueError as error:
    if "must be defined" in str(error) or "should be defined" in str(error):
      if environ.get(ADDRESS):
        raise RuntimeError(f"{ADDRESS} is set, but nothing says how many processes there are or which one this is. "
                           f"Set {COUNT} and {INDEX} as well.") from error
      return False
    raise
  return True


def _wait_for_coordinator(place: Place, timeout: float) -> None:
  """Waits until process 0 listens; JAX itself would end the process with a native stack trace."""
  assert place.coordinator is not None
  host, _, port = place.coordinator.rpartition(":")
  deadline = time.monotonic() + timeout
  reason = ""
  while True:
    try:
      socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
      return
    except OSError as error:
      reason = str(error)
    if time.monotonic() >= deadline:
      raise TimeoutError(
          f"process {place.index} of {place.count} waited {timeout:g} s for process 0 at {place.coordinator} ({reason}). "
          "Is process 0 running, does its host have this address, and is the port open between the hosts?")
    time.sleep(0.1)


class _explained(contextlib.AbstractContextManager[None]):
  """Puts JAX's errors of joining into words that name the usual mistake."""

  def __init__(self, place: Place | None):
    self._place = place

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    if isinstance(error, RuntimeError) and "must be called before" in str(error):
      raise RuntimeError(
          "jaxpace.distributed.initialize() comes too late: a device has been used already, so this process cannot join "
          "the job any more. Call it first in main(), before any jnp operation, jax.devices(), jax.random.key() and the "
          "like, also those at the top of imported modules.") from error


def _client() -> Any | None:
  """Returns JAX's private distributed client, or None when the process has joined no job."""
  if not jax.distributed.is_initialized():
    return None
  from jax._src import distributed  # the only place there is; everything else here goes through it
  return distributed.global_state.client


def process_index() -> int:
  """Returns this process's index without starting a backend, as `jax.process_index` would; 0 alone."""
  if not jax.distributed.is_initialized():
    return 0
  from jax._src import distributed
  return int(distributed.global_state.process_id)


def process_count() -> int:
  """Returns the number of processes without starting a backend, as `jax.process_count` would; 1 alone."""
  if not jax.distributed.is_initialized():
    return 1
  from jax._src import distributed
  return int(distributed.global_state.num_processes)


def key_value_set(key: str, value: str, overwrite: bool = False) -> None:
  """Publishes a string to all processes. Keys live until deleted or the job ends. A no-op alone.

  Args:
    key: name; slashes make directories.
    value: any string.
    overwrite: whether an existing key may be replaced.

  Raises:
    KeyError: if the key exists and `overwrite` is false.
    ConnectionError: if process 0 is gone.
  """
  client = _client()
  if client is None:
    return
  try:
    client.key_value_set(key, value, allow_overwrite=overwrite)
  except jax.errors.JaxRuntimeError as error:
    if "ALREADY_EXISTS" in str(error):
      raise KeyError(f"{key!r} has a value already; pass overwrite=True to replace it") from error
    raise _lost(f"publishing {key!r}", error) from error


def key_value_get(key: str, timeout: float) -> str | None:
  """Returns the string published under a key, waiting for it; None alone.

  Args:
    key: name.
    timeout: seconds to wait for someone to publish it.

  Raises:
    TimeoutError: if nobody did.
    ConnectionError: if process 0 is gone.
  """
  client = _client()
  if client is None:
    return None
  try:
    return str(client.blocking_key_value_get(key, _milliseconds(timeout)))
  except jax.errors.JaxRuntimeError as error:
    if "DEADLINE_EXCEEDED" in str(error):
      raise TimeoutError(f"process {process_index()} of {process_count()} waited {timeout:g} s for {key!r}, "
                         "which no process published") from error
    raise _lost(f"waiting for {key!r}", error) from error


def key_value_delete(key: str) -> None:
  """Deletes a key, and all below it if it is a directory; one that does not exist is no error. A no-op alone."""
  client = _client()
  if client is None:
    return
  try:
    client.key_value_delete(key)
  except jax.errors.JaxRuntimeError as error:
    raise _lost(f"deleting {key!r}", error) from error


def barrier(name: str, timeout: float) -> None:
  """Waits until all processes have called this with the same name. A no-op alone.

  Args:
    name: what is waited for, in words: it appears in the error.
    timeout: seconds.

  Raises:
    TimeoutError: if some process did not come in time; the message names those.
    ConnectionError: if a process is gone.
  """
  client = _client()
  if client is None:
    return
  try:
    client.wait_at_barrier(name, _milliseconds(timeout))
  except jax.errors.JaxRuntimeError as error:
    if "DEADLINE_EXCEEDED" not in str(error):
      raise _lost(f"waiting for {name!r}", error) from error
    missing = missing_at_barrier(str(error))
    who = f"process {', '.join(map(str, missing))} did not come" if missing else "not all processes came"
    raise TimeoutError(f"process {process_index()} of {process_count()} waited {timeout:g} s for {name!r}: "
                       f"{who}") from error


def missing_at_barrier(message: str) -> list[int]:
  """Returns the indices of the processes that a barrier's time-out message says have not come."""
  listed = re.search(r"timed out task names:(.*?)(?:\n\s*\n|RPC:|$)", message, re.DOTALL)
  return sorted({int(n) for n in re.findall(r"(?:task:)?\b(\d+)\b", listed.group(1))}) if listed else []


def share_string(name: str, value: str | None, timeout: float) -> str | None:
  """Returns process 0's value on every process. Call it equally often on all of them.

  Args:
    name: what is shared; may be used again.
    value: the string, on process 0; looked at nowhere else.
    timeout: seconds to wait for process 0.

  Returns:
    Process 0's value; `value` itself in a process that is alone.

  Raises:
    ValueError: if process 0 has no value.
    TimeoutError: if process 0 did not publish one in time.
  """
  if process_index() == 0 and value is None and process_count() > 1:
    raise ValueError(f"process 0 shares {name!r} and must have a value, not None")
  if _client() is None:
    return value
  key = f"jaxpace/shared/{name}/{_shared[name]}"
  _shared[name] += 1
  if process_index() == 0:
    assert value is not None
    key_value_set(key, value)
    return value
  try:
    return key_value_get(key, timeout)
  except TimeoutError as error:
    raise TimeoutError(f"process {process_index()} of {process_count()} waited {timeout:g} s for process 0 to share "
                       f"{name!r}. Is process 0 alive, and does it run the same code?") from error


def _milliseconds(seconds: float) -> int:
  if not (math.isfinite(seconds) and seconds > 0):
    raise ValueError(f"timeout must be a positive number of seconds, not {seconds}")
  return max(1, math.ceil(seconds * 1e3))


def _lost(doing: str, error: Exception) -> ConnectionError:
  return ConnectionError(f"process {process_index()} of {process_count()} lost its job while {doing}: "
                         f"{str(error).splitlines()[0]}")
