"""Reads what was played: times since the start in float64, and which gradient was made of which
parameters."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxpace.simulation.strategies.schedule import PlayedSteps, Served

_TIE = 1e-6
"""Seconds within which an update that ends as a step begins counts as seen: rounding of float32."""


@dataclasses.dataclass(frozen=True)
class CommonSteps:
  """Steps that all ranks take, one after the other."""

  time: np.ndarray  # [K] s since the start, when the last rank was done with the step
  counted: np.ndarray  # [K, R] bool, whether a rank's gradient was used
  paces: np.ndarray  # [R] s a step, mean over the run, each rank by itself


@dataclasses.dataclass(frozen=True)
class Updates:
  """Updates by one rank's gradient each, in the order they were applied."""

  time: np.ndarray  # [U] s since the start
  rank: np.ndarray  # [U] int
  # [U] int, updates applied since the parameters were read that the gradient was made of
  delay: np.ndarray


def rounds(played: PlayedSteps) -> CommonSteps:
  """Times of a strategy in which every rank takes the same steps."""
  finish = spans(played)[1]
  return CommonSteps(finish.max(axis=1), np.asarray(played.counted), finish[-1] / len(finish))


def spans(played: PlayedSteps) -> tuple[np.ndarray, np.ndarray]:
  """When each rank began each step, and when it was done with it and its exchange: [K, R] s since
  the start, each."""
  origins = _origins(played)[:, None]
  return (origins + np.asarray(played.start, np.float64),
          origins + np.asarray(played.finish, np.float64))


def updates(played: PlayedSteps | Served) -> Updates:
  """Single updates, of ranks that read parameters when they begin a step and add to them when they
  have ended it."""
  if isinstance(played, Served):
    valid = np.asarray(played.valid)
    elapsed = np.asarray(played.elapsed, np.float64)[valid]
    return Updates(elapsed.cumsum(), np.asarray(played.rank)[valid],
                   np.asarray(played.delay)[valid])
  start, finish = (times.ravel() for times in spans(played))
  order = np.argsort(finish, kind="stable")
  ranks = np.broadcast_to(np.arange(played.start.shape[1]), played.start.shape).ravel()
  read = np.searchsorted(finish[order], start[order] + _TIE, side="right")
  return Updates(finish[order], ranks[order], np.maximum(np.arange(len(order)) - read, 0))


def _origins(played: PlayedSteps) -> np.ndarray:
  """[K] s since the start at which each row's times begin."""
  moved = np.asarray(played.moved, np.float64)
  return np.concatenate([[0.0], moved.cumsum()[:-1]])
