"""The machine: GPU, driver, versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess

import jax

from experiments.labs.gpu.bench import Bench

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin",
             "jax-cuda12-pjrt", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-cublas",
             "nvidia-cublas-cu12", "triton", "numpy", "pyarrow", "absl-py", "rich", "scipy")
_ASKED = ("name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.draw,power.limit,"
          "compute_cap,persistence_mode")


def no_device(platform: str) -> str:
  """Why JAX has no device of this platform; empty where it has one."""
  try:
    return "" if jax.devices(platform) else "JAX lists none"
  except RuntimeError as error:
    return str(error).splitlines()[0]


def ask(command: list[str]) -> str:
  """What a command says, in one line; empty where it can't."""
  if shutil.which(command[0]) is None:
    return ""
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
  except (OSError, subprocess.SubprocessError):
    return ""
  return " ".join(done.stdout.split()) if done.returncode == 0 else ""


def run(bench: Bench) -> None:
  """Section machine."""
  device = bench.device()
  bench.figure("devices", f"{len(jax.devices(bench.platform))} × {device.device_kind}")
  bench.figure("compute capability", str(getattr(device, "compute_capability", "–")))
  bench.figure("platform version",
               str(getattr(device.client, "platform_version", "–")).replace("\n", " ")[:200])
  bench.figure("nvidia-smi", ask(["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"])
               or "–")
  bench.figure("nvcc", ask(["nvcc", "--version"])[-60:] or "–")
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      bench.figure(package, importlib.metadata.version(package))
  bench.figure("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") or "none")
  bench.figure("cores", os.cpu_count() or 0)
