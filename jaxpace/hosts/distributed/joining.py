"""Joins a process to its job, whatever started it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import ipaddress
import logging
import math
import os
import pathlib
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from os import environ
from types import TracebackType

import jax

from jaxpace.hosts.distributed import client
from jaxpace.hosts.distributed.client import coordinator_address, process_count, process_index
from jaxpace.hosts.launch.environment import ADDRESS, COUNT, INDEX, MPI_VARIABLES

_log = logging.getLogger("jaxpace")
POD_INDEX = "JOB_COMPLETION_INDEX"  # an indexed Kubernetes Job sets it in every pod


@dataclasses.dataclass(frozen=True)
class Place:
  """A process's place in its job.

  Attributes:
    index: 0 to count - 1.
    count: number of processes.
    source: "environment" (`jaxpace run`, or the variables set by hand), "cluster" (JAX's own
      detection of SLURM, Open MPI, Kubernetes or Cloud TPU), "mpi" (Open MPI 5 and other MPIs),
      "joined" (`jax.distributed` was initialized before) or "alone".
    coordinator: "host:port" of process 0 where it is known here.
  """

  index: int
  count: int
  source: str
  coordinator: str | None = None


def place_from_environment(env: Mapping[str, str]) -> Place | None:
  """Returns the place that variables give, or None where they leave it to JAX's own detection.
  Raises RuntimeError where one is missing beside the others, or is not a sensible number."""
  index = env.get(INDEX) or (env.get(POD_INDEX) if env.get(COUNT) else None)
  if env.get(COUNT) or index:
    given = {ADDRESS: env.get(ADDRESS), COUNT: env.get(COUNT), INDEX: index}
    if missing := [name for name, value in given.items() if not value]:
      raise RuntimeError(f"{' and '.join(n for n in given if n not in missing)} set, but not "
                         f"{' and '.join(missing)}. Set all three (`jaxpace run` does), or none "
                         "to let JAX detect the cluster.")
    return Place(*_numbers(given, INDEX, COUNT), "environment",
                 _checked_address(str(given[ADDRESS])))
  if "OMPI_MCA_orte_hnp_uri" in env:  # Open MPI 4 and older: JAX detects them itself
    return None
  for count_name, index_name, local_name in MPI_VARIABLES:
    if env.get(count_name, "1") == "1" or index_name not in env or "SLURM_STEP_NODELIST" in env:
      continue
    address = env.get(ADDRESS)
    if not address and env.get(local_name) == env[count_name]:
      address = f"127.0.0.1:{_port_of_job(env, index_name)}"
    if not address:
      raise RuntimeError(f"An MPI launcher started {env[count_name]} processes on several hosts, "
                         "and JAX cannot find process 0 by itself. Pass its address: mpirun -x "
                         f"{ADDRESS}=<first host>:<free port> ...")
    return Place(*_numbers(env, index_name, count_name), "mpi", _checked_address(address))
  return None


def _numbers(env: Mapping[str, str | None], index_name: str, count_name: str) -> tuple[int, int]:
  try:
    index, count = int(str(env[index_name])), int(str(env[count_name]))
  except ValueError:
    raise RuntimeError(f"{index_name}={env[index_name]!r} and {count_name}={env[count_name]!r} "
                       "must be whole numbers.") from None
  if not 0 <= index < count:
    raise RuntimeError(
        f"{index_name}={index} must be at least 0 and less than {count_name}={count}.")
  return index, count


def _checked_address(address: str) -> str:
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise RuntimeError(
        f"{ADDRESS}={address!r} must be host:port of process 0, for example 10.0.0.1:12345.")
  return address


def _port_of_job(env: Mapping[str, str], index_name: str) -> int:
  """Returns a port that all processes of one MPI job on one host derive alike, other jobs most
  likely not: by the job's name or, since MPICH gives it none, by its launcher."""
  name = env.get("PMIX_NAMESPACE") or env.get("PMI_JOBID") or f"{_launcher(index_name)}"
  return 61440 + zlib.crc32(name.encode()) % 4096


