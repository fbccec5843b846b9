"""What a mark, a `record()` of an observed step, and its rows cost.

    python -m experiments.measure.marks_cost --json marks_cost.json --markdown marks_cost.md

Five figures: a mark by itself; a mark in a compiled loop, as the difference to the same loop
without it, in turns, beside the difference of the loop to itself; a copy of the ring to its file;
`Recorder.record()`; and bytes on disk and the writer's time a step and rank, for times as a job has
them.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured

FLAGS = flags.FLAGS
_IN_LOOP = 2000


def define_flags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_integer("rounds", 12, "Rounds of each figure.", lower_bound=6)
  measured.define_output_flags()


def alone(rounds: int) -> Any:
  """Nanoseconds a mark, written from the host by the handler's own function."""
  from experiments.lib import paired
  from jaxpace.execution.native import library

  here, many = library.functions().jaxpace_mark_here, 1_000_000

  def timed() -> float:
    start = time.perf_counter()
    here(0, 3998, 5, many)
    return (time.perf_counter() - start) / many * 1e9

  return paired.estimate(np.array([timed() for _ in range(rounds)])).to_json()


def copying(rounds: int) -> dict[str, Any]:
  """Microseconds of a processor that a copy of the ring to its file takes, by how many events each
  lane has got since the one before."""
  from experiments.lib import paired
  from jaxpace.execution import marks
  from jaxpace.execution.native import library
  from jaxpace.files.folders import Folder
  from jaxpace.trace.marks.copier import COPY_SECONDS, RingCopier

  here, lanes, found = library.functions().jaxpace_mark_here, marks.current().layout.lanes, {}
  for events in (0, 1000, 20_000):
    taken = []
    with tempfile.TemporaryDirectory() as folder:
      copier = RingCopier(Folder(folder), "measured", 0)
      copier.start()
      for _ in range(rounds):
        for lane in range(lanes):
          here(lane, 3998, 5, events)
        start = time.thread_time()
        copier.copy()
        taken.append(1e6 * (time.thread_time() - start))
      copier.close()
    found[str(events)] = paired.estimate(np.array(taken)).to_json()
  return {"lanes": lanes, "seconds": COPY_SECONDS, "events": found}


def in_a_program(rounds: int) -> dict[str, Any]:
  """Nanoseconds that a mark adds to a turn of a compiled loop."""
  import jax
  import jax.numpy as jnp

  from experiments.lib import paired
  from jaxpace.execution import native

  def loop(marked: bool) -> Any:
    def turn(_: Any, x: jax.Array) -> jax.Array:
      x = x * jnp.float32(1.0001)
      return native.mark([x], program=3998, tag=5)[0] if marked else x
    return jax.jit(lambda x: jax.lax.fori_loop(0, _IN_LOOP, turn, x))

  arms = {"bare": loop(False), "bare again": loop(False), "marked": loop(True)}
  x = jnp.ones(64)
  for arm in arms.values():
    jax.block_until_ready(arm(x))
  found: dict[str, list[float]] = {name: [] for name in arms}
  order = np.random.default_rng(0)
  for _ in range(rounds):
    for name in order.permutation(list(arms)):
      times = []
      for _ in range(9):
        start = time.perf_counter()
        jax.block_until_ready(arms[name](x))
        times.append(time.perf_counter() - start)
      found[name].append(float(np.median(times)) / _IN_LOOP * 1e9)
  bare = np.array(found["bare"])
  return {"bare_turn": paired.estimate(bare).to_json(),
          "null": paired.estimate(np.array(found["bare again"]) - bare).to_json(),
          "mark": paired.estimate(np.array(found["marked"]) - bare).to_json()}


def recording(rounds: int) -> dict[str, Any]:
  """Microseconds of a `record()` call, of a loop that does nothing else."""
  import jaxpace
  from experiments.lib import paired
  from jaxpace.core.observed import ObservedPlan
  from jaxpace.core.recordable import Marked

  class Idle(Marked):
    """Counts calls and has no program."""

    def __init__(self) -> None:
      self.plan, self.calls = ObservedPlan(), 0

    def settings_json(self) -> dict[str, Any]:
      return {}

  calls, medians, tails = 2000, [], []
  for _ in range(rounds):
    idle, times = Idle(), []
    with tempfile.TemporaryDirectory() as folder, jaxpace.Recorder(folder, idle) as recorder:
      for _ in range(calls):
        idle.calls += 1
        start = time.perf_counter()
        recorder.record()
        times.append(time.perf_counter() - start)
    medians.append(float(np.median(times)) * 1e6)
    tails.append(float(np.quantile(times, 0.99)) * 1e6)
  return {"median": paired.estimate(np.array(medians)).to_json(),
          "p99": paired.estimate(np.array(tails)).to_json()}


