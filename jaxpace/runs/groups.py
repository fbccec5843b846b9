"""Which ranks meet in a collective, by its groups or along axes of the mesh, and who waits for whom
there. What `run.json` holds is of its schema, `jaxpace.files.schemas`, when it gets here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_SENDS = ("ppermute", "collective_permute", "collective-permute", "send", "recv")
_MOST_SOURCES = 8
"""Ranks that one rank waits for in a point-to-point transfer, at most."""

_MOST_PAIRS = 1 << 22


class RankGroups(NamedTuple):
  """The ranks of a collective that wait for each other; R ranks. Ranks of two groups never do."""

  groups: np.ndarray  # [R] int64, group of each rank; -1: the rank takes no part
  sources: np.ndarray | None = None
  """[M, R] int64, ranks that each rank receives from, -1 for none; None: each waits for all of its
  group."""


def sends(names: Sequence[str]) -> bool:
  """Whether operations of these names are transfers from one rank to another, not collectives of
  many.

  >>> sends(["ppermute"]), sends(["psum", "ppermute"]), sends([])
  (True, False, False)
  """
  return bool(names) and all(name.lower().startswith(_SENDS) for name in names)


def read_groups(info: dict[str, Any], entry: dict[str, Any], ranks: int,
                 point_to_point: bool) -> RankGroups | None:
  """Finds out who meets in a collective.

  Args:
    info: `run.json`, whose `settings` tell the mesh and the axis.
    entry: what its plan says of the collective: `axis`; `groups`, lists of ranks, where they are
      not those along the axis; by their index along it, `index_groups` of those that do and, of a
      point-to-point transfer, `pairs` of source and target; or these by rank, as `rank_pairs`.

  Returns:
    Who meets; None where all ranks do, or nothing is known of it.
  """
  everyone = np.arange(ranks)[None]
  described, rows = _described(entry.get("groups"), ranks), everyone
  if described is None:
    found = laid_out(info, entry.get("axis"))
    found = laid_out(info) if found is None else found
    rows = rows if found is None or found.size < ranks else found
    row, along = np.empty((2, rows.size), np.int64)
    row[rows], along[rows] = np.arange(len(rows))[:, None], np.arange(rows.shape[1])
    described = row[:ranks]
    inside = _described(entry.get("index_groups"), rows.shape[1])
    if inside is not None:
      own = inside[along[:ranks]]
      described = np.where(own >= 0, described * len(inside) + own, -1)
  sources = _sources(entry.get("pairs"), rows, ranks) if point_to_point else None
  if sources is None and point_to_point:
    sources = _sources(entry.get("rank_pairs"), everyone, ranks)
  if sources is None and (described == described[0]).all():
    return None
  return RankGroups(described, sources)


def _described(value: Sequence[Sequence[int]] | None, ranks: int) -> np.ndarray | None:
  """[R] groups of lists of ranks; None where there are none, or a rank is in two."""
  of_rank = np.full(ranks, -1, np.int64)
  for group, members in enumerate(value or ()):
    inside = [rank for rank in members if rank < ranks]
    if len(set(inside)) < len(inside) or (of_rank[inside] >= 0).any():
      return None
    of_rank[inside] = group
  return of_rank if (of_rank >= 0).any() else None


def _sources(pairs: Sequence[Sequence[int]] | None, rows: np.ndarray, ranks: int
             ) -> np.ndarray | None:
  """[M, R] sources of every rank; None where they are unknown."""
  if not pairs or len(pairs) * len(rows) > _MOST_PAIRS or max(map(max, pairs)) >= rows.shape[1]:
    return None
  sources = np.full((_MOST_SOURCES, ranks), -1, np.int64)
  for one, other in pairs:
    if one == other:
      continue
    for source, target in zip(rows[:, one].tolist(), rows[:, other].tolist(), strict=True):
      if source >= ranks or target >= ranks or source in sources[:, target]:
        continue
      free = np.flatnonzero(sources[:, target] < 0)
      if free.size:
        sources[free[0], target] = source
  used = int((sources >= 0).any(axis=1).sum())
  return sources[:used] if used else None


_MOST = 1 << 20
"""Devices of a mesh that is believed."""


def groups(info: dict[str, Any], ranks: int) -> np.ndarray | None:
  """Lays the recorded ranks (devices of the mesh, in its order) out by data axis: [groups, R]
  int64, in each row the devices along the data axis, by their index along it; rows differ in the
  place along the mesh's other axes. None where `run.json` does not tell."""
  found = laid_out(info)
  if found is not None and found.size == ranks:
    return found
  declared = (info.get("plan") or {}).get("ranks")
  return np.arange(ranks)[None] if declared in (None, ranks) else None


def laid_out(info: dict[str, Any], axis: Sequence[str] | str | None = None) -> np.ndarray | None:
  """Lays all devices of the mesh out by some of its axes, names or these with commas between them,
  by default those in the run's settings: [groups, R] int64 as `groups` does, of the whole mesh;
  None where mesh or axis are unknown."""
  settings = info.get("settings") or {}
  mesh, axis = settings.get("mesh"), axis or settings.get("axis")
  if isinstance(axis, str):
    axis = axis.split(",")
  if not mesh or not axis:
    return None
  size = math.prod(mesh.values())
  if size > _MOST or not set(axis) <= set(mesh) or len(set(axis)) < len(axis):
    return None
  names = list(mesh)
  others = [place for place, name in enumerate(names) if name not in axis]
  order = others + [names.index(name) for name in axis]
  along = math.prod(mesh[name] for name in axis)
  return np.arange(size).reshape(tuple(mesh.values())).transpose(order).reshape(-1, along)
