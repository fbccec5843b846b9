"""The page of `experiments.stability.run`: what the tests said, in words chosen by the figures."""

from __future__ import annotations

from typing import Any

from scipy import stats

from experiments.lib import measured

CONTROLS = {"baseline": "as it is", "young_daly": "checkpoints by Young and Daly",
            "aligned": "pauses aligned", "local_steps": "averaging every 8 steps",
            "chosen": "chosen from the projection",
            "chosen_local": "chosen, averaging less often allowed"}


def page(figures: dict[str, Any]) -> list[str]:
  """Everything, as Markdown."""
  lines = measured.introduction("Structural stability of thousands of accelerators, simulated",
                                figures)
  lines += [
      "A simulation: what follows from the numbers of `configs/stability.py`, many of them "
      "assumed, each marked there.",
      "All ratios are against a job that nothing disturbs: no jitter, no transfer, no failures. "
      "[docs/stability.md](../stability.md) defines every word.", ""]
  lines += _compounding(figures)
  for world in figures["policies"]:
    lines += _amplification(figures, world) + _controls(figures, world) + _knees(figures, world)
  lines += ["## What the report says of such a run", ""]
  own = figures["recorded"]
  lines += [f"{own['groups']} groups, {own['steps']} steps of the baseline, recorded and given to "
            "`jaxpace report --stability`:", "", f"- Verdict: {own['verdict']}",
            f"- Decision: {own['decision']}", ""]
  return lines


def compounds(cell: dict[str, Any]) -> str:
  """What the growth test said over the runs of one size."""
  if not cell["runs"]:
    return "not tested"
  return f"{cell['rises']} of {cell['runs']}"


def amplifies(cell: dict[str, Any]) -> str:
  """Whether failures and variation cost more together than each by itself."""
  return _side(cell["interval"])


def _side(interval: list[float]) -> str:
  low, high = interval
  return "more" if low > 1 else "less" if high < 1 else "not shown"


def _compounding(figures: dict[str, Any]) -> list[str]:
  sizes = [str(n) for n in figures["sizes"]]
  found = figures["compounding"]
  lines = ["## Does jitter compound over barriers?", "",
           "Var(sum over K steps) / (K Var(one step)), mean over runs, at the longest K; and in "
           f"how many runs the test at {figures['alpha']:g} gives up independent steps. Waiting is "
           "the share of the step that groups wait, pause and transfer. The control has the same "
           "barriers, jitter and pauses, and no drift and no wander.", ""]
  rows = []
  for size in sizes:
    null, base = found[size]["null"], found[size]["baseline"]
    rows.append([size, base["windows"][-1] if base["windows"] else None, *(
        entry for cell in (null, base)
        for entry in (cell["ratio"][-1] if cell["ratio"] else None, compounds(cell),
                      cell["waiting"]))])
  lines += measured.table(["accelerators", "K", "control: ratio", "rises in", "waiting",
                           "baseline: ratio", "rises in", "waiting"], rows)
  total = {name: (sum(found[s][name]["rises"] for s in sizes),
                  sum(found[s][name]["runs"] for s in sizes))
           for name in ("null", "baseline")}
  first, last = (found[s]["null"]["waiting"] for s in (sizes[0], sizes[-1]))
  lines += [
      f"Barriers alone: the test gave up independence in {total['null'][0]} of {total['null'][1]} "
      f"runs; the share waited went from {_percent(first)} to {_percent(last)} over the sizes. "
      f"With drift and wander: {total['baseline'][0]} of {total['baseline'][1]} (of independent "
      f"steps {_share(*total['null'])} of the runs, of these {_share(*total['baseline'])}; exact "
      "95 % intervals). So " + (
          "what barriers add to i.i.d. jitter is paid again in each step and does not compound; "
          "what lasts from step to step does, and it is memory in the machines that barriers pass "
          "on to all, not the barrier."
          if total["null"][0] <= 0.1 * total["null"][1]
          and total["baseline"][0] > 0.5 * total["baseline"][1] else
          "the two can't be told apart at these sizes."
          if total["baseline"][0] <= 0.1 * total["baseline"][1] else
          "the picture is mixed: see the rows."), ""]
  return lines


