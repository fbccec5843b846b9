"""Where pacing gains: early ranks that poll share processors with the late one. And the nulls
beside it.

    python -m experiments.measure.polling
    python -m experiments.measure.polling --rounds=3 --warm_up=100 --block=15     # to try it

One rank computes longer than the others, which wait for it in a barrier of this lab's own: polling
(as NCCL and MPI do), or blocking (as gloo does over TCP). `pace_early_ranks` delays the early ones:
they sleep instead of polling. Ranks are where the scheduler puts them, which it changes its mind
about, so that who shares a core with the late rank is drawn anew every now and then; or pinned to
cores, as launchers do, where it is the same in all blocks. Blocks without pacing, without pacing
once more (A/A) and with pacing at several `cost`s take turns in one run. Writes
docs/measurements/polling.json and .md. Nothing else should run meanwhile.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.lib.paired import estimate
from experiments.measure import polling_ranks
from experiments.measure.polling_ranks import ARMS_OFF, Setup

CASES = {  # ranks, polling, pinned
    "4 ranks that poll": (4, True, False),
    "4 ranks that poll, pinned, two to a core": (4, True, True),
    "2 ranks that poll (control: a core each)": (2, True, False),
    "2 ranks that poll, pinned (control: a core each)": (2, True, True),
    "4 ranks that block (control: waiting costs nothing)": (4, False, False),
    "4 ranks that block, pinned, two to a core (control)": (4, False, True),
}
TARGETS = {"4 ranks that poll": (-100.0, -20.0),
           "4 ranks that poll, pinned, two to a core": (-100.0, -20.0),
           "2 ranks that poll (control: a core each)": (-2.0, 2.0),
           "2 ranks that poll, pinned (control: a core each)": (-2.0, 2.0),
           "4 ranks that block (control: waiting costs nothing)": (-100.0, 0.5),
           "4 ranks that block, pinned, two to a core (control)": (-100.0, 0.5)}
"""% by which the step should change: the interval's ends must lie between."""


def measure(setup: Setup) -> dict[str, Any]:
  """Runs one case and compares its arms round by round."""
  found = polling_ranks.launch(setup)
  names = np.array(polling_ranks.order(setup))

  def of(arm: str, name: str, ranks: slice = slice(None)) -> np.ndarray:
    """[rounds], summed over ranks."""
    return np.sum([rank[name][names == arm] for rank in found[ranks]], axis=0)

  steps = {arm: of(arm, "step", slice(0, 1)) for arm in polling_ranks.arms(setup)}
  result: dict[str, Any] = {"setup": setup._asdict(), "arms": {}}
  for arm, seconds in steps.items():
    entry = {"step_ms": estimate(seconds * 1e3).to_json(),
             "cpu_ms": estimate(of(arm, "cpu") * 1e3).to_json(),
             "polls": estimate(of(arm, "polls")).to_json(),
             "delay_ms":
             float(f"{1e3 * np.mean([rank['delay'][names == arm] for rank in found[:-1]]):.4g}")}
    if arm != ARMS_OFF[0]:
      entry["change_percent"] = estimate((seconds / steps[ARMS_OFF[0]] - 1) * 100).to_json()
      entry["mean_change_percent"] = float(
          f"{(seconds.mean() / steps[ARMS_OFF[0]].mean() - 1) * 100:.5g}")
      entry["cpu_change_percent"] = estimate((of(arm, "cpu") / of(ARMS_OFF[0], "cpu") - 1)
                                             * 100).to_json()
    result["arms"][arm] = entry
  return result


def verdict(change: list[float], again: list[float], within: tuple[float, float]) -> str:
  """Says whether an interval lies where it should; inconclusive where A/A itself doesn't.

  Args:
    change: % [mean, low, high].
    again: the same of A/A.
    within: % where the interval should lie. A/A should lie within its upper end, or 2 % where that
      is a gain.
  """
  noise = within[1] if within[1] > 0 else 2.0
  if within[0] <= change[1] and change[2] <= within[1]:
    return "met"
  if max(-again[1], again[2]) > noise:
    return "inconclusive: A/A fails"
  return "MISSED" if change[1] > within[1] or change[2] < within[0] else "not shown"


