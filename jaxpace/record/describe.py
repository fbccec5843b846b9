"""What a run and its processes are, for `run.json` and `process/<process>.json`; where they run.

Trouble with where they run is one quiet line, no error.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import logging
import os
import pathlib
import platform
import socket
import sys
import types
from collections.abc import Mapping
from typing import Any

import jax

from jaxpace.core.observed import Recordable
from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality import job
from jaxpace.hosts.locality.read import Gauges, gauges_of, load_nvml, read_locality
from jaxpace.hosts.locality.types import Locality
from jaxpace.runs import rundir, schema

_DEEPEST = 20
"""Dicts and lists of a configuration inside each other, at most."""
_PACKAGES = ("jaxpace", "jax", "jaxlib", "flax", "numpy", "pyarrow")


def process(identity: rundir.RunIdentity, index: int) -> dict[str, Any]:
  """Describes this process."""
  return {
      "schema_version": schema.SCHEMA_VERSION, "run": identity.run, "attempt": identity.attempt,
      "process": index, "hostname": socket.gethostname(), "pid": os.getpid(), "ranks": [],
      "processes": jax.process_count(), "devices": jax.device_count(),
  }


def run(identity: rundir.RunIdentity, paced: Recordable, config: Any,
        directory: pathlib.Path) -> dict[str, Any]:
  """Describes the run, all but the plan, which is not known before the first trace.

  Args:
    paced: the instrumented function, which says with which clock, sharing and pacer it was made.
    config: the program's configuration.
    directory: run directory; earlier attempts of the same run are taken over from its `run.json`.
  """
  devices = jax.devices()
  earlier = rundir.read_json(directory / rundir.RUN_FILE) or {}
  attempts = (earlier.get("attempts") or []) if earlier.get("run") == identity.run else []
  settings = paced.settings_json()
  return {
      "schema_version": schema.SCHEMA_VERSION,
      "run": identity.run,
      "attempt": identity.attempt,
      "attempts": [*attempts,
                   {"attempt": identity.attempt, "started_unix_ns": identity.started_unix_ns,
                    "processes": jax.process_count(), "devices": len(devices)}],
      "started_unix_ns": attempts[0].get("started_unix_ns") if attempts
      else identity.started_unix_ns,
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


def _versions() -> dict[str, str]:
  versions = {}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return versions


def check_config(config: Any) -> None:
  """Checks that a configuration has names for its values.

  Raises:
    TypeError: it has none.
  """
  if config is not None and _named(config) is None:
    raise TypeError("config takes names with values: a dict, an ml_collections.ConfigDict, a "
                    "dataclass, an argparse.Namespace or, of absl, flags.FLAGS.flag_values_dict(). "
                    f"This is a {type(config).__name__}.")


def _named(value: Any) -> Mapping[Any, Any] | None:
  """The value as a mapping, where it is something like one; else None."""
  if isinstance(value, Mapping):
    return value
  if isinstance(value, type):
    return None
  if callable(to_dict := getattr(value, "to_dict", None)):
    made = to_dict()
    return made if isinstance(made, Mapping) else None
  if dataclasses.is_dataclass(value):
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
  return vars(value) if isinstance(value, argparse.Namespace | types.SimpleNamespace) else None


def _plain(value: Any, inside: tuple[int, ...] = ()) -> Any:
  """Plain dicts, lists and scalars of a configuration; what JSON can't hold becomes its `str` when
  it is written."""
  if id(value) in inside or len(inside) > _DEEPEST:
    return "..."
  inside = (*inside, id(value))
  if isinstance(value, list | tuple):
    return [_plain(entry, inside) for entry in value]
  named = _named(value)
  return (value if named is None
          else {str(key): _plain(entry, inside) for key, entry in named.items()})


_LOG = logging.getLogger("jaxpace")


def read(process: int) -> Locality:
  """Reads where this process and its devices are; empty, with one line in the log, if that
  fails."""
  try:
    return read_locality(process=process, devices=jax.local_devices())
  except Exception as error:
    _LOG.info("Where this process runs could not be read: %s: %s", type(error).__name__, error)
    return Locality(process=process)


def write(directory: pathlib.Path, run: str, place: Locality) -> None:
  """Writes `locality/<process>.json`."""
  try:
    rundir.write_json(directory / job.FOLDER / f"{place.process}.json",
                      {"run": run, **to_plain(place)})
  except Exception as error:
    _LOG.info("Where this process runs could not be written: %s: %s", type(error).__name__, error)


def gauges(place: Locality) -> Gauges | None:
  """Clock and power of the GPUs that this process's devices are on; None without such GPUs or
  NVML."""
  own = {device.gpu for device in place.devices if device.gpu}
  module = load_nvml() if own else None
  return gauges_of(module, own) if module is not None else None
