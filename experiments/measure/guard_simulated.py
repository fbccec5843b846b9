"""The guard in simulation: false alarms, power, and what finding out costs.

    python -m experiments.measure.guard_simulated

A job of one rank whose pacer asks for a delay in every step. A step takes noise x (1 + effect where
delayed); its mean without delay is 1. The library's own `guard` decides, and sees the job's step
time one step late, as it does live. Regret is the time lost against the better of always on and
always off on the same noise, in mean steps.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from jaxpace.coordination import trial
from jaxpace.core.types import Decision, Observation, Pacer

CHECKPOINTS = (1_000, 10_000, 50_000)
TARGET = {"false_alarms": 0.05, "regret_share": 0.01, "regret_steps": 100.0}
PAIR = 2 * trial.BLOCK + 1
"""Steps of a pair: the period that would alias with a strict alternation."""

Noise = Callable[[np.random.Generator, int, int, float], np.ndarray]


def normal(rng: np.random.Generator, steps: int, runs: int, cv: float) -> np.ndarray:
  """Independent: [steps, runs], mean 1 and deviation `cv`, as all below."""
  return 1 + cv * rng.standard_normal((steps, runs), np.float32)


def correlated(rng: np.random.Generator, steps: int, runs: int, cv: float,
               rho: float = 0.5) -> np.ndarray:
  """Autocorrelation 0.5 from step to step."""
  noise = rng.standard_normal((steps, runs), np.float32)
  for k in range(1, steps):
    noise[k] = rho * noise[k - 1] + np.float32(np.sqrt(1 - rho * rho)) * noise[k]
  return 1 + cv * noise


def wandering(rng: np.random.Generator, steps: int, runs: int, cv: float) -> np.ndarray:
  """Slow and fast spells of some 200 steps, and a tenth of the deviation from step to step."""
  return (correlated(rng, steps, runs, cv, float(np.exp(-1 / 200)))
          + normal(rng, steps, runs, 0.1 * cv) - 1)


def pauses(rng: np.random.Generator, steps: int, runs: int, cv: float) -> np.ndarray:
  """A pause every `PAIR` steps, always at the same place of an uncut pair; a tenth of the deviation
  is independent."""
  height = cv * np.sqrt(PAIR)
  phase = rng.integers(0, PAIR, runs)
  struck = (np.arange(steps)[:, None] + phase) % PAIR == 0
  return normal(rng, steps, runs, 0.1 * cv) + height * (struck - np.float32(1 / PAIR))


def heavy(rng: np.random.Generator, steps: int, runs: int, cv: float) -> np.ndarray:
  """Rare pauses: in one step of 400, of an exponential length; a tenth of the deviation is
  independent."""
  share = 1 / 400
  length = cv / np.sqrt(2 * share)
  struck = rng.random((steps, runs), np.float32) < share
  extra = np.where(struck, length * rng.standard_exponential((steps, runs), np.float32), 0)
  return normal(rng, steps, runs, 0.1 * cv) + extra - length * share


def drifting(rng: np.random.Generator, steps: int, runs: int, cv: float) -> np.ndarray:
  """A sine of two pairs' period, on a slope that makes the job slower by `cv` over the run."""
  phase = rng.random(runs) * 2 * np.pi
  at = np.arange(steps)[:, None]
  wave = np.sin(np.pi * at / PAIR + phase) + (at / steps - 0.5)
  return normal(rng, steps, runs, 0.1 * cv) + (cv * wave).astype(np.float32)


NOISES: dict[str, Noise] = {"normal": normal, "correlated": correlated, "wandering": wandering,
                            "pauses": pauses, "heavy": heavy, "drifting": drifting}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One setting, many runs of it."""

  noise: str
  cv: float
  effect: float

  def generate(self, steps: int, runs: int, seed: int) -> np.ndarray:
    """[steps, runs] float32, the job's step times without any delay."""
    rng = np.random.default_rng([seed, list(NOISES).index(self.noise), round(1000 * self.cv)])
    return NOISES[self.noise](rng, steps, runs, self.cv).clip(0.1).astype(np.float32)


def asking() -> Pacer:
  """A pacer that asks for a delay in every step."""
  return Pacer(lambda ranks: (), lambda seen, state: (Decision(jnp.float32(1e-3), {}), state))