def _launcher(variable: str) -> int:
  """Returns the process that gave this one a variable: the nearest above it that has none itself.
  Shells may be between them. 0 where there is no /proc."""
  pid = os.getppid()
  try:
    while pid and f"\0{variable}=".encode() in b"\0" + _of_process(pid, "environ"):
      # After its name, which may be anything: its state, its parent.
      pid = int(_of_process(pid, "stat").rpartition(b")")[2].split()[1])
  except OSError:
    return 0
  return pid


def _of_process(pid: int, name: str) -> bytes:
  return pathlib.Path(f"/proc/{pid}/{name}").read_bytes()


def in_a_cluster(env: Mapping[str, str]) -> bool:
  """Returns whether variables say that this process is one of a job that JAX detects by itself."""
  return any(name in env for name in ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", POD_INDEX))


def refuse_to_split(env: Mapping[str, str]) -> None:
  """Raises RuntimeError, or warns, where one job would silently become many jobs of one process."""
  if int(env.get("SLURM_NTASKS") or 1) > 1 and "SLURM_STEP_NODELIST" not in env:
    _log.warning("SLURM gave this job %s tasks, but this process was not started by srun and runs "
                 "alone. Start it with: srun python ...", env["SLURM_NTASKS"])
  if "KUBERNETES_SERVICE_HOST" in env and POD_INDEX in env:
    raise RuntimeError(
        f"This is a pod of an indexed Kubernetes Job, but neither {ADDRESS} and {COUNT} are set "
        "nor is the `kubernetes` package installed, with which JAX could ask the cluster. Set the "
        "two in the manifest (docs/examples/job.yaml), or pip install jax[k8s].")


def address_of(host: str) -> str | None:
  """Returns the first IP address that a name resolves to, or None."""
  try:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
  except OSError:
    return None


def is_own(address: str) -> bool:
  """Returns whether an IP address is one of this host's."""
  family = socket.AF_INET6 if ":" in address else socket.AF_INET
  try:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind((address, 0))
  except OSError:
    return False
  return True


def address_towards(host: str) -> str | None:
  """Returns the address of this host on the way to `host`; nothing is sent."""
  target = address_of(host)
  if target is None:
    return None
  family = socket.AF_INET6 if ":" in target else socket.AF_INET
  try:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
      probe.connect((target, 9))
      return str(probe.getsockname()[0])
  except OSError:
    return None


def better_address(hostname: str, coordinator: str) -> str | None:
  """Returns the address gloo should listen on, or None where the one it takes by itself is good, by
  this host's name and "host:port" of process 0."""
  own = address_of(hostname)
  towards = address_towards(coordinator.rpartition(":")[0].strip("[]"))
  if own is None or not is_own(own):
    return towards
  if (towards and ipaddress.ip_address(own).is_loopback
      and not ipaddress.ip_address(towards).is_loopback):
    return towards
  return None


def choose_address() -> None:
  """Moves gloo to an address that works, where its own does not.

  gloo takes the address that the host's name resolves to. On a laptop or in a container the name
  may resolve to nothing, and on a Debian host to 127.0.1.1, which no other host can reach. Both are
  found out here before gloo fails on them.

  Raises:
    RuntimeError: if this host's name does not resolve and this JAX offers no way to do without.
  """
  coordinator = client.coordinator_address()
  hostname = socket.gethostname()
  if coordinator is None or (address := better_address(hostname, coordinator)) is None:
    return
  try:
    client.bind_gloo_to(address)
  except (AttributeError, ImportError, TypeError) as error:
    if address_of(hostname) is None:
      raise RuntimeError(f"this host's name, {hostname}, resolves to no address, which gloo needs. "
                         f"Add a line `{address} {hostname}` to /etc/hosts.") from error


def end_when_failed() -> None:
  """Has an uncaught exception end this process, if it has joined a job, without JAX's own exit.

  That waits, for minutes, until all processes have come to theirs, and they wait in a collective
  for this one. What was registered with `atexit` since JAX was imported runs. Calling it again does
  nothing.
  """
  _end_when_failed(os.getpid())


@functools.cache
def _end_when_failed(owner: int) -> None:
  before = sys.excepthook
  failed = False

  def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    nonlocal failed
    failed = os.getpid() == owner  # a forked child is not the process that joined
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C again, while the traceback is printed
      before(kind, error, trace)

  def leave() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()
    os._exit(1)

  def end() -> None:
    if failed and os.getpid() == owner and process_count() > 1:
      client.exit_by(leave)

  sys.excepthook = hook
  atexit.register(end)


_TOO_LATE = "must be called before"  # in the message of jax.distributed.initialize


def initialize(timeout: float = 300.0) -> Place:
  """Joins this process to its job, whatever started it. Call it before anything that uses a device.

  Looks, in this order, for the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
  JAX_PROCESS_ID (`jaxpace run` sets them), for what `jax.distributed.initialize` detects by
  itself, and for the variables of other MPI launchers. Finding none of them it does nothing: the
  process is a job of its own. Calling it again does nothing.

  CPU collectives across processes go through gloo unless `jax_cpu_collectives_implementation` says
  otherwise. An uncaught exception ends a joined process without the wait for its peers that JAX
  does at exit (they wait for this one: that would take minutes); what was registered with `atexit`
  since JAX was imported runs. A process that leaves early by `sys.exit` does wait for its peers:
  let it raise instead.

  Args:
    timeout: seconds to wait for the other processes.

  Returns:
    The place of this process.

  Raises:
    RuntimeError: if a device has been used already, or the job's variables contradict each other.
    TimeoutError: if process 0 cannot be reached.
  """
  if jax.distributed.is_initialized():
    return Place(process_index(), process_count(), "joined", coordinator_address())
  place = place_from_environment(environ)
  with _explained():
    if _cpu_collectives() is None:
      jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if place is not None:
      assert place.coordinator is not None
      if place.index != 0:
        _wait_for_coordinator(place, timeout)
      jax.distributed.initialize(
          place.coordinator, place.count, place.index, initialization_timeout=math.ceil(timeout),
          # else SLURM_LOCALID and the like of an outer job choose the GPUs; JAX_LOCAL_DEVICE_IDS
          # still may
          cluster_detection_method="deactivate")
    elif _joined_by_detection(timeout):
      place = Place(process_index(), process_count(), "cluster", coordinator_address())
    else:
      refuse_to_split(environ)
      return Place(0, 1, "alone")
  if _cpu_collectives() == "gloo":
    choose_address()
  end_when_failed()
  return place


def _cpu_collectives() -> str | None:
  return getattr(jax.config, "jax_cpu_collectives_implementation", None)


def _joined_by_detection(timeout: float) -> bool:
  try:
    jax.distributed.initialize(initialization_timeout=math.ceil(timeout))
  except ValueError as error:
    if "must be defined" in str(error) or "should be defined" in str(error):
      if environ.get(ADDRESS):
        raise RuntimeError(f"{ADDRESS} is set, but nothing says how many processes there are or "
                           f"which one this is. Set {COUNT} and {INDEX} as well.") from error
      return False
    raise
  except RuntimeError as error:
    if _TOO_LATE in str(error) and not in_a_cluster(environ) and jax.default_backend() != "tpu":
      return False  # nothing to join, so nothing is lost: a notebook, or a second call
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
          f"process {place.index} of {place.count} waited {timeout:g} s for process 0 at "
          f"{place.coordinator} ({reason}). Is process 0 running, does its host have this address, "
          "and is the port open between the hosts?")
    time.sleep(0.1)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
  """Puts JAX's errors of joining into words that name the usual mistake."""
  try:
    yield
  except RuntimeError as error:
    if _TOO_LATE not in str(error):
      raise
    raise RuntimeError(
        "jaxpace.distributed.initialize() comes too late: a device has been used already, so this "
        "process cannot join the job any more. Call it first in main(), before any jnp operation, "
        "jax.devices(), jax.random.key() and the like, also those at the top of "
        "imported modules.") from error