_ABOUT = (
    "Each rank computes, the last one longer, then waits for all in a barrier in shared memory. "
    "The early ones run the library's own `pace_early_ranks(cost=...)`, all else as it comes. "
    "Change: of the mean step of a block against the block without pacing of the same round. CPU: "
    "user and system time of all ranks a step. Each paced arm first ran unmeasured, so that its "
    "bucket could fill. In blocks without pacing, `update` runs and is not obeyed.")


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Ranks that poll and share processors", figures)
  rounds = sorted({case["setup"]["rounds"] for case in figures["cases"].values()})
  page += [_ABOUT, "", measured.about_intervals(figures.get("intervals"),
                                                f"{', '.join(map(str, rounds))} rounds"), ""]
  for title, case in figures["cases"].items():
    its, found, within = case["setup"], case["arms"], TARGETS[title]
    again = found[ARMS_OFF[1]]["change_percent"]
    page += [f"## {title}", "", f"{its['ranks']} ranks on {its['cores']} cores, {its['work_ms']:g} "
                                f"ms of work, {its['late_ms']:g} on the late rank; "
                                f"{its['warm_up']} steps of warm-up, {its['rounds']} rounds of "
                                f"blocks of {its['block']} steps. Wanted: a change "
             + (f"from {within[0]:g} to {within[1]:g} %." if within[0] > -100
                else f"of {within[1]:+g} % or less."), ""]
    rows = []
    for arm, entry in found.items():
      change = entry.get("change_percent")
      rows.append([arm, _interval(entry["step_ms"]), _interval(change), _interval(entry["cpu_ms"]),
                   _interval(entry.get("cpu_change_percent")), f"{entry['polls'][0]:,.0f}",
                   entry["delay_ms"], verdict(change, again, within) if change
                   and arm not in ARMS_OFF else None])
    page += measured.table(
        ["arm", "step, ms", "change, %", "CPU, ms", "change, %", "polls", "mean delay, ms",
         "target"], rows)
  return page


def _interval(value: list[float] | None) -> str | None:
  return None if value is None else f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_integer("rounds", 12, "Rounds of one block of each arm.", lower_bound=2)
  flags.DEFINE_integer("block", 40, "Steps of a block.", lower_bound=2)
  flags.DEFINE_integer("warm_up", 800, "Steps of each paced arm before it is measured.",
                       lower_bound=1)
  flags.DEFINE_list("costs", ["1e-3", "1e-2", "5e-2"], "Values of pace_early_ranks(cost=...).")
  flags.DEFINE_float("work_ms", 4.0, "Work of each rank a step.", lower_bound=0)
  flags.DEFINE_float("late_ms", 10.0, "Work of the late rank a step.", lower_bound=0)
  flags.DEFINE_integer("cores", 2, "Cores all ranks share.", lower_bound=1)
  flags.DEFINE_list("cases", [""],
                    "Parts of the titles of the cases to run, such as pinned; all by default.")
  flags.DEFINE_string("out", "docs/measurements/polling.json", "File the figures are written to.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  figures = measured.circumstances("experiments.measure.polling") | {"cases": {}}
  for title, (ranks, polling, pinned) in CASES.items():
    if not any(part in title for part in its.cases):
      continue
    setup = Setup(ranks, its.cores, polling, its.work_ms, its.late_ms, tuple(map(float, its.costs)),
                  its.warm_up, its.block, its.rounds, pinned)
    figures["cases"][title] = case = measure(setup)
    for arm, entry in case["arms"].items():
      print(f"{title:<50} {arm:<12} {entry['step_ms'][0]:7.2f} ms, change "
            f"{entry.get('change_percent')} %, CPU {entry['cpu_ms'][0]:.2f} ms, delay "
            f"{entry['delay_ms']} ms", flush=True)
  measured.write(figures, lines(figures), pathlib.Path(its.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
