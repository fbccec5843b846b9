"""One rank of a job in the lab: a train step of known compute time and gradient, run as often as it
is told.

Started by `jobs.TrainingJob`, which talks to it in JSON, a line each way: a request on stdin, an
answer on stdout. So one process serves many runs, and nothing is compiled twice. The compute is a
delay inside the compiled step, so that a machine with few cores does not set the pace; the gradient
is real, in several buckets, each summed by itself, in order.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.labs.fabric import controls
from jaxpace.core.types import Pacer
from jaxpace.step.instrument import Instrumented

_AHEAD = 4  # steps that may be under way at once
COPIED_STEPS = 256
"""Steps between two copies of what was stamped; a shorter run is copied, and written, when it is
over."""


@dataclasses.dataclass(frozen=True)
class Work:
  """What a step costs.

  Attributes:
    compute_ms: mean time of forward and backward pass, ms.
    jitter: standard deviation of it, as a share of it; drawn for each rank and step.
    gradient_kb: KB (1,000 bytes) of gradient, all buckets together.
    buckets: parts that the gradient is summed in.
  """

  compute_ms: float
  jitter: float
  gradient_kb: float
  buckets: int


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of the steps, on every rank of a job alike.

  Attributes:
    directory: where it is recorded.
    steps: how many.
    pacer: a key of `PACERS`.
    start_ns: when to begin, on the machine's monotonic clock, which all hosts of a lab share.
    seed: of the jitter.
  """

  directory: str
  steps: int
  pacer: str
  start_ns: int
  seed: int


PACERS: dict[str, Callable[..., Pacer | None]] = {
    "none": lambda key: None, "interleave": jaxpace.interleave_jobs,
    "random": controls.move_at_random, "turns": jaxpace.take_turns,
    "guarded": controls.guarded_turns}
"""The controls that are compared, made from the job's own key and settings. A run may ask for one
by a name of its own, "turns:message" for one of `turns`."""


def make_step(work: Work) -> tuple[Callable[..., Any], dict[str, np.ndarray]]:
  """Makes the per-device step `(params, seconds) -> (params, loss)` and its parameters.

  Args:
    work: what it costs.
  """
  length = round(1e3 * work.gradient_kb / work.buckets / 4)
  params = {f"bucket{k}": np.linspace(0, 1, length, dtype=np.float32) for k in range(work.buckets)}

  def loss_fn(params: dict[str, jax.Array], seconds: jax.Array) -> jax.Array:
    scale = jaxpace.delay(jnp.float32(1), seconds[0])
    return jnp.stack([jnp.mean((scale - value) ** 2) for value in params.values()]).sum()

  def step(params: dict[str, jax.Array],
           seconds: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    # Without pcast JAX would sum the gradients by itself, all in one.
    loss, grads = jax.value_and_grad(loss_fn)(jax.lax.pcast(params, "data", to="varying"), seconds)
    new, before = {}, jnp.float32(0)
    for name in params:
      # A bucket waits for the one before it, as layers do in a backward pass; else all go in one
      # message.
      grad = jnp.where(jnp.isnan(before), jnp.float32(0), grads[name])
      mean = jaxpace.pmean(grad, "data", name=name)
      new[name], before = params[name] - jnp.float32(1e-3) * mean, mean[0]
    return new, loss[None]  # each rank's own: a sum of it would be one more message

  return step, params


class Rank:
  """The steps of one rank, compiled once for each pacer that `prepare` is asked for."""

  def __init__(self, work: Work, key: int):
    self.work, self.key = work, key
    self.mesh: Mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    self.index = jax.process_index()
    self.bare, self.start = make_step(work)
    self.paced: dict[str, Instrumented] = {}
    self.step: dict[str, Callable[..., Any]] = {}

  def prepare(self, pacer: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Compiles the step with a pacer and runs it a few times; returns what its plan says."""
    make = PACERS[pacer.split(":")[0]]
    paced = jaxpace.instrument(self.bare, "data", make(key=self.key, **settings), share=True,
                               rows=2 * COPIED_STEPS)
    spec = jaxpace.spec(self.mesh)
    self.paced[pacer] = paced
    self.step[pacer] = jax.jit(
        jax.shard_map(paced, mesh=self.mesh, in_specs=(spec, P(), P("data")),
                      out_specs=(spec, (P(), P("data")))),
        donate_argnums=(0, 1))
    nothing = self._put(np.zeros(jax.device_count(), np.float32), P("data"))
    pace, params = paced.init(self.mesh), self._put(self.start, P())
    for _ in range(3):
      pace, (params, _) = self.step[pacer](pace, params, nothing)
    jax.block_until_ready(pace)
    assert paced.plan is not None
    return {"collectives": [dataclasses.asdict(c) for c in paced.plan.collectives],
            "share": paced.plan.share, "clock": paced.plan.clock}

  def run(self, run: Run) -> dict[str, Any]:
    """Runs the steps from `run.start_ns` on.

    Returns:
      Wall-clock nanoseconds of the first dispatch and the last result.
    """
    paced, step = self.paced[run.pacer], self.step[run.pacer]
    seconds = self._compute_times(run)
    pace, params = paced.init(self.mesh), self._put(self.start, P())
    under_way: list[Any] = []
    # All ranks of all jobs are on one machine: what their recorders write each second, with the
    # jobs' own precedence, would be pauses of 10 to 30 ms in the other job's sending.
    with jaxpace.Recorder(run.directory, paced, every_seconds=600, hosts=False) as recorder:
      time.sleep(max(0.0, 1e-9 * (run.start_ns - time.monotonic_ns())))
      began = time.monotonic_ns()
      for k in range(run.steps):
        pace, (params, loss) = step(pace, params, seconds[k])
        recorder.record(pace)
        under_way.append(loss)
        if len(under_way) > _AHEAD:
          jax.block_until_ready(under_way.pop(0))
      jax.block_until_ready(pace)
      ended = time.monotonic_ns()
    return {"began_ns": began, "ended_ns": ended, "lost": recorder.lost.get("stopped")}

  def _compute_times(self, run: Run) -> list[jax.Array]:
    """[ranks] seconds for each step; this process holds its own."""
    rng = np.random.default_rng([run.seed, self.key, self.index])
    drawn = 1e-3 * self.work.compute_ms * (1 + self.work.jitter * rng.standard_normal(run.steps))
    own = np.maximum(drawn, 0).astype(np.float32)
    sharding = NamedSharding(self.mesh, P("data"))
    return [jax.make_array_from_process_local_data(sharding, own[k:k + 1])
            for k in range(run.steps)]

  def _put(self, tree: Any, spec: Any) -> Any:
    sharding = NamedSharding(self.mesh, spec)
    return jax.tree.map(lambda leaf: jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: leaf[index]), tree)


def main() -> None:
  """Answers requests until stdin ends."""
  jaxpace.distributed.initialize()
  setting = json.loads(sys.argv[1])
  rank = Rank(Work(**setting["work"]), setting["key"])
  for line in sys.stdin:
    request = json.loads(line)
    _say({"ready": rank.prepare(**request)} if "settings" in request
         else {"done": rank.run(Run(**request))})


def _say(answer: dict[str, Any]) -> None:
  print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  main()