def rows(collectives: int, steps: int = 400, ranks: int = 8, seed: int = 0) -> dict[str, float]:
  """Bytes on disk and the writer's seconds, a step and rank; a step of 50 ms whose waits are 0.1 ms
  on average."""
  from jaxpace.core.observed import Loop, ObservedCollective, ObservedProgram
  from jaxpace.trace.decode import concatenate
  from jaxpace.trace.marks.executions import Executions
  from jaxpace.trace.marks.plan import PlannedPrograms
  from jaxpace.trace.marks.table import Range, StepCalls, collective_columns, device, step_columns
  from jaxpace.trace.parts import PartStore

  layers, kinds = collectives // 4, 4
  program = ObservedProgram(1, "step", tuple(range(ranks)), {"data": ranks}, tuple(
      ObservedCollective(k, f"all-gather.{k}", "all-gather", 1 << 20, 1, ("float32",), ("data",),
                         (tuple(range(ranks)),), (), "forward", (Loop("while.1", layers),),
                         None, None, (2 + 2 * k,), (3 + 2 * k,)) for k in range(kinds)))
  programs = PlannedPrograms(ranks)
  programs.meet([program])
  programs.block(1, 0)
  calls = [StepCalls(k, (Range(1, k, k + 1),), (0, 0, 0, None, None), {}) for k in range(steps)]
  numbers, random = np.arange(steps), np.random.default_rng(seed)
  made, seconds = [], 0.0
  for rank in range(ranks):
    busy = random.normal(1, 0.05, (steps, collectives)) * 45e6 / collectives
    wait = random.exponential(0.1e6, (steps, collectives)) + 0.03e6
    start = 10**15 + np.arange(steps) * 10**9
    leave = start[:, None] + np.cumsum(busy + wait, axis=1).astype(np.int64)
    enter = leave - wait.astype(np.int64)
    tags = np.tile(np.array([[2 + 2 * k, 3 + 2 * k] for k in range(kinds)]).ravel(), layers)
    ns = np.stack([enter, leave], axis=2).reshape(steps, -1)
    executions = Executions(numbers, start, leave[:, -1] + 10**6,
                            np.repeat(numbers, 2 * collectives),
                            np.tile(tags, steps).astype(np.uint32), ns.ravel())
    begun = time.perf_counter()
    own = device(calls, {1: executions}, programs, rank)
    made.append((step_columns(numbers, own, rank, 0, 0, None),
                 collective_columns(numbers, own, np.ones(steps, bool), programs.plan, rank, 0, 0)))
    seconds += time.perf_counter() - begun
  with tempfile.TemporaryDirectory() as folder:
    sizes = []
    begun = time.perf_counter()
    for table, columns in zip(("steps", "collectives"), zip(*made, strict=True), strict=True):
      store = PartStore(pathlib.Path(folder), table, "run", 0)
      store.append(concatenate(list(columns)))
      sizes.append(sum(file.stat().st_size for file in store.files) / (steps * ranks))
    seconds += time.perf_counter() - begun
  return {"collectives": collectives, "steps_bytes": sizes[0], "collectives_bytes": sizes[1],
          "row_bytes": sizes[1] / collectives, "writer_us": seconds / (steps * ranks) * 1e6}


def table(figures: dict[str, Any]) -> str:
  """The figures in Markdown."""

  def words(triple: list[float], digits: int = 1) -> str:
    return f"{triple[0]:.{digits}f} [{triple[1]:.{digits}f}, {triple[2]:.{digits}f}]"

  loop, record, copy = figures["in_a_program"], figures["record"], figures["copying"]
  lines = [*measured.introduction("What marks cost", figures), "| what | |", "|---|---|",
           f"| a mark alone | {words(figures['alone'])} ns |",
           f"| a mark in a compiled loop | {words(loop['mark'], 0)} ns on a turn of "
           f"{words(loop['bare_turn'], 0)} ns |",
           f"| A/A control: the loop against itself | {words(loop['null'], 0)} ns |",
           *(f"| a copy of the ring of {copy['lanes']} devices to its file, each {copy['seconds']} "
             f"s, {int(events):,} new events each | {words(taken, 0)} µs of a processor |"
             for events, taken in copy["events"].items()),
           f"| `record()`, median | {words(record['median'])} µs |",
           f"| `record()`, 99th percentile | {words(record['p99'])} µs |", "",
           f"Rounds: {figures['rounds']}. Rows, of times drawn at random:", "",
           "| collectives a step | `steps` | `collectives`, in full | a row | writer's time |",
           "|---|---|---|---|---|"]
  lines += [f"| {row['collectives']} | {row['steps_bytes']:.0f} B | {row['collectives_bytes']:.0f} "
            f"B | {row['row_bytes']:.1f} B | {row['writer_us']:.0f} µs |"
            for row in figures["rows"]]
  return "\n".join([*lines, "", "Bytes and time are a step and rank."]) + "\n"


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  from jaxpace.execution import marks
  figures = measured.circumstances("experiments.measure.marks_cost")
  if reason := marks.unavailable():
    sys.exit(reason)
  say = measured.progress("figures", 5)
  figures["rounds"] = FLAGS.rounds
  for done, (name, measure) in enumerate((
      ("alone", alone), ("in_a_program", in_a_program), ("copying", copying),
      ("record", recording))):
    figures[name] = measure(FLAGS.rounds)
    say(done + 1)
  figures["rows"] = [rows(count) for count in (8, 40, 200)]
  say(5)
  measured.tell(figures, table(figures))


if __name__ == "__main__":
  define_flags()
  app.run(main)
