"""One process of the fault lab: makes many runs in succession, each with a recorder and a directory
of its own.

Started by `cluster.Cluster`, which talks to it in JSON, a line each way: a run's spec on stdin; on
stdout the steps at which a fault begins or ends, and the end. Work is sleep inside the compiled
step, so that a machine with few cores does not set the pace. What was really slept, computed and
paused is read off the clock by this process itself, apart from anything the recorder timestamps,
and written to `injected/<process>.npz`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.labs.faults import places
from experiments.labs.faults.schedule import Schedule, schedule
from experiments.labs.faults.spec import Spec, from_json
from jaxpace.costs.bench import fit, host_of_processes, levels, measure, to_json
from jaxpace.costs.fabric_file import ALL_REDUCE
from jaxpace.live import probe as links
from jaxpace.observation.clocks import Clock, gate, resolve_clock, words

WORK, SPIN, EXTRA = range(3)
_HEAP_SECONDS = 5e-3  # a collection of the heap built here takes about as long
_CHECKPOINT_BYTES = 1 << 18
_SPUN = 256  # numbers a turn of the computation goes over
_LIMIT = 1.0  # s, no injected delay is longer
_REPEATS = 5
_PROBE_BYTES, _PROBE_REPEATS, _PROBE_SECONDS = 1 << 18, 3, 20.0


def slept_in(clock: Clock, values: list[jax.Array],
             seconds: jax.Array) -> tuple[list[jax.Array], jax.Array]:
  """Hands values on, with their gradients, after a sleep that begins once they are there; and how
  long it was: seconds between the delay's own two clock readings, float32 []."""
  before, after = clock.delay(seconds, _LIMIT, words.zero(), *map(jax.lax.stop_gradient, values))
  return gate(clock, after, values), words.seconds_between(before, after)


def make_step(clock: Clock) -> Callable[..., Any]:
  """Makes the per-device step `(state, asked) -> state`.

  `asked` is float32 [1, K, 3]: seconds of work, turns of computation and seconds of extra work in
  each step. The state holds the parameters, the number of the step and `spent`, float32 [1, K, 3]:
  seconds really spent on the three.
  """

  def spin(value: jax.Array, turns: jax.Array) -> tuple[jax.Array, jax.Array]:
    before = clock.timestamp(words.zero(), value)
    numbers, = gate(clock, before, [jnp.full(_SPUN, 0.5, jnp.float32) * value])
    numbers = jax.lax.fori_loop(0, turns.astype(jnp.int32),
                                lambda _, x: jnp.float32(3.7) * x * (1 - x), numbers)
    after = clock.timestamp(before, numbers)
    value, = gate(clock, after, [value])
    return value, words.seconds_between(before, after)

  def step(state: dict[str, jax.Array], asked: jax.Array) -> dict[str, jax.Array]:
    seconds = jax.lax.dynamic_index_in_dim(asked[0], state["step"], keepdims=False)

    def loss_fn(params: jax.Array) -> tuple[jax.Array, jax.Array]:
      [scale], worked = slept_in(clock, [jnp.float32(1)], seconds[WORK])
      scale, spun = spin(scale, seconds[SPIN])
      [scale], more = slept_in(clock, [scale], seconds[EXTRA])
      return jnp.mean((scale * params - 1) ** 2), jnp.stack([worked, spun, more])

    (_, spent), grad = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    grad = jax.lax.pmean(grad, "data")
    return {"params": state["params"] - jnp.float32(1e-3) * grad, "step": state["step"] + 1,
            "spent": jax.lax.dynamic_update_index_in_dim(state["spent"], spent[None], state["step"],
                                                         axis=1)}

  return step


