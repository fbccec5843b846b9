"""The short way: a step that carries its own pace state and records it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import jax

from jaxpace.step import checks
from jaxpace.step.instrument import Instrumented
from jaxpace.trace.recorder import Recorder


class Recorded:
  """A compiled, instrumented step with the signature of the bare one; made by `recorded`.

  Attributes:
    pace: the pace state after the last call; checkpoint it, or replace it with a restored one.
    recorder: the `jaxpace.Recorder` in use, for `measure` and `lost`.
  """

  def __init__(self, step: Callable[..., Any], recorder: Recorder, pace: Any) -> None:
    self._step = step
    self.recorder = recorder
    self.pace = pace

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs one step, records it, and returns what the bare step would have.

    Raises:
      ValueError: the step was compiled for other arguments or results than the pace state and the bare step's.
    """
    try:
      self.pace, out = self._step(self.pace, *args, **kwargs)
    except ValueError as error:
      told = checks.of_specs(error)
      if told is None:
        raise
      raise ValueError(told) from error
    self.recorder.record(self.pace)
    return out

  def __enter__(self) -> Recorded:
    self.recorder.open()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self.recorder.__exit__(kind, error, trace)


def recorded(
    directory: str | os.PathLike[str] | None,
    paced: Instrumented,
    step: Callable[..., Any],
    mesh: jax.sharding.Mesh | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
    **options: Any,
) -> Recorded:
  """Makes `(pace, state, batch) -> (pace, out)` into `(state, batch) -> out` again, recorded while it is open.

      step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(spec, P())))
      with jaxpace.recorded("runs/demo", paced, step, mesh) as step:
        for batch in batches:
          state, metrics = step(state, batch)

  The same as `paced.init` and a `Recorder` by hand, with the pace state kept in the object instead of threaded.

  Args:
    directory: run directory; None records nothing.
    paced: what `jaxpace.instrument` returned.
    step: the compiled function around `paced`, called with the pace state first. It may donate it.
    mesh: the mesh of `jax.shard_map`.
    devices: for `jax.pmap` instead: `jax.local_devices()`.
    **options: options of `jaxpace.Recorder`, such as `config`.

  Returns:
    A context manager that yields the step.

  Raises:
    TypeError: `paced` is not an instrumented function.
    ValueError: neither or both of mesh and devices given.
  """
  if not isinstance(paced, Instrumented):
    raise TypeError("jaxpace.recorded takes what jaxpace.instrument returned, and then the compiled function around "
                    f"it: recorded(directory, paced, step, mesh). Its second argument is {type(paced).__name__}.")
  recorder = Recorder(directory, paced, **options)
  return Recorded(step, recorder, paced.init(mesh, devices=devices))
