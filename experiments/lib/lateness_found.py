"""Compares lateness found with lateness injected. Pure numpy; times in milliseconds unless said
otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

SHARE, LEAST_MS = 0.05, 0.3
"""What is found may differ from the truth by this share of it or by this many ms, whichever is
larger."""


def tolerance(truth: np.ndarray) -> np.ndarray:
  """Allowed error of each entry of `truth`, ms."""
  return np.maximum(SHARE * np.abs(truth), LEAST_MS)


def compare(found: np.ndarray, truth: np.ndarray) -> dict[str, float]:
  """Errors of [n] values against [n] truths: share within the tolerance, median error, 95th
  percentile of |error|."""
  error = np.asarray(found, np.float64) - np.asarray(truth, np.float64)
  return {"steps": len(error),
          "within": float(np.mean(np.abs(error) <= tolerance(np.asarray(truth)))),
          "median_error_ms": float(np.median(error)),
          "p95_abs_error_ms": float(np.percentile(np.abs(error), 95))}


def against_others(values: np.ndarray, rank: np.ndarray) -> np.ndarray:
  """By how much one rank's value exceeds the median of the other ranks' in the same step.

  Args:
    values: [R, K].
    rank: [K] int, the rank in question in each step.

  Returns:
    [K].
  """
  columns = np.arange(values.shape[1])
  others = values.astype(np.float64).copy()
  own = others[rank, columns]
  others[rank, columns] = np.nan
  return own - np.nanmedian(others, axis=0)


def per_step(arrivals: np.ndarray, rank: int, asked: np.ndarray,
             slept: np.ndarray) -> dict[str, Any]:
  """Judges a rank's arrival step by step.

  Two baselines are used, each the median over the steps without a delay: of the rank's arrival less
  the median of the other ranks' in the same step, which takes out what holds all ranks up alike
  (the host's dispatch); and of the rank's own arrival.

  Args:
    arrivals: [R, K] ms; NaN where unknown.
    rank: the late one.
    asked: [K] ms injected before this arrival, 0 in the steps without.
    slept: [K] ms really slept.

  Returns:
    By delay asked for: `compare` for both baselines, and the median time slept.
  """
  known = np.isfinite(arrivals).all(axis=0)
  arrivals, asked, slept = arrivals[:, known], asked[known], slept[known]
  lateness = against_others(arrivals, np.full(arrivals.shape[1], rank))
  own = arrivals[rank].astype(np.float64)
  quiet = asked == 0
  found = {"others": lateness - np.median(lateness[quiet]), "own": own - np.median(own[quiet])}
  result: dict[str, Any] = {}
  for delay in sorted(set(asked) - {0}):
    here = asked == delay
    result[f"{delay:g}"] = {"slept_ms": float(np.median(slept[here])),
                            **{name: compare(values[here], slept[here])
                               for name, values in found.items()}}
  quietness = {name: float(np.percentile(np.abs(values[quiet]), 95))
               for name, values in found.items()}
  return {"delays": result, "p95_without_delay_ms": quietness}


def where_it_shows(columns: dict[str, np.ndarray], rank: int, asked: np.ndarray,
                   slept: np.ndarray) -> dict[str, float]:
  """Share of the time slept that each column of the late rank's rows gained, over the larger half
  of the delays.

  Args:
    columns: [R, K] ms by name; NaN where unknown.
    rank: the late one.
    asked: [K] ms injected in this step.
    slept: [K] ms.
  """
  large = asked >= np.median(asked[asked > 0])
  gained = {}
  for name, values in columns.items():
    own = values[rank]
    usable = np.isfinite(own)
    base = np.median(own[usable & (asked == 0)])
    gained[name] = float(np.median((own[usable & large] - base) / slept[usable & large]))
  return gained


def per_block(enters: np.ndarray, arrivals: np.ndarray, slept: np.ndarray,
              rank: int) -> dict[str, float]:
  """One block of steps with the same late rank and delay: medians of lateness, found and true.

  Args:
    enters: [R, K] ms on a clock that all ranks share.
    arrivals: [R, K] ms.
    slept: [K] ms, by the late rank.
    rank: the late one.
  """
  who = np.full(enters.shape[1], rank)
  return {"steps": enters.shape[1], "slept_ms": float(np.median(slept)),
          "found_ms": float(np.median(against_others(arrivals, who))),
          "true_ms": float(np.median(against_others(enters, who)))}


def agrees(found: float, truth: float) -> bool:
  """Whether a found lateness is within the tolerance of a true one, ms."""
  return bool(abs(found - truth) <= tolerance(np.asarray(truth)))
