"""What a run and its processes are, for `run.json` and `process/<process>.json`; and how processes agree on it."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxpace import distributed
from jaxpace.core.recordable import Recordable
from jaxpace.trace import rundir, schema

_PACKAGES = ("jaxpace", "jax", "jaxlib", "flax", "numpy", "pyarrow")


def process(identity: rundir.RunIdentity, index: int) -> dict[str, Any]:
  """Describes this process. Its two clocks are read together, so that absolute times can be told approximately."""
  return {
      "schema_version": schema.SCHEMA_VERSION, "run": identity.run, "attempt": identity.attempt, "process": index,
      "hostname": socket.gethostname(), "pid": os.getpid(), "ranks": [],
      "started": {"monotonic_ns": time.monotonic_ns(), "wall_ns": time.time_ns()},
  }


def run(identity: rundir.RunIdentity, paced: Recordable, config: Mapping[str, Any] | None,
        directory: pathlib.Path) -> dict[str, Any]:
  """Describes the run, all but the plan, which is not known before the first trace.

  Args:
    identity: run id and attempt.
    paced: the instrumented function, which says with which clock, sharing and pacer it was made.
    config: the program's configuration.
    directory: run directory; earlier attempts of the same run are taken over from its `run.json`.
  """
  devices = jax.devices()
  earlier = rundir.read_json(directory / rundir.RUN_FILE) or {}
  attempts = earlier.get("attempts", []) if earlier.get("run") == identity.run else []
  settings = paced.settings_json()
  return {
      "schema_version": schema.SCHEMA_VERSION,
      "run": identity.run,
      "attempt": identity.attempt,
      "attempts": [*attempts, {"attempt": identity.attempt, "started_unix_ns": identity.started_unix_ns,
                               "processes": jax.process_count(), "devices": len(devices)}],
      "started_unix_ns": attempts[0]["started_unix_ns"] if attempts else identity.started_unix_ns,
      "versions": {"python": platform.python_version(), **_versions()},
      "platform": devices[0].platform,
      "device_kind": devices[0].device_kind,
      "processes": jax.process_count(),
      "devices": len(devices),
      "program": " ".join(sys.argv),
      "clock": settings.get("clock"),
      "pacer": settings.get("pacer"),
      "settings": settings,
      "config": _plain(config),
      "plan": None,
  }


def share(name: str, text: str | None, timeout: float) -> str | None:
  """Gives every process the text of process 0.

  Args:
    name: name of the text, the same in every process and used once.
    text: the text in process 0, None in the others.
    timeout: longest wait in seconds.

  Returns:
    The text; None if it did not come in time.
  """
  try:
    return distributed.share_string(name, text, timeout)
  except (TimeoutError, ConnectionError):
    return None


def _versions() -> dict[str, str]:
  versions = {}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return versions


def _plain(config: Mapping[str, Any] | None) -> Any:
  """Plain dicts and scalars of a configuration; what JSON can't hold becomes its `str` when it is written."""
  if config is None:
    return None
  to_dict = getattr(config, "to_dict", None)
  if to_dict is not None:
    return to_dict()
  return {str(key): _plain(value) if isinstance(value, Mapping) else value for key, value in config.items()}
