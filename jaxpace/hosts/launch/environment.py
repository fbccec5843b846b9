"""The environment of a worker: its place, devices and threads; the coordinator's port."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Mapping

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
LAUNCH_ID = "JAXPACE_LAUNCH_ID"
"""Marks every process a launch started, grandchildren included: what is left of a launch is found
by it."""
RUN, MATCH, EXACT = "JAXPACE_RUN", "JAXPACE_RUN_MATCH", "JAXPACE_EXACT"
"""The run directory to record to, a pattern of the names of the step's programs, and whether to
compare their first executions bit for bit."""
UNNAMED = "JAXPACE_RUN_UNNAMED"
"""Whether the run directory is one that nobody named: all processes then take process 0's name."""
UNSEEN = "JAXPACE_RUN_UNSEEN"
"""A file that is there as long as no process of a command was seen by `jaxpace run`, but workers
perhaps, which write into it."""
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
LOOPBACK = "127.0.0.1"
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI 5
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
"""In which MPI launchers say how many processes there are, which this is, and how many are on its
host."""


def started_together(env: Mapping[str, str]) -> int:
  """Returns of how many processes that a launcher started this one is, as far as variables say."""
  names = (COUNT, "SLURM_STEP_NUM_TASKS", *(count for count, _, _ in MPI_VARIABLES))
  return max(int(text) if (text := env.get(name, "")).isdecimal() else 1 for name in names)


def reserve_port(port: int = 0) -> socket.socket:
  """Holds a TCP port of the loopback interface, any free one for 0, for the coordinator of process
  0; closing the socket lets it go. Raises OSError where it is taken or not allowed.

  The socket is bound and never listens, with SO_REUSEPORT: gRPC servers bind with it too, so
  process 0 can listen on the port while nobody else is given it.
  """
  # SO_REUSEPORT would share a port that a server of this user listens on: ask without it first.
  if port:
    with socket.socket() as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      probe.bind((LOOPBACK, port))
  held = socket.socket()
  try:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((LOOPBACK, port))
  except OSError:
    held.close()
    raise
  return held


def with_device_count(xla_flags: str, devices: int) -> str:
  """Returns XLA_FLAGS in which the number of CPU devices is `devices`, whatever it was before."""
  kept = [flag for flag in shlex.split(xla_flags) if flag.partition("=")[0] != DEVICE_COUNT_FLAG]
  return " ".join([*map(shlex.quote, kept), f"{DEVICE_COUNT_FLAG}={devices}"])


def count_gpus(env: Mapping[str, str], device_directory: str = "/dev") -> int:
  """Returns the number of NVIDIA GPUs that this environment may use; no driver is loaded to find
  out."""
  visible = env.get("CUDA_VISIBLE_DEVICES")
  if visible is not None:
    return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
  try:
    return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(device_directory))
  except OSError:
    return 0


def threads_for(nproc: int, devices: int, cores: int) -> int | None:
  """Returns the XLA CPU threads a worker should have, or None where XLA's own choice (one a core)
  does no harm.

  Every XLA CPU client starts a thread for each core, so N workers start N times too many. Each
  device needs one of them, and one more must be left: a host callback occupies a thread and may
  need another for its operands.
  """
  threads = max(devices + 1, cores // nproc)
  return threads if threads < cores else None


def available_cores() -> int:
  """Returns the number of cores this process may run on."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def own_host(name: str) -> dict[str, str]:
  """Environment of a process that shares a GPU with others of this machine: a host of its own to
  NCCL, by this name, which takes memory as it needs it."""
  return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
          "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def worker_environment(base: Mapping[str, str], *, index: int, nproc: int, port: int,
                       launch_id: str, devices: int | None = None,
                       threads: int | None = None, gpus: int = 0) -> dict[str, str]:
  """Returns the environment of one worker.

  It looks like a SLURM step's, which `jax.distributed.initialize()` without arguments finds its
  place by. Processes that outnumber the GPUs share them: NCCL refuses two ranks of one host on one
  GPU, so each is a host of its own to NCCL, and collectives go through sockets.

  Args:
    base: environment to start from, usually the launcher's own.
    port: TCP port of the coordinator on the loopback interface.
    gpus: GPUs on this machine that may be shared out; 0 leaves the choice to JAX.

  Returns:
    The environment, a new dict.
  """
  env = dict(base)
  # Left over from an outer job these would win over ours in JAX's own detection, or move the
  # coordinator.
  for name in ("JAX_COORDINATOR_PORT", "JAX_PARTITION_INDEX", "JAX_SLICE_INDEX"):
    env.pop(name, None)
  address = f"{LOOPBACK}:{port}"
  env.update({ADDRESS: address, BIND_ADDRESS: address, COUNT: str(nproc), INDEX: str(index),
              LAUNCH_ID: launch_id})
  env.setdefault("PYTHONUNBUFFERED", "1")  # a log that ends 8 KB before the crash is no log
  if devices is not None:
    env["XLA_FLAGS"] = with_device_count(env.get("XLA_FLAGS", ""), devices)
    # wins over XLA_FLAGS, also where a script rewrites those
    env["JAX_NUM_CPU_DEVICES"] = str(devices)
  per_process = devices or 1
  if base.get("JAX_PLATFORMS", "").strip().lower() == "cpu":
    gpus = 0
  if gpus >= nproc * per_process and "JAX_LOCAL_DEVICE_IDS" not in base:
    first = index * per_process
    env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + per_process)))
  elif 0 < gpus < nproc and devices is None and "JAX_LOCAL_DEVICE_IDS" not in base:
    env["JAX_LOCAL_DEVICE_IDS"] = str(index % gpus)
    for name, value in own_host(f"{launch_id}-{index}").items():
      env.setdefault(name, value)
  if threads is not None and "NPROC" not in base and "PJRT_NPROC" not in base:
    env["PJRT_NPROC"] = str(threads)
  if gpus == 0 or "JAX_LOCAL_DEVICE_IDS" in env:
    env.update({"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": LOOPBACK,
                "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": str(nproc), "SLURM_PROCID": str(index),
                "SLURM_LOCALID": str(index), "JAX_COORDINATOR_PORT": str(port)})
  return env
