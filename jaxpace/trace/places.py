"""Writes down where a process of a recorded run runs, see `jaxpace.hosts.locality`.

Trouble is one quiet line, no error.
"""

from __future__ import annotations

import logging
import pathlib

import jax

from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality import job, nvml
from jaxpace.hosts.locality.read import read_locality
from jaxpace.hosts.locality.types import Locality
from jaxpace.trace import rundir

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


def gauges(place: Locality) -> nvml.Gauges | None:
  """Clock and power of the GPUs that this process's devices are on; None without such GPUs or
  NVML."""
  own = {device.gpu for device in place.devices if device.gpu}
  module = nvml.load() if own else None
  return nvml.Gauges(module, own) if module is not None else None