class Process:
  """The lab's step, compiled once, and what pauses a process between steps."""

  def __init__(self, gradient_kb: float, steps: int, hosts_seconds: float):
    """Compiles.

    Args:
      gradient_kb: KB (1,000 bytes) that each rank sums with the others.
      steps: most steps a run may have.
      hosts_seconds: between two samples of the host's counters.
    """
    self.mesh: Mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    self.index, self.steps, self.hosts_seconds = jax.process_index(), steps, hosts_seconds
    self.length = round(1e3 * gradient_kb / 4)
    devices = list(self.mesh.devices.flat)
    self.own = [rank for rank, device in enumerate(devices) if device.process_index == self.index]
    self.step, self.pace = self._made(), None
    self.turns_per_second = 1e6
    self.turns_per_second = self._calibrate()

  def run(self, spec: Spec, directory: pathlib.Path,
          say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Makes one run.

    Args:
      spec: what to do.
      directory: of the run; the recording goes to `run/` in it.
      say: told `{"mark": step}` by process 0 when a fault begins or ends.

    Returns:
      Whether the recorder stopped, and why.
    """
    todo = schedule(spec)
    marks = ({step for fault in spec.faults for step in (fault.onset, fault.until)}
             if self.index == 0 else set())
    self.begin(spec, todo)
    ends, paused = (np.zeros(spec.steps, np.int64),
                    {cause: np.zeros(spec.steps) for cause in todo.pause})
    began = time.monotonic_ns()
    with self._recorder(directory / "run") as recorder:
      for k in range(spec.steps):
        if k in marks:
          say({"mark": k, "at_ns": time.monotonic_ns()})
        for cause, seconds in todo.pause.items():
          paused[cause][k] = self._pause(recorder, cause, float(seconds[self.index, k]), directory)
        self.one_step(recorder)
        ends[k] = time.monotonic_ns()
    if spec.probe:
      probe(directory / "run")
    if spec.misplaced is not None:
      places.write(directory / "run" / "locality" / f"{self.index}.json", spec, self.index,
                   self.own)
    self._write(directory / "injected" / f"{self.index}.npz", spec, todo, self.spent(), paused,
                began, ends)
    return {"stopped": getattr(recorder, "lost", {}).get("stopped")}

  def _made(self) -> Any:
    """The compiled step."""
    self.paced = jaxpace.instrument(make_step(resolve_clock()), "data", slots=2)
    spec, state = jaxpace.spec(self.mesh), {"params": P(), "step": P(), "spent": P("data")}
    return jax.jit(jax.shard_map(self.paced, mesh=self.mesh, in_specs=(spec, state, P("data")),
                                 out_specs=(spec, state), check_vma=False), donate_argnums=(0, 1))

  def _recorder(self, directory: pathlib.Path) -> Any:
    """What records a run while it is open."""
    return jaxpace.Recorder(directory, self.paced, hosts=self.hosts_seconds)

  def begin(self, spec: Spec, todo: Schedule) -> None:
    """Puts a run's schedule and a new state in place, and waits until they are there."""
    self._put_in_place(self._asked(todo))

  def _put_in_place(self, asked: jax.Array) -> None:
    self.asked, self.pace, self.state = asked, self.paced.init(self.mesh), self._state()
    jax.block_until_ready((self.asked, self.pace, self.state))

  def one_step(self, recorder: Any) -> None:
    """Runs and records a step, and waits for it."""
    self.pace, self.state = self.step(self.pace, self.state, self.asked)
    if recorder is not None:
      recorder.record()
    jax.block_until_ready(self.state)

  def spent(self) -> np.ndarray:
    """[own ranks, K, 3] seconds really spent in the steps of the run on work, computation and extra
    work."""
    shards = sorted(self.state["spent"].addressable_shards,
                    key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])

  def _write(self, path: pathlib.Path, spec: Spec, todo: Schedule, spent: np.ndarray,
             paused: dict[str, np.ndarray], began: int, ends: np.ndarray) -> None:
    found = spent[:, :spec.steps]
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"pause_{cause}": values for cause, values in paused.items()}
    np.savez(path, ranks=np.array(self.own), work=found[..., WORK], spin=found[..., SPIN],
             extra=found[..., EXTRA], work_asked=todo.work[self.own],
             spin_asked=todo.spin[self.own], extra_asked=todo.extra[self.own], began_ns=began,
             ends_ns=ends, **arrays)

  def _pause(self, recorder: Any, cause: str, seconds: float,
             directory: pathlib.Path) -> float:
    """Does what a cause is named after for about `seconds`; returns how long it took, by the
    monotonic clock."""
    if cause == "gc":
      start = time.monotonic_ns()
      if seconds > 0:
        gc.collect()
        while 1e-9 * (time.monotonic_ns() - start) < seconds - _HEAP_SECONDS / 2:
          gc.collect()
      return 1e-9 * (time.monotonic_ns() - start) if seconds > 0 else 0.0
    with getattr(recorder, "measure", contextlib.nullcontext)(cause):
      if seconds <= 0:
        return 0.0
      start = time.monotonic_ns()
      if cause == "checkpoint":
        (directory / f"checkpoint-{self.index}").write_bytes(bytes(_CHECKPOINT_BYTES))
      time.sleep(max(0.0, seconds - 1e-9 * (time.monotonic_ns() - start)))
      return 1e-9 * (time.monotonic_ns() - start)

  def _calibrate(self) -> float:
    """Turns of the computation a second; all processes call it together. Compiles the step."""
    best = 0.0
    for turns in (0.0, 2e3, 2e4, 2e4):
      asked = np.zeros((len(self.own), self.steps, 3), np.float32)
      asked[:, :2, SPIN] = turns
      self._put_in_place(self._put_own(asked))
      for _ in range(2):
        self.one_step(None)
      spun = float(self.spent()[:, :2, SPIN].min())
      best = max(best, turns / max(spun, 1e-6))
    return best

  def _asked(self, todo: Schedule) -> jax.Array:
    asked = np.zeros((len(self.own), self.steps, 3), np.float32)
    steps = todo.work.shape[1]
    asked[:, :steps, WORK], asked[:, :steps, EXTRA] = todo.work[self.own], todo.extra[self.own]
    asked[:, :steps, SPIN] = np.rint(todo.spin[self.own] * self.turns_per_second)
    return self._put_own(asked)

  def _state(self) -> dict[str, jax.Array]:
    whole = NamedSharding(self.mesh, P())
    start = np.linspace(0, 1, self.length, dtype=np.float32)
    return {"params": jax.make_array_from_callback(start.shape, whole, lambda index: start[index]),
            "step": jax.make_array_from_callback((), whole, lambda index: np.int32(0)),
            "spent": self._put_own(np.zeros((len(self.own), self.steps, 3), np.float32))}

  def _put_own(self, values: np.ndarray) -> jax.Array:
    return jax.make_array_from_process_local_data(NamedSharding(self.mesh, P("data")), values)