@functools.lru_cache(maxsize=2)
def machine(
    **settings: Any) -> tuple[Callable[[int], Any], Callable[[Any, jax.Array, jax.Array], Any]]:
  """Compiles the guarded job.

  Returns:
    `start(runs)` -> carry, and `advance(carry, noise [steps, runs], effect [])` -> carry.
  """
  pacer = jaxpace.guard(asking(), **settings)
  nothing = jnp.full((1,), jnp.nan, jnp.float32)

  def start(runs: int) -> Any:
    state = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * runs), pacer.init(1))
    # Each run tosses coins of its own.
    pairs = 100_000 * jnp.arange(runs, dtype=jnp.int32) - 1
    state = state._replace(trial=state.trial._replace(pair=pairs))
    zero = jnp.zeros(runs, jnp.float32)
    never = jnp.full(runs, np.iinfo(np.int32).max, jnp.int32)
    return {"state": state, "step": jnp.int32(0), "delay": zero,
            "last": jnp.full(runs, jnp.nan, jnp.float32), "lost_on": zero, "lost_off": zero,
            "on": zero, **dict.fromkeys(("helps", "harms", "kept", "dropped"), never)}

  def one(state: Any, step: jax.Array, last: jax.Array, delay: jax.Array,
          seconds: jax.Array) -> Any:
    seen = Observation(step=step, rank=jnp.int32(0), arrivals=nothing, delays=delay[None],
                       waits=nothing, step_time=seconds, job_step_time=last, job_transfers=nothing)
    return pacer.update(seen, state)

  def advance(carry: Any, noise: jax.Array, effect: jax.Array) -> Any:
    def turn(carry: Any, noise: jax.Array) -> tuple[Any, None]:
      on = carry["delay"] > 0
      seconds = noise * jnp.where(on, 1 + effect, 1)
      decision, state = jax.vmap(one, in_axes=(0, None, 0, 0, 0))(
          carry["state"], carry["step"], carry["last"], carry["delay"], seconds)
      lost = noise * jnp.abs(effect)
      info, judged = decision.info, state.trial
      # NaN, not known yet, is neither
      first = {"helps": info["effect_high"] < 0, "harms": info["effect_low"] > 0,
               "kept": judged.mode == trial.KEPT,
               "dropped": (judged.mode == trial.DROPPED) & (judged.pairs > 0)}
      after = {
          "state": state, "step": carry["step"] + jnp.int32(1), "delay": decision.delay,
          "last": seconds, "lost_on": carry["lost_on"] + jnp.where(on, lost, 0),
          "lost_off": carry["lost_off"] + jnp.where(on, 0, lost),
          "on": carry["on"] + on.astype(jnp.float32),
          **{name: jnp.where(now, jnp.minimum(carry[name], carry["step"]), carry[name])
             for name, now in first.items()}}
      return after, None

    return jax.lax.scan(turn, carry, noise)[0]

  return start, jax.jit(advance)


def play(cell: Cell, runs: int, checkpoints: Sequence[int], seed: int = 0,
         **settings: Any) -> dict[str, Any]:
  """Plays many runs of a cell.

  Returns:
    Shares of runs whose interval ever excluded zero on either side, and that ever decided either
    way; steps to the first right decision (median and 90th percentile, None where too few runs got
    there); and at each checkpoint the regret: mean, median, 95th percentile and greatest, in mean
    steps, and the share of steps with pacing on.
  """
  start, advance = machine(**settings)
  noise = cell.generate(max(checkpoints), runs, seed)
  carry, done, at = start(runs), 0, {}
  for stop in checkpoints:
    carry = advance(carry, jnp.asarray(noise[done:stop]), jnp.float32(cell.effect))
    done = stop
    lost = np.asarray(carry["lost_off"] if cell.effect < 0 else carry["lost_on"], np.float64)
    at[str(stop)] = {"mean": lost.mean(), "median": np.median(lost), "p95": np.quantile(lost, 0.95),
                     "most": lost.max(), "on": float(np.mean(carry["on"])) / stop}
  first = {name: np.sort(np.asarray(carry[name]).astype(np.int64))
           for name in ("helps", "harms", "kept", "dropped")}
  ever = {name: float(np.mean(values < done)) for name, values in first.items()}
  right, wrong = ("kept", "harms") if cell.effect < 0 else ("dropped", "helps")
  found = {name: int(np.quantile(first[right], share, method="higher"))
           for name, share in (("median", 0.5), ("p90", 0.9))}
  return {**dataclasses.asdict(cell), "runs": runs, "ever": ever,
          "wrong": ever[wrong] if cell.effect else float(np.mean(
              (np.asarray(carry["helps"]) < done) | (np.asarray(carry["harms"]) < done))),
          "by_2100": float(np.mean(first[right] < 2_100)),
          "by_20000": float(np.mean(first[right] < 20_000)),
          "steps_to_decide": {k: (v if v < done else None) for k, v in found.items()}, "regret": at}


