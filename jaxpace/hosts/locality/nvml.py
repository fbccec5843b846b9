"""What NVIDIA's management library says, where `nvidia-ml-py` is installed. It is never required.

Source: NVML API reference; `nvidia-ml-py` is its binding, a module called `pynvml`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from typing import Any

from jaxpace.hosts.locality.types import Gpu

_MAX_LINKS = 18


def load() -> Any | None:
  """The module, initialised; None where it or a driver is missing."""
  try:
    module: Any = importlib.import_module("pynvml")
    module.nvmlInit()
  except Exception:  # ImportError, NVMLError of many kinds, OSError of a broken library
    return None
  return module


def read_gpus(module: Any) -> tuple[list[Gpu], list[str]]:
  """GPUs by PCI bus id, and what could not be read."""
  gpus, notes = [], []
  for index, (handle, address) in enumerate(_found(module)):
    if address is None:
      notes.append(
          f"The driver's GPU {index} does not answer: is it lost, or not permitted to "
          "this process?")
      continue
    gpus.append(Gpu(address,
                    _text(_ask(module.nvmlDeviceGetName, handle)),
                    _text(_ask(module.nvmlDeviceGetUUID, handle)), nvlinks=_links(module, handle)))
  return gpus, notes


class Gauges:
  """SM clock and power of GPUs, read again and again."""

  def __init__(self, module: Any, wanted: Collection[str] = ()):
    """Takes the GPUs with these PCI bus ids; all of them if none is given."""
    self._module = module
    self._handles = [handle for handle, address in _found(module)
                     if address is not None and (not wanted or address in wanted)]

  def read(self) -> tuple[float | None, float | None]:
    """The lowest SM clock in MHz, and the mean power in W; None where no GPU says."""
    module = self._module
    clocks = [_ask(module.nvmlDeviceGetClockInfo, handle, module.NVML_CLOCK_SM)
              for handle in self._handles]
    powers = [_ask(module.nvmlDeviceGetPowerUsage, handle) for handle in self._handles]
    known = [power / 1e3 for power in powers if power is not None]
    return (min((float(clock) for clock in clocks if clock is not None), default=None),
            sum(known) / len(known) if known else None)


def bus_id(text: str) -> str:
  """A PCI bus id as sysfs writes it.

  >>> bus_id("00000000:3B:00.0")
  '0000:3b:00.0'
  """
  domain, colon, rest = text.strip().lower().partition(":")
  return (f"{domain[-4:]}:{rest}" if colon and len(domain) == 8 and domain.startswith("0000")
          else text.strip().lower())


def _found(module: Any) -> Iterator[tuple[Any, str | None]]:
  """Each GPU's handle and bus id; None where it does not answer."""
  for index in range(_ask(module.nvmlDeviceGetCount) or 0):
    handle = _ask(module.nvmlDeviceGetHandleByIndex, index)
    info = _ask(module.nvmlDeviceGetPciInfo, handle) if handle is not None else None
    yield handle, None if info is None else bus_id(_text(info.busId) or "")


def _links(module: Any, handle: Any) -> int | None:
  states = [_ask(module.nvmlDeviceGetNvLinkState, handle, link) for link in range(_MAX_LINKS)]
  return None if all(state is None for state in states) else sum(1 for state in states if state)


def _ask(function: Any, *arguments: Any) -> Any:
  try:
    return function(*arguments)
  except Exception:  # NVMLError: not supported, no permission, GPU is lost
    return None


def _text(value: Any) -> str | None:
  """Older bindings return bytes."""
  return value.decode(errors="replace") if isinstance(value, bytes) else value