class UnchangedProcess(Process):
  """The same step as if jaxpace were not there, recorded by `jaxpace.observed` around the loop:
  nothing is wrapped, and the loop says nothing."""

  def __init__(self, gradient_kb: float, steps: int, hosts_seconds: float):
    """Compiles, watched; see `Process`."""
    with tempfile.TemporaryDirectory() as place, jaxpace.observed(pathlib.Path(place, "run")):
      super().__init__(gradient_kb, steps, hosts_seconds)

  def _made(self) -> Any:
    state = {"params": P(), "step": P(), "spent": P("data")}
    return jax.jit(jax.shard_map(make_step(resolve_clock()), mesh=self.mesh,
                                 in_specs=(state, P("data")), out_specs=state, check_vma=False),
                   donate_argnums=0)

  def _recorder(self, directory: pathlib.Path) -> Any:
    return jaxpace.observed(directory, hosts=self.hosts_seconds)

  def _put_in_place(self, asked: jax.Array) -> None:
    self.asked, self.state = asked, self._state()
    jax.block_until_ready((self.asked, self.state))

  def one_step(self, recorder: Any) -> None:
    """Runs a step, and waits for it."""
    self.state = self.step(self.state, self.asked)
    jax.block_until_ready(self.state)


PROCESSES = {"calls": Process, "unchanged": UnchangedProcess}
"""By how runs are recorded: with a call of `record` in each step, or from outside."""


def make_heap() -> list[Any]:
  """The heap that is collected on purpose; what JAX and the lab need is no part of it."""
  gc.collect()
  gc.freeze()
  gc.disable()
  return _heap_of(_HEAP_SECONDS)


def _heap_of(seconds: float) -> list[Any]:
  """Container objects that take Python's collector about so long to go over."""
  heap: list[Any] = [[i] for i in range(20_000)]
  taken = []
  for _ in range(5):
    start = time.perf_counter()
    gc.collect()
    taken.append(time.perf_counter() - start)
  heap.extend([i] for i in range(min(int(len(heap) * (seconds / max(min(taken), 1e-6) - 1)),
                                     1_000_000)))
  return heap


def bench(path: pathlib.Path, size: int) -> None:
  """Measures the all-reduce at sizes about `size` bytes, as `jaxpace bench` does; process 0 writes
  the file.

  All processes call it together, on a quiet fabric.
  """
  devices = jax.devices()
  groups, notes = levels([device.process_index for device in devices],
                         host_of_processes(socket.gethostname()))
  group = groups[-1]
  found = measure(ALL_REDUCE, group, [size // 2, size, 2 * size], _REPEATS, devices)
  if jax.process_index() == 0:
    fitted = fit(ALL_REDUCE, "ring", len(group.members[0]), found)
    facts = {"backend": devices[0].platform, "devices": len(devices),
             "processes": jax.process_count()}
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(to_json([(group, {ALL_REDUCE: (fitted, found)})], facts,
                                      notes), indent=1) + "\n")
    new.replace(path)


def probe(directory: pathlib.Path) -> None:
  """Probes the links between the processes, as a user would on request; process 0 writes
  `links.json`."""
  links.probe_links(directory, message_bytes=_PROBE_BYTES, repeats=_PROBE_REPEATS,
                    seconds=_PROBE_SECONDS)


def main() -> None:
  """Makes the runs it is told to until stdin ends."""
  setting = json.loads(sys.argv[1])
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # whatever a library prints goes to the log
  if setting["distributed"]:
    jaxpace.distributed.initialize()

  def say(answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()

  if setting.get("observed"):
    from experiments.labs.faults.observed import ObservedProcess
    made: dict[str, Process] = {
        "calls": ObservedProcess(setting["steps"], setting["hosts_seconds"])}
  else:
    made = {way: PROCESSES[way](setting["gradient_kb"], setting["steps"], setting["hosts_seconds"])
            for way in setting["record"]}
  heap = make_heap()
  if setting.get("bench"):
    bench(pathlib.Path(setting["bench"]), round(1e3 * setting["gradient_kb"]))
  say({"ready": True})
  for line in sys.stdin:
    request = json.loads(line)
    process, directory = made[request["record"]], pathlib.Path(request["directory"])
    say({"done": process.run(from_json(request["spec"]), directory, say)})
  del heap


if __name__ == "__main__":
  main()