NULL = [Cell(noise, cv, 0.0) for noise in NOISES for cv in (0.05, 0.2)]
EFFECTS = [Cell(noise, cv, effect)
           for noise, cv in (("normal", 0.2), ("correlated", 0.05), ("correlated", 0.15),
                             ("correlated", 0.2), ("heavy", 0.2))
           for effect in (-0.1, -0.03, -0.01, 0.01, 0.03, 0.05, 0.3)]


RESTLESS = {"patience": 16, "retry": 16}


def standard_error(share: float, runs: int) -> float:
  return float(np.sqrt(max(share * (1 - share), 1 / runs) / runs))


def summary(null: Sequence[dict[str, Any]], effects: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """The worst of everything, against the targets."""
  worst = max(null, key=lambda c: c["wrong"])

  def greatest(stop: int) -> dict[str, Any]:
    return max((c for c in effects if str(stop) in c["regret"]),
               key=lambda c: c["regret"][str(stop)]["p95"])

  regret = {str(stop): {"noise": c["noise"], "cv": c["cv"], "effect": c["effect"],
                        "p95": c["regret"][str(stop)]["p95"],
                        "target": TARGET["regret_steps"] if stop < 10_000
                        else TARGET["regret_share"] * stop}
            for stop in CHECKPOINTS if any(str(stop) in c["regret"] for c in effects)
            for c in [greatest(stop)]}
  return {"false_alarms": {"noise": worst["noise"], "cv": worst["cv"], "share": worst["wrong"],
                           "standard_error": standard_error(worst["wrong"], worst["runs"])},
          "false_alarms_within": worst["wrong"] <= TARGET["false_alarms"], "regret": regret,
          "regret_within": all(r["p95"] <= r["target"] for r in regret.values())}


def page(figures: dict[str, Any]) -> list[str]:
  """The figures as Markdown."""
  told = figures["summary"]
  lines = measured.introduction("The guard in simulation", figures)
  lines += [
      "A job of one rank whose pacer asks for a delay in every step; a step takes noise x (1 + "
      "effect where",
      "delayed), of mean 1 without. `jaxpace.guard` with its defaults (blocks of "
      f"{trial.BLOCK} steps). Negative effects are gains.", "",
      "## No effect: false alarms under peeking at every step", "",
      f"Share of runs of {figures['null_steps']:,} steps in which the interval ever excluded "
      "zero, whichever way; target: at most 5 %.",
      f"Restless: {RESTLESS}, so that it returns to pairs many times.", ""]
  lines += measured.table(
      ["noise", "CV", "guard", "runs", "false alarms, %", "standard error", "steps with pacing, %"],
      [[c["noise"], c["cv"], c["guard"], c["runs"], 100 * c["wrong"],
        100 * standard_error(c["wrong"], c["runs"]),
        100 * c["regret"][str(figures["null_steps"])]["on"]] for c in figures["null"]])
  lines += ["## Effects: how soon they are acted upon", "",
            "Steps until a gain is first shown, the interval below zero, or a harm first switched "
            "off; a dash where the runs ended before. Wrong: the interval ever excluded zero on "
            "the other side.", ""]
  lines += measured.table(
      ["noise", "CV", "effect, %", "runs", "steps, median", "90th percentile", "by 2,100, %",
       "by 20,000, %", "wrong, %"],
      [[c["noise"], c["cv"], 100 * c["effect"], c["runs"], c["steps_to_decide"]["median"],
        c["steps_to_decide"]["p90"], 100 * c["by_2100"], 100 * c["by_20000"], 100 * c["wrong"]]
       for c in figures["effects"]])
  lines += ["## Effects: what finding out costs", "",
            "Regret against the better of always on and always off, in mean steps: median / 95th "
            "percentile over runs.",
            "Targets at the 95th percentile: 100 steps for runs under 10,000 steps, 1 % of the run "
            "from there on.", ""]
  stops = [s for s in CHECKPOINTS if str(s) in figures["effects"][0]["regret"]]
  lines += measured.table(
      ["noise", "CV", "effect, %", *(f"after {s:,} steps" for s in stops),
       "steps with pacing at the end, %"],
      [[c["noise"], c["cv"], 100 * c["effect"],
        *(f"{c['regret'][str(s)]['median']:.0f} / {c['regret'][str(s)]['p95']:.0f}" for s in stops),
        100 * c["regret"][str(stops[-1])]["on"]] for c in figures["effects"]])
  lines += [f"Most false alarms: {100 * told['false_alarms']['share']:.1f} % "
            f"(standard error {100 * told['false_alarms']['standard_error']:.1f}); within 5 %: "
            f"{'yes' if told['false_alarms_within'] else 'NO'}.", ""]
  for stop, r in told["regret"].items():
    lines.append(f"Greatest 95th percentile of regret after {int(stop):,} steps: {r['p95']:.0f} "
                 f"mean steps ({r['noise']}, CV {r['cv']:g}, effect {100 * r['effect']:+g} %); "
                 f"target {r['target']:.0f}: {'met' if r['p95'] <= r['target'] else 'MISSED'}.\n")
  return lines


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_integer("null_runs", 1000, "Runs of each cell without an effect.", lower_bound=2)
  flags.DEFINE_integer("null_steps", 10_000, "Steps of each of them.", lower_bound=100)
  flags.DEFINE_integer("runs", 200, "Runs of each cell with an effect.", lower_bound=2)
  flags.DEFINE_integer("steps", 50_000, "Steps of each of them; checkpoints beyond are left out.",
                       lower_bound=1_000)
  flags.DEFINE_integer("seed", 0, "Of the noise.")
  flags.DEFINE_string("output", "docs/measurements/guard_simulated",
                      "Where the figures go, less .json and .md.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  f, begun = flags.FLAGS, time.perf_counter()
  cells: dict[str, list[dict[str, Any]]] = {"null": [], "effects": []}
  stops = {"null": [f.null_steps], "effects": [s for s in CHECKPOINTS if s <= f.steps]}
  figures: dict[str, Any] = {**measured.circumstances("experiments.measure.guard_simulated"),
                             "null_steps": f.null_steps,
                             "steps": f.steps, "seed": f.seed, "target": TARGET}
  made: list[tuple[str, Cell, dict[str, Any]]] = [
      *(("null", cell, {}) for cell in NULL),
      *(("null", cell, RESTLESS) for cell in NULL if cell.noise in ("normal", "correlated")),
      *(("effects", cell, {}) for cell in EFFECTS)]
  for kind, cell, settings in made:
    found = play(cell, f.null_runs if kind == "null" else f.runs, stops[kind], f.seed, **settings)
    cells[kind].append({**found, "guard": "restless" if settings else "default"})
    last = found["regret"][str(stops[kind][-1])]
    print(f"  {cell.noise:10s} CV {cell.cv:<4g} effect {100 * cell.effect:+3.0f} %: wrong "
          f"{100 * found['wrong']:.1f} %, decided after {found['steps_to_decide']['median']} "
          f"steps, regret p95 {last['p95']:.0f}, on {100 * last['on']:.0f} % "
          f"({time.perf_counter() - begun:.0f} s)", flush=True)
  figures |= {**cells, "summary": summary(cells["null"], cells["effects"])}
  figures = json.loads(json.dumps(figures), parse_float=lambda x: float(f"{float(x):.5g}"))
  measured.write(figures, page(figures), pathlib.Path(f.output).with_suffix(".json"))


if __name__ == "__main__":
  define_flags()
  app.run(main)
