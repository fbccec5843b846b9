"""How often the link probe's inference is right, on made-up times: healthy ones of several noises,
and every fault.

    python -m experiments.measure.link_inference                # about five minutes; needs no quiet machine

Writes docs/measurements/link_inference.json and the table of it, link_inference.md.
"""  # noqa: E501

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from absl import app, flags

from jaxpace.live.probe.inference import infer

KINDS = ("host", "sender", "receiver", "link", "direction")
NOISES = (("normal", 0.05), ("normal", 0.2), ("Student t, 3 degrees", 0.1), ("exponential", 0.2),
          ("normal 0.05, and hosts that differ by", 0.05))


def times(rng: np.random.Generator, n: int, noise: str, size: float) -> np.ndarray:
  """[n, n] logarithms of times without a fault."""
  if noise == "normal":
    return rng.normal(0, size, (n, n))
  if noise.startswith("Student"):
    return size * rng.standard_t(3, (n, n))
  if noise == "exponential":
    return rng.exponential(size, (n, n))
  host = rng.normal(0, size, n)
  return rng.normal(0, 0.05, (n, n)) + host[:, None] + host[None, :]


def with_fault(y: np.ndarray, kind: str, ratio: float) -> np.ndarray:
  """Adds a fault of process 1, or of its link to process 2."""
  slow = np.zeros_like(y, bool)
  if kind in ("host", "sender"):
    slow[1, :] = True
  if kind in ("host", "receiver"):
    slow[:, 1] = True
  if kind in ("link", "direction"):
    slow[1, 2] = True
  if kind == "link":
    slow[2, 1] = True
  return y + np.log(ratio) * slow


def row(n: int, noise: tuple[str, float], ratio: float, runs: int, seed: int) -> dict[str, Any]:
  """Shares of healthy jobs in which somebody is blamed, and of faulty ones named rightly and
  wrongly."""
  rng = np.random.default_rng(seed)
  hosts = [f"h{i}" for i in range(n)]
  blamed = (sum(bool(infer(np.exp(times(rng, n, *noise)), hosts).culprits) for _ in range(runs))
            / runs)
  right, wrong = {}, 0
  for kind in KINDS:
    found = [infer(np.exp(with_fault(times(rng, n, *noise), kind, ratio)), hosts).culprits
             for _ in range(runs // 4)]
    good = [[(c.kind, c.hosts[0]) for c in one] == [(kind, "h1")] for one in found]
    right[kind] = sum(good) / len(found)
    wrong += sum(bool(one) and not ok for one, ok in zip(found, good, strict=True))
  return {"n": n, "noise": f"{noise[0]} {noise[1]:g}", "ratio": ratio, "blamed": blamed,
          "right": right, "wrong": wrong / (len(KINDS) * (runs // 4))}


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Not an option: {argv[1]}.")
  from experiments.lib import measured
  figures = measured.circumstances("experiments.measure.link_inference")
  cases = [(n, noise, ratio) for n in (3, 4, 8) for noise in NOISES for ratio in (2.0, 4.0)]
  say = measured.progress("cases", len(cases))
  rows = []
  for i, (n, noise, ratio) in enumerate(cases):
    rows.append(row(n, noise, ratio, _RUNS.value, seed=i))
    say(i + 1)
  figures |= {"runs": _RUNS.value, "rows": rows}
  table = measured.table(
      ("processes", "noise of the times' logarithm", "times as slow", "healthy, somebody blamed",
       *KINDS, "wrong"),
      [(r["n"], r["noise"], r["ratio"], f"{r['blamed']:.1%}",
        *(f"{r['right'][k]:.0%}" for k in KINDS), f"{r['wrong']:.1%}") for r in rows])
  lines = [*measured.introduction("The link probe's inference, on made-up times", figures),
           f"{_RUNS.value} healthy jobs a row, {_RUNS.value // 4} of each fault: named rightly, "
           "and nothing else. Wrong: something else was named, over all faults; the rest said that "
           "it can't be told, or nothing.", "",
           *table]
  measured.write(figures, lines, pathlib.Path(_OUT.value))


_RUNS = flags.DEFINE_integer("runs", 200,
                             "Healthy jobs of each case; a quarter as many of each fault.",
                             lower_bound=4)
_OUT = flags.DEFINE_string("out", "docs/measurements/link_inference.json", "Where the figures go.")

if __name__ == "__main__":
  app.run(main)
