"""A process's place in its job, as environment variables tell it. Imports nothing of JAX."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from jaxpace.hosts.launch.environment import ADDRESS, COUNT, INDEX

_log = logging.getLogger("jaxpace")
POD_INDEX = "JOB_COMPLETION_INDEX"  # an indexed Kubernetes Job sets it in every pod
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI 5
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)


@dataclasses.dataclass(frozen=True)
class Place:
  """A process's place in its job.

  Attributes:
    index: 0 to count - 1.
    count: number of processes.
    source: what told it: "environment" (`jaxpace run`, or the variables set by hand), "cluster"
      (JAX's own detection of SLURM, Open MPI, Kubernetes or Cloud TPU), "mpi" (Open MPI 5 and other
      MPIs), "joined" (`jax.distributed` was initialized before) or "alone".
    coordinator: "host:port" of process 0 where it is known here.
  """

  index: int
  count: int
  source: str
  coordinator: str | None = None


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
      raise RuntimeError(f"{' and '.join(n for n in given if n not in missing)} set, but not "
                         f"{' and '.join(missing)}. Set all three (`jaxpace run` does), or none "
                         "to let JAX detect the cluster.")
    return Place(*_numbers(given, INDEX, COUNT), "environment",
                 _checked_address(str(given[ADDRESS])))
  if "OMPI_MCA_orte_hnp_uri" in env:  # Open MPI 4 and older: JAX detects them itself
    return None
  for count_name, index_name, local_name in _MPI_VARIABLES:
    if env.get(count_name, "1") == "1" or index_name not in env or "SLURM_STEP_NODELIST" in env:
      continue
    address = env.get(ADDRESS)
    if not address and env.get(local_name) == env[count_name]:
      address = f"127.0.0.1:{_port_of_job(env)}"
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


def _port_of_job(env: Mapping[str, str]) -> int:
  """Returns a port that all processes of one MPI job on one host derive alike, other jobs most
  likely not."""
  name = env.get("PMIX_NAMESPACE") or env.get("PMI_ID") or env.get("PMI_JOBID") or "mpi"
  return 61440 + sum((position + 1) * ord(letter) for position, letter in enumerate(name)) % 4096


def in_a_cluster(env: Mapping[str, str]) -> bool:
  """Returns whether variables say that this process is one of a job that JAX detects by itself."""
  return any(name in env for name in ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", POD_INDEX))


def refuse_to_split(env: Mapping[str, str]) -> None:
  """Raises, or warns, where one job would silently become many jobs of one process.

  Raises:
    RuntimeError: in a pod of an indexed Job that says nothing of the others.
  """
  if int(env.get("SLURM_NTASKS") or 1) > 1 and "SLURM_STEP_NODELIST" not in env:
    _log.warning("SLURM gave this job %s tasks, but this process was not started by srun and runs "
                 "alone. Start it with: srun python ...", env["SLURM_NTASKS"])
  if "KUBERNETES_SERVICE_HOST" in env and POD_INDEX in env:
    raise RuntimeError(
        f"This is a pod of an indexed Kubernetes Job, but neither {ADDRESS} and {COUNT} are set "
        "nor is the `kubernetes` package installed, with which JAX could ask the cluster. Set the "
        "two in the manifest (docs/examples/job.yaml), or pip install jax[k8s].")
