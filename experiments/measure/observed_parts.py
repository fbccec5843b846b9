"""Where the time is that `jaxpace.observe` and a `Recorder` add to a plain-`jit` step.

    python -m experiments.measure.observed_parts --real_time --json parts.json --markdown parts.md

The steps of `experiments.measure.observed_overhead`, in arms that each have one thing more: the
jitted step; the same again (the A/A control); the same in a cache context of its own, as an
observed step is called; the program with marks in such a context; the observed step; and `record()`
after it. They take turns step by step, in an order drawn anew each time, while a recorder is open.
Differences are microseconds of a round's median steps. Beside them, how long each function takes
that is called between two steps: behind a step, when caches hold other things, and once more right
after. At last every step is recorded for a while, and the recorder's thread is told as a share of
one core of that time. (`observed_overhead` tells it as a share of the recorded steps, a third of
its time: what the thread does by the clock counts three times there.) Takes three minutes.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.measure import observed_overhead

MODULE = "experiments.measure.observed_parts"
ARMS = ("bare", "bare again", "in a context of its own", "with marks", "observed", "recorded")


def define_flags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_integer("devices", 2, "Forced devices.", lower_bound=2)
  flags.DEFINE_list("targets_ms", ["4", "20"], "Steps to aim at.")
  flags.DEFINE_integer("rounds", 30, "Rounds.", lower_bound=2)
  flags.DEFINE_float("seconds", 0.9, "Seconds a round.")
  measured.define_priority_flag()
  measured.define_output_flags()


def measure(case: str, target: float, rounds: int, seconds: float) -> dict[str, Any]:
  """One case: what each arm takes more than the bare step, and what is called between two steps."""
  import jax

  import jaxpace
  from experiments.lib import paired
  fresh, weights, batch = observed_overhead.make(case, *observed_overhead.sized(case, target))
  bare, apart, observed = fresh(), fresh(), jaxpace.observe(fresh())
  context = jax.make_user_context(None)
  arms = {"bare": bare, "bare again": bare, "in a context of its own": _inside(context, 1, apart),
          "with marks": _inside(observed._context, observed._token, observed.jitted),
          "observed": observed, "recorded": observed}
  found: dict[str, list[float]] = {name: [] for name in ARMS}
  say = measured.progress(f"{case}, {target * 1e3:g} ms", rounds)
  # The program with marks is compiled, and no step of the arms without a recorder is recorded.
  for step in (observed, *arms.values()):
    observed_overhead.timed(step, weights, batch, 5)
  with tempfile.TemporaryDirectory() as folder, jaxpace.Recorder(folder, observed) as recorder:
    for done in range(rounds):
      taken: dict[str, list[float]] = {name: [] for name in ARMS}
      for _ in range(max(3, round(seconds / (len(ARMS) * target)))):
        for name in random.sample(ARMS, len(ARMS)):
          start = time.perf_counter()
          _, loss = arms[name](weights, batch)
          jax.block_until_ready(loss)
          if name == "recorded":
            recorder.record()
          taken[name].append(time.perf_counter() - start)
      for name, values in taken.items():
        found[name].append(float(np.median(values)))
      say(done + 1)
    thread = thread_percent(observed, recorder, weights, batch)
    calls = between(lambda: jax.block_until_ready(observed(weights, batch)[1]),
                    {"nothing": lambda: None, "`record()`": recorder.record,
                     "of it, counters of the host": lambda: recorder.sample({})})
  program, = observed.plan.programs
  if program.bare:
    raise SystemExit(f"The step has no marks: {program.bare}")
  medians = {name: np.array(values) for name, values in found.items()}
  return {"case": case, "marks": program.marks,
          "bare_ms": paired.estimate(medians["bare"]).scaled(1e3).to_json(),
          "more_us": {name: paired.estimate(medians[name] - medians["bare"]).scaled(1e6).to_json()
                      for name in ARMS[1:]},
          "calls_us": calls, "thread_percent": thread}


def _inside(context: Any, token: Any, step: Any) -> Any:
  def call(*args: Any) -> Any:
    with context(token):
      return step(*args)

  return call


def thread_percent(observed: Any, recorder: Any, weights: Any, batch: Any,
                   seconds: float = 6.0) -> float:
  """CPU time of the recorder's thread while every step is recorded, percent of the time."""
  import jax
  before, start = observed_overhead.writer_seconds(), time.perf_counter()
  while (took := time.perf_counter() - start) < seconds:
    jax.block_until_ready(observed(weights, batch)[1])
    recorder.record()
  return 100 * (observed_overhead.writer_seconds() - before) / took


def between(step: Callable[[], Any], calls: dict[str, Callable[[], Any]], times: int = 100
            ) -> dict[str, list[float]]:
  """Median microseconds of each call, behind a step and once more right after."""
  taken: dict[str, list[list[float]]] = {name: [[], []] for name in calls}
  for _ in range(times):
    for name in random.sample(list(calls), len(calls)):
      step()
      for into in taken[name]:
        start = time.perf_counter()
        calls[name]()
        into.append(time.perf_counter() - start)
  return {name: [float(np.median(one)) * 1e6 for one in own] for name, own in taken.items()}


def table(figures: dict[str, Any]) -> str:
  """The figures in Markdown."""
  lines = measured.introduction("Where the time is that observing a plain-jit step takes", figures)
  lines += [f"{figures['devices']} forced devices in one process{measured.priority(figures)}. "
            f"{figures['rounds']} rounds, in each of which the arms take turns step by step; each "
            "arm has one thing more than the one before it. Microseconds more than the bare step, "
            "of a round's median steps, with Student's intervals of 95 % over rounds.", ""]
  lines += measured.table(
      ("step", "marks a step and device", "bare", *ARMS[1:],
       "recorder's thread, every step recorded"),
      [(row["case"], row["marks"], f"{row['bare_ms'][0]:.1f} ms",
        *(f"{more[0]:+.0f} [{more[1]:.0f}, {more[2]:.0f}]" for more in row["more_us"].values()),
        f"{row['thread_percent']:.2f} % of a core")
       for row in figures["rows"]])
  lines += ["Calls between two steps, microseconds: behind a step, when the processor's caches "
            "hold other things, and the same once more right after. Medians.", ""]
  lines += measured.table(
      ("step", "call", "behind a step", "once more"),
      [(f"{row['case']}, {row['bare_ms'][0]:.1f} ms", name, f"{first:.1f}", f"{again:.1f}")
       for row in figures["rows"] for name, (first, again) in row["calls_us"].items()])
  return "\n".join(lines).rstrip("\n") + "\n"


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  settings = flags.FLAGS
  os.environ["JAX_PLATFORMS"] = "cpu"
  measured.take_priority()
  measured.keep_memory(MODULE)
  import jax
  jax.config.update("jax_num_cpu_devices", settings.devices)
  figures = {**measured.circumstances(MODULE), "devices": settings.devices,
             "rounds": settings.rounds, "real_time": settings.real_time}
  figures["rows"] = [measure(case, float(target) * 1e-3, settings.rounds, settings.seconds)
                     for case in observed_overhead.CASES for target in settings.targets_ms]
  measured.tell(figures, table(figures))


if __name__ == "__main__":
  define_flags()
  app.run(main)
