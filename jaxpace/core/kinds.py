"""Kinds of collectives, by XLA's names, and the operations and primitives that are of each."""

from __future__ import annotations

from collections.abc import Iterable

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
         "collective-permute", "collective-broadcast")
"""Kinds of collectives of a compiled program."""

OF_OPERATION = {
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_gather": "all-gather",
    "stablehlo.reduce_scatter": "reduce-scatter",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
    "stablehlo.collective_broadcast": "collective-broadcast",
}
"""Kind of each operation of a partitioned program that is a collective."""

_OF_PRIMITIVE = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
                 "all_to_all": "all-to-all", "ragged_all_to_all": "ragged-all-to-all",
                 "ppermute": "collective-permute"}
SEVERAL = "several"


def of_primitives(names: Iterable[str]) -> str:
  """Kind of a collective that primitives of these names make: sums, means, least and greatest are
  all-reduces.

  >>> [of_primitives(names) for names in (["psum", "pmin"], ["ppermute"], ["psum", "ppermute"])]
  ['all-reduce', 'collective-permute', 'several']
  """
  kinds = {_OF_PRIMITIVE.get(name, "all-reduce") for name in names}
  return kinds.pop() if len(kinds) == 1 else SEVERAL
