"""The short way: a step that records itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import jax

from jaxpace.core.observed import observed_function
from jaxpace.instrumentation import checks
from jaxpace.instrumentation.instrument import Instrumented
from jaxpace.observation.observe import observe
from jaxpace.observation.partitioned import compiling
from jaxpace.record.recorder import Recorder


class Recorded:
  """A step that records itself at each call while it is open; made by `recorded`.

  Attributes:
    recorder: the `jaxpace.Recorder` in use, for `measure` and `lost`.
    step: what `jaxpace.observe` returned; its `plan` says what was found in the step. The bare
      step where nothing is recorded; of an instrumented step the compiled function.
    pace: of an instrumented step, the pace state after the last call; checkpoint it, or replace it
      with a restored one. None of others.
  """

  def __init__(self, step: Callable[..., Any], recorder: Recorder, pace: Any = None) -> None:
    if pace is None:
      # With the attributes of what was jitted: libraries copy those of what they wrap. What was
      # instrumented has those of before its first trace.
      functools.update_wrapper(self, getattr(step, "jitted", step))
    self.step, self.recorder, self.pace = step, recorder, pace
    self._places: int | None = None if pace is None else pace.rank.shape[0]

  def __getattr__(self, name: str) -> Any:
    # Whatever else the step has: `lower`, `trace`, `plan`.
    if name == "step":
      raise AttributeError(name)
    return getattr(self.step, name)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs one step, records it, and returns what the bare step would have; only returns that while
    JAX traces.

    Raises:
      ValueError: an instrumented step was compiled for other arguments or results than the pace
        state and the bare step's, or drops some devices' part of the pace state.
    """
    if self.pace is None:
      out = self.step(*args, **kwargs)
      # Libraries trace a step for its shapes, before the loop or in it: no device runs it.
      if not compiling.tracing():
        self.recorder.record()
      return out
    try:
      self.pace, out = self.step(self.pace, *args, **kwargs)
    except ValueError as error:
      explained = checks.of_specs(error)
      if explained is None:
        raise
      raise ValueError(explained) from error
    if self._places is not None:
      checks.same_places(self.pace, self._places)
      self._places = None
    self.recorder.record()
    return out

  def open(self) -> Self:
    """Begins to record, where a `with` block does not fit the loop; returns the step."""
    self.recorder.open()
    return self

  def close(self) -> None:
    """Writes everything, as the end of the block does."""
    self.recorder.close()

  def __enter__(self) -> Self:
    return self.open()

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self.recorder.__exit__(kind, error, trace)


def recorded(directory: str | os.PathLike[str] | None, paced: Any,
             step: Callable[..., Any] | None = None, mesh: jax.sharding.Mesh | None = None, *,
             devices: Sequence[jax.Device] | None = None, **options: Any) -> Recorded:
  """Observes and records a jitted step, in one line.

      with jaxpace.recorded("runs/demo", step) as recorded_step:
        for batch in batches:
          state, metrics = recorded_step(state, batch)

  That is `jaxpace.observe(step)`, and a `Recorder` whose `record` is called after each step. For an
  instrumented step it makes `(pace, state, batch) -> (pace, out)` into `(state, batch) -> out`
  again, with the pace state kept in the object instead of threaded:

      step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                                   out_specs=(spec, P())))
      with jaxpace.recorded("runs/demo", paced, step, mesh) as step:
        for batch in batches:
          state, metrics = step(state, batch)

  Args:
    directory: run directory; None records nothing, and a jitted step runs without timestamps.
    paced: a jitted step, or what `jaxpace.observe` made of it; or what `jaxpace.instrument`
      returned, followed by
    step: the compiled function around it, called with the pace state first. It may donate it.
    mesh: of an instrumented step, the mesh of `jax.shard_map`.
    devices: for `jax.pmap` instead: `jax.local_devices()`.
    **options: options of `jaxpace.Recorder`, such as `config`.

  Returns:
    A context manager that yields the step.

  Raises:
    TypeError: the step is neither jitted nor instrumented.
    ValueError: of an instrumented step, neither or both of mesh and devices given.
  """
  if step is None and not isinstance(paced, Instrumented):
    if mesh is not None or devices is not None:
      raise TypeError(
          "jaxpace.recorded takes mesh and devices for an instrumented step; a jitted one has "
          "its own.")
    if directory is None:
      return Recorded(paced, Recorder(None, None, **options))
    observed = paced if observed_function(paced) else observe(paced)
    return Recorded(observed, Recorder(directory, observed, **options))
  if not isinstance(paced, Instrumented) or step is None:
    wrong = ("the third argument is missing" if step is None
             else f"the second argument is {type(paced).__name__}")
    raise TypeError("jaxpace.recorded takes a jitted step, recorded(directory, step); or what "
                    "jaxpace.instrument returned, and then the compiled function around it: "
                    f"recorded(directory, paced, step, mesh). Here {wrong}.")
  recorder = Recorder(directory, paced, **options)
  return Recorded(step, recorder, paced.init(mesh, devices=devices))