def _amplification(figures: dict[str, Any], world: str) -> list[str]:
  found = figures["amplification"][world]
  rows = [[size, cell["interaction"], *cell["interval"], amplifies(cell), cell["variation"],
           *cell["variation_interval"], cell["variance_failures"],
           cell["variance_variation"], cell["variance_both"], cell["after_restart"],
           *(f"{cell['memory'][name]['rises']} of {cell['memory'][name]['runs']}"
             for name in ("failures", "both"))]
          for size, cell in found.items()]
  said = [amplifies(cell) for cell in found.values()]
  even = [_side(cell["variation_interval"]) for cell in found.values()]
  resets = [cell["after_restart"] for cell in found.values() if cell["after_restart"] is not None]
  cooler = (f"{100 * (1 - max(resets)):.1f} to {100 * (1 - min(resets)):.1f} % quicker" if resets
            else "not seen")
  if resets and max(resets) > 1:
    cooler = "not always quicker"
  return [
      f"## Do restarts amplify? Failures are {world}", "",
      f"A node fails every {figures['config']['mtbf'][world] / 3600:,.0f} h on average. "
      "Interaction: time with failures and varying steps, times time with neither, over the "
      "product of either alone; above 1 they cost more together (low and high: two standard errors "
      "over runs). Against even steps: the same time over that of steps as slow but all alike, "
      "which leaves what variation itself does. Variance: of the time of equal work, relative. "
      "After a restart: steps within one warming time of a start, over warm ones; checkpoints and "
      "restarts left out.", "",
      *measured.table(["accelerators", "interaction", "low", "high", "together",
                       "against even steps", "low", "high", "variance, failures",
                       "variance, varying steps", "both", "after a restart", "memory, failures",
                       "memory, both"], rows),
      f"Costing more together is shown at {said.count('more')} of {len(said)} sizes, less at "
      f"{said.count('less')}, neither at {said.count('not shown')}: slower steps keep the work "
      "between two checkpoints at risk for longer. Against steps as slow but even, varying ones "
      f"cost more at {even.count('more')} sizes, less at {even.count('less')}, neither at "
      f"{even.count('not shown')}. Steps after a restart are {cooler} than warm ones: a restart "
      "resets the drift, if anything. Nearly all variance of equal work is that of lost work "
      "and restarts.", ""]


def _controls(figures: dict[str, Any], world: str) -> list[str]:
  lines = [f"## What control does. Failures are {world}", "",
           "Cost to performance with its standard error, what the projection said of it "
           "beforehand, and over the baseline; re-runs, runtime variance, energy to output.", ""]
  rows = []
  for size, cells in figures["policies"][world].items():
    for name, cell in cells.items():
      policy, base = cell["policy"], cells["baseline"]
      rows.append([size, CONTROLS[name], f"{policy['interval'] / 60:.0f} min", policy["aligned"],
                   policy["local"], cell["cost"][0], cell["cost"][1], cell["projected"],
                   cell["cost"][0] / base["cost"][0], cell["reruns"][0], cell["variance"][0],
                   cell["energy"][0], cell["failures"]])
  return [*lines, *measured.table(
      ["accelerators", "policy", "checkpoint every", "aligned", "H", "cost", "±", "projected",
       "over baseline", "re-runs", "variance", "energy", "failures"], rows),
      "H above 1 averages parameters every H steps: another training, whose quality is not "
      "simulated here.", ""]


def _knees(figures: dict[str, Any], world: str) -> list[str]:
  rows = [[CONTROLS.get(name, "control: i.i.d., no failures"),
           cell["sigma"], *cell["sigma_interval"],
           cell["kappa"], *cell["kappa_interval"], cell["misfit"], cell["highest_at"],
           cell["efficiency"][-1], cell["why"]]
          for name, cell in figures["knees"][world].items()]
  return [f"## Where the regime shifts. Failures are {world}", "",
          "The universal scalability law, fitted to throughput over all sizes; N counts "
          "accelerators. Misfit is the largest share by which a size departs from the law: where "
          "it is larger than a few percent, trust the rows above and not the law.", "",
          *measured.table(["policy", "sigma", "low", "high", "kappa", "low", "high", "misfit",
                           "most throughput at", "efficiency at the largest", "knee"], rows)]


def between(count: int, of: int) -> tuple[float, float]:
  """Exact 95 % interval of a share (Clopper and Pearson)."""
  interval = stats.binomtest(count, of).proportion_ci()
  return float(interval.low), float(interval.high)


def _share(count: int, of: int) -> str:
  low, high = between(count, of)
  return f"{100 * low:.1f} to {100 * high:.1f} %"


def _percent(value: float | None) -> str:
  return "an unknown share" if value is None else f"{100 * value:.1f} %"
