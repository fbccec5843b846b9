"""Progress and metrics of a training run, from process 0 only."""

from __future__ import annotations

import collections
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax

IN_FLIGHT = 8
"""Steps a process may run ahead of its devices. More gain nothing, and where several devices share
the threads of one process (`--xla_force_host_platform_device_count`), XLA's CPU client hangs with
some 30 steps in flight."""


class Writer:
  """Prints progress, and writes scalars to TensorBoard where tensorboardX is installed.

  Anything with `write_scalars(step, scalars)` can stand in for it. On processes other than 0 it
  writes nothing. On all of them it keeps the host at most `IN_FLIGHT` steps ahead of the devices.
  """

  def __init__(self, workdir: str, log_every: int) -> None:
    """Opens `workdir/tensorboard`.

    Args:
      workdir: directory of the run, made if it is missing.
      log_every: steps between two lines; the steps between cost nothing and stay on the device.
    """
    self._log_every = log_every
    self._active = jax.process_index() == 0
    self._workdir = pathlib.Path(workdir)
    self._tensorboard: Any = None
    self._in_flight: collections.deque[Mapping[str, Any]] = collections.deque()
    if self._active:
      self._workdir.mkdir(parents=True, exist_ok=True)
      try:
        import tensorboardX
      except ImportError:
        print("tensorboardX is not installed: progress is printed, not kept.", flush=True)
      else:
        self._tensorboard = tensorboardX.SummaryWriter(str(self._workdir / "tensorboard"))
    self._last_step, self._last_time = 0, time.monotonic()

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Logs one step in `log_every`; that one waits for its values.

    Args:
      step: index of the step, from 1.
      scalars: scalars by name, replicated over the devices if they are jax arrays.
    """
    self._in_flight.append(scalars)
    if len(self._in_flight) > IN_FLIGHT:
      jax.block_until_ready(self._in_flight.popleft())
    if not self._active or (step % self._log_every and step != 1):
      return
    values = {name: float(value) for name, value in scalars.items()}
    now = time.monotonic()
    step_time = (now - self._last_time) / (step - self._last_step)
    self._last_step, self._last_time = step, now
    if step == 1:
      print(f"step {1:>6}  " + _line(values) + f"  compiled and run in {step_time:.1f} s",
            flush=True)
    else:
      values["step_time_ms"] = 1e3 * step_time
      print(f"step {step:>6}  " + _line(values), flush=True)
    if self._tensorboard is not None:
      for name, value in values.items():
        self._tensorboard.add_scalar(name, value, step)

  def summary(self, scalars: Mapping[str, float]) -> None:
    """Prints the final figures and writes them to `workdir/result.json`."""
    if not self._active:
      return
    print("done         " + _line(scalars), flush=True)
    (self._workdir / "result.json").write_text(json.dumps(dict(scalars)) + "\n")

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_: object) -> None:
    if self._tensorboard is not None:
      self._tensorboard.close()


def _line(values: Mapping[str, float]) -> str:
  return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
