"""Jobs on one link, in the fluid model: what interleave_jobs makes of their periods, beside what
else there is.

    python -m experiments.measure.two_jobs_simulated

Each scene runs under each control from the same random starts, jitter and noise. A figure is the
mean over jobs and seeds of step time over the job's own period alone: 1 is as if there were no
other job.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.measure import fluid, fluid_turns
from jaxpace.coordination import order
from jaxpace.coordination.coin import uniform
from jaxpace.coordination.interleave import interleave_jobs
from jaxpace.core.durations import valid
from jaxpace.core.types import Decision, Observation, Pacer

BUCKETS, MOST = 8, 10.0
OUT = pathlib.Path("docs/measurements/two_jobs_simulated.json")


class Scene(NamedTuple):
  about: str
  periods: tuple[float, ...]
  fractions: tuple[float, ...]
  steps: int = 400
  first: int = 50  # steps that are not counted
  more: dict[str, Any] = {}  # noqa: RUF012  # of fluid.scene
  target: str = ""


SCENES = {
    "two_together": Scene("two, a = 0.4, started together, no jitter; steps 21 to 30", (1, 1),
                          (.4, .4), 30, 20, {"together": True},
                          "at most 1.01 within 20 to 30 steps"),
    "two_together_31": Scene("the same; steps 31 to 60", (1, 1), (.4, .4), 60, 30,
                             {"together": True}, "1.01"),
    "two": Scene("two, a = 0.4, 2 % jitter", (1, 1), (.4, .4), more={"jitter": .02},
                 target="at most 1.02"),
    "two_quiet": Scene("the same, 1.2 % jitter, as in the fabric lab", (1, 1), (.4, .4),
                       more={"jitter": .012}),
    "two_noise": Scene("two, a = 0.4, 2 % jitter, bucket times seen with 5 % noise", (1, 1),
                       (.4, .4), more={"jitter": .02, "noise": .05}),
    "two_one_paced": Scene("the same without noise, only one of them paced", (1, 1), (.4, .4),
                           more={"jitter": .02, "unpaced": (1,)}),
    "three": Scene("three, a = 0.25, 2 % jitter", (1, 1, 1), (.25,) * 3, more={"jitter": .02}),
    "four": Scene("four, a = 0.2, 2 % jitter", (1,) * 4, (.2,) * 4, more={"jitter": .02},
                  target="at most 1.03"),
    "periods": Scene("periods 1 and 1.3, a = 0.4, 2 % jitter", (1, 1.3), (.4, .4),
                     more={"jitter": .02}, target="at most 2 % above none"),
    "periods_near": Scene("periods 1 and 1.13, messages of equal length, 2 % jitter", (1, 1.13),
                          (.4, .4 / 1.13), more={"jitter": .02}),
    "periods_still": Scene("periods 1 and 1.3, a = 0.4, no jitter", (1, 1.3), (.4, .4),
                           target="at most 2 % above none"),
    "infeasible": Scene("four, a = 0.4, 2 % jitter: no room", (1,) * 4, (.4,) * 4,
                        more={"jitter": .02}, target="at most 2 % above none"),
    "alone": Scene("one, a = 0.4, 2 % jitter", (1,), (.4,), more={"jitter": .02}, target="no loss"),
    "alone_noise": Scene("one, a = 0.4, bucket times seen with 5 % noise", (1,), (.4,),
                         more={"jitter": .02, "noise": .05}, target="no loss"),
}


class Control(NamedTuple):
  about: str
  make: Callable[[float], Pacer]  # floor of a bucket -> pacer
  weight: Callable[[jax.Array], jax.Array] = fluid.fair
  buckets: int = BUCKETS
  shown: str = fluid.LIVE
  turns: str | None = None  # by what jobs take turns; None: they don't

  def knows(self, scene: Scene) -> bool:
    """Whether a scene can be run so: turns know no noise on what is seen."""
    return self.turns is None or "noise" not in scene.more


def at_once(by_order: bool) -> Callable[[float], Pacer]:
  """The rule alone, for comparison: no test, no waiting for what a shift did beyond the next
  decision; the same bank.

  Args:
    by_order: the follower moves by the work ahead; else everyone who is contended, leader or
      follower, moves with probability one half by a random part of what the collective took beyond
      its floor.
  """

  def make(floor: float) -> Pacer:
    def init(ranks: int) -> tuple[jax.Array, ...]:
      return jnp.uint32(0), jnp.float32(1), jnp.zeros((), jnp.bool_)

    def update(seen: Observation,
               state: tuple[jax.Array, ...]) -> tuple[Decision, tuple[jax.Array, ...]]:
      key, bank, moved = state
      times = jnp.where(jnp.all(valid(seen.job_transfers_now)), seen.job_transfers_now,
                        seen.job_transfers)
      found = order.look(times, jnp.full(times.shape, np.float32(floor)))
      size, heads = uniform(key, seen.step, 1), uniform(key, seen.step, 2) < np.float32(0.5)
      total = np.float32(floor * times.shape[0])
      blind = found.ahead if by_order else found.contention * total
      drawn = jnp.where(heads, size * blind, np.float32(0))
      want = jnp.where(found.clears, found.ahead, drawn) if by_order else drawn
      bank = jnp.minimum(bank + np.float32(0.01), np.float32(1))
      delay = jnp.where((found.contention > np.float32(0.1)) & ~moved, jnp.minimum(want, bank),
                        np.float32(0))
      return Decision(delay, {}), (key, bank - delay, delay > np.float32(0))

    return Pacer(init, update)

  return make


def ours(floor: float) -> Pacer:
  return interleave_jobs(MOST, floor=floor, slots=BUCKETS)


CONTROLS = {
    "none": Control("fair sharing, no control", lambda floor: fluid.nothing()),
    "interleave": Control("`interleave_jobs`, quiet floor given", ours),
    "late": Control("`interleave_jobs`, had it the bucket times of the step before alone", ours,
                    shown=fluid.LATE),
    "learned": Control("`interleave_jobs`, floor from what it saw",
                       lambda floor: interleave_jobs(MOST, slots=BUCKETS)),
    "one_bucket": Control("`interleave_jobs`, one bucket, quiet floor given",
                          lambda floor: interleave_jobs(MOST, floor=floor, slots=1), buckets=1),
    "random": Control("whoever is contended moves at random, leader or follower", at_once(False)),
    "at_once": Control("the order rule alone, from the step before: no test, no waits",
                       at_once(True), shown=fluid.LATE),
    "at_once_fresh": Control("the same, had it all bucket times of the step just done",
                             at_once(True), shown=fluid.AT_ONCE),
    "mltcp": Control("MLTCP-like: the network gives more to who has sent more",
                     lambda floor: fluid.nothing(), fluid.mltcp),
    "drawn":
    Control("no control, the network giving more to who has just begun, as TCP was measured to do",
            lambda floor: fluid.nothing(), fluid.drawn),
    "drawn_interleave": Control("the same with `interleave_jobs`", ours, fluid.drawn),
    "turns_message": Control('`take_turns(by="message")`, quiet floors given',
                             lambda floor: fluid.nothing(), turns="message"),
    "turns_bucket": Control('`take_turns(by="bucket")`, quiet floors given',
                            lambda floor: fluid.nothing(), turns="bucket"),
}


def stacked(trees: list[Any]) -> Any:
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def states(pacer: Pacer, seeds: int, jobs: int) -> Any:
  """Pacer states [seeds, jobs, ...], each with a key of its own, which is their only uint32."""
  state = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf),
                                                     (seeds, jobs, *jnp.shape(leaf))),
                       pacer.init(1))
  keys = jnp.asarray(np.random.default_rng(7).integers(0, 2**32, (seeds, jobs), np.uint32))
  return jax.tree.map(lambda leaf: keys if leaf.dtype == jnp.uint32 else leaf, state)


def history(scene: Scene, control: Control, seeds: int, first: int = 0,
            **more: Any) -> fluid.History:
  """Runs a scene under a control from so many starts, of seeds from the first one on: leaves
  [seeds, jobs, steps]."""
  drawn = stacked([fluid.scene(seed, list(scene.periods), list(scene.fractions), steps=scene.steps,
                               buckets=control.buckets, **{**scene.more, **more})
                   for seed in range(first, first + seeds)])
  floors = [fraction * period / control.buckets
            for fraction, period in zip(scene.fractions, scene.periods, strict=True)]
  if control.turns is not None:
    return fluid_turns.history(drawn, scene.periods, floors, control.turns, scene.steps)
  run, pacer = compiled(control, tuple(floors) if len(set(floors)) > 1 else (floors[0],))
  state = states(pacer, seeds, len(floors))
  if len(set(floors)) > 1:
    state = (jnp.broadcast_to(jnp.arange(len(floors), dtype=jnp.int32), (seeds, len(floors))),
             state)
  return run(drawn, state)


@functools.lru_cache(maxsize=64)
def compiled(control: Control,
             floors: tuple[float, ...]) -> tuple[Callable[..., fluid.History], Pacer]:
  """The simulation of many seeds at once, and the pacer; with several floors, one of each job's
  own."""
  pacers = [control.make(floor) for floor in floors]
  pacer = pacers[0] if len(pacers) == 1 else by_job(pacers)
  return jax.jit(jax.vmap(fluid.simulator(pacer.update, control.weight, control.shown))), pacer


def by_job(pacers: list[Pacer]) -> Pacer:
  """One update for jobs whose pacers differ in settings: the state names the pacer."""

  def update(seen: Observation, state: Any) -> tuple[Decision, Any]:
    which, own = state
    decision, own = jax.lax.switch(which, [pacer.update for pacer in pacers], seen, own)
    return decision, (which, own)

  return Pacer(pacers[0].init, update)


def figure(scene: Scene, found: fluid.History) -> dict[str, Any]:
  """The figures of one scene under one control."""
  alone = np.asarray(scene.periods, np.float64)[:, None]
  time = np.asarray(found.step_time, np.float64) / alone  # [seeds, jobs, steps]
  late = time[:, :, scene.first:]
  by_seed = np.nanmean(late, axis=(1, 2))
  delay = (np.asarray(found.delay, np.float64) / alone)[:, :, scene.first:]
  return {"mean": float(np.nanmean(late)),
          "standard_error": float(by_seed.std(ddof=1) / np.sqrt(len(by_seed))),
          "worst_seed": float(by_seed.max()), "by_job": np.nanmean(late, axis=(0, 2)).tolist(),
          "cv": float(np.mean(np.nanstd(late, axis=2) / np.nanmean(late, axis=2))),
          "delay": float(np.nanmean(delay)),
          "delayed_share": float((delay > 0).sum() / np.isfinite(delay).sum())}


def leaving(seeds: int, until: int = 150) -> dict[str, Any]:
  """Two jobs of which one leaves: decisions of the other after that until it is disengaged, and
  asks for nothing."""
  scene = Scene("", (1, 1), (.4, .4), until + 250, until, {"jitter": .02, "leaves": {1: until}})
  found = history(scene, CONTROLS["interleave"], seeds)
  end = np.cumsum(np.nan_to_num(np.asarray(found.step_time, np.float64)), axis=2)
  gone = np.asarray([np.searchsorted(end[seed, 0], end[seed, 1].max()) for seed in range(seeds)])

  def last(values: np.ndarray) -> list[int]:
    return [int(max(0, np.flatnonzero(row > 0).max(initial=0) - at))
            for row, at in zip(values, gone, strict=True)]

  return {"until_disengaged": last(np.asarray(found.info["engaged"])[:, 0]),
          "until_last_delay": last(np.asarray(found.delay)[:, 0])}


def evidence(seeds: int, steps: int) -> dict[str, Any]:
  """What the coin has shown after many steps, two jobs and four for which there is no room."""
  shown: dict[str, Any] = {"steps": steps}
  for name in ("two", "infeasible"):
    scene = SCENES[name]._replace(steps=steps)
    found = history(scene, CONTROLS["interleave"], seeds)
    info = {key: np.asarray(value)[:, :, -1] for key, value in found.info.items()}
    low, high = info["shift_low"], info["shift_high"]
    shown[name] = {"effect": known(info["shift_effect"]), "interval": [known(low), known(high)],
                   "gain_shown": float((high < 0).mean()), "harm_shown": float((low > 0).mean())}
  return shown


def known(values: np.ndarray) -> float | None:
  """Mean of the known values."""
  return float(np.nanmean(values)) if np.isfinite(values).any() else None


def measure(scenes: list[str], controls: list[str], seeds: int, long: int,
            first: int = 0) -> dict[str, Any]:
  cells = []
  say = measured.progress("scenes", len(scenes))
  for done, name in enumerate(scenes):
    for control in controls:
      how = CONTROLS[control]
      if not how.knows(SCENES[name]):
        continue
      found = history(SCENES[name], how, seeds, first)
      cells.append({"scene": name, "control": control, **figure(SCENES[name], found)})
    say(done + 1)
  return {"seeds": seeds, "first_seed": first, "buckets": BUCKETS, "cells": cells,
          "leaving": leaving(seeds), "evidence": evidence(4, long)}


def with_kept(figures: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
  """Adds cells that were not measured this time from an earlier run of the same seeds and buckets,
  and says so."""
  if any(figures[name] != before.get(name, 0) for name in ("seeds", "first_seed", "buckets")):
    return figures
  new = {(cell["scene"], cell["control"]) for cell in figures["cells"]}
  kept = [cell for cell in before["cells"] if (cell["scene"], cell["control"]) not in new
          and cell["scene"] in SCENES]
  order = {name: place for place, name in enumerate(SCENES)}
  cells = sorted([*figures["cells"], *kept], key=lambda cell: order[cell["scene"]])
  what = sorted({cell["control"] for cell in kept})
  return {**figures, "cells": cells,
          "kept": {"command": before["command"], "date": before["date"], "controls": what}}


def page(figures: dict[str, Any]) -> list[str]:
  lines = measured.introduction("Jobs that share a link, in the fluid model", figures)
  lines += [
      "A simulation, not a network: every job computes, then sends its buckets over one link that "
      "the senders share",
      "equally at every instant (`experiments/measure/fluid.py`). Delays come from the library's "
      "own `Pacer.update`,",
      "which sees the bucket times of the step just done but for the last one's, as in a live "
      "step. Step time over",
      "the job's own period alone, mean over jobs",
      f"and {figures['seeds']} seeds with random starts, steps 51 to 400 unless said otherwise; "
      "the least a scene",
      "allows is 1, but 1.6 for the four that have no room. `a` is the share of the period that is "
      "communication.", ""]
  names = list(dict.fromkeys(cell["scene"] for cell in figures["cells"]))
  by = {(cell["scene"], cell["control"]): cell for cell in figures["cells"]}
  if kept := figures.get("kept"):
    lines += [f"Figures of {', '.join(kept['controls'])} that were not measured again are of "
              f"`{kept['command']}`, {kept['date']}.", ""]
  means = {cell: round(value["mean"], 4) for cell, value in by.items()}
  lines += measured.table(["scene", *CONTROLS, "aim, for interleave"],
                          [[SCENES[name].about,
                            *[means.get((name, control)) for control in CONTROLS],
                            SCENES[name].target] for name in names])
  lines += [f"- **{name}**: {control.about}." for name, control in CONTROLS.items()]
  lines += ["", "Under `interleave`, in more detail (delay as a share of the period):", ""]
  lines += measured.table(["scene", "mean", "standard error", "worst seed", "by job", "cv",
                           "cv, none", "delay"], [
                               [SCENES[name].about, round(own["mean"], 4), own["standard_error"],
                                round(own["worst_seed"], 4),
                                ", ".join(f"{value:.3f}" for value in own["by_job"]), own["cv"],
                                by.get((name, "none"), {}).get("cv"), own["delay"]]
                               for name in names if (name, "interleave") in by
                               for own in [by[name, "interleave"]]])
  lines += [f"Turns: listening once takes {fluid_turns.TINY:g} of a period, {fluid_turns.BUSY:g} "
            "times as long beside another's traffic;",
            f"{100 * fluid_turns.WRONG:g} % of the readings tell the opposite. `take_turns` "
            "measures for 48 steps and tries for 64, which are counted as far as",
            "they come after step 50. It is not run where bucket times are seen with noise. By "
            "message, in more detail (held: waited and",
            "listened, as a share of the period):", ""]
  lines += measured.table(["scene", "none", "by message", "standard error", "worst seed", "by job",
                           "by job, none", "cv", "cv, none", "held"], [
                               [SCENES[name].about, round(bare["mean"], 4), round(own["mean"], 4),
                                own["standard_error"], round(own["worst_seed"], 4),
                                *[", ".join(f"{value:.3f}" for value in each["by_job"])
                                  for each in (own, bare)], own["cv"], bare["cv"], own["delay"]]
                               for name in names
                               if {(name, "turns_message"), (name, "none")} <= set(by)
                               for own, bare in [(by[name, "turns_message"], by[name, "none"])]])
  gone, shown = figures["leaving"], figures["evidence"]
  lines += ["Steps after the other job left until it is disengaged: at most "
            f"{max(gone['until_disengaged'])}; until its last delay: at most "
            f"{max(gone['until_last_delay'])}.", "",
            f"What the coin showed after {shown['steps']} steps, as the effect of a shift on the 8 "
            "steps after it:", ""]
  return lines + measured.table(["scene", "effect, steps", "interval", "", "jobs with a gain shown",
                                 "with harm"], [
                                     [name, own["effect"], *own["interval"], own["gain_shown"],
                                      own["harm_shown"]]
                                     for name, own in shown.items() if name != "steps"])


def main(argv: list[str]) -> None:
  names = [name for name in SCENES if not FLAGS.scenes or name in FLAGS.scenes]
  out = pathlib.Path(FLAGS.out)
  figures = {**measured.circumstances("experiments.measure.two_jobs_simulated"),
             **measure(names, FLAGS.controls or list(CONTROLS), FLAGS.seeds, FLAGS.long,
                       FLAGS.first_seed)}
  if out.exists():
    figures = with_kept(figures, json.loads(out.read_text()))
  measured.write(figures, page(figures), out)


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_integer("seeds", 16, "Random starts of each scene.")
  flags.DEFINE_integer("first_seed", 0, "The first of them.", lower_bound=0)
  flags.DEFINE_integer("long", 3000, "Steps of the run that shows what the coin shows.")
  flags.DEFINE_list("scenes", [], "Names of scenes; all if empty.")
  flags.DEFINE_multi_enum("controls", [], list(CONTROLS), "Controls to run; all if none is named. "
                                                          "What an earlier run of the same seeds "
                                                          "has found of the others is kept.")
  flags.DEFINE_string("out", str(OUT), "JSON file; a page is written beside it.")
  app.run(main)
