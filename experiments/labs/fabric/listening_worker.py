"""One rank of the listening lab: listens, or sends, for so long as it is told. See `listening`.

Answers requests on stdin, a line of JSON each: {"kind", "size"} compiles, {"start", "seconds",
"each"} runs.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.execution import hold, resolve_clock, words

_REST, _EVERY = 0.02, 0.002  # s, between buckets, and between readings


def make(kind: str, size: int) -> Any:
  """Compiles one reading, or one bucket: () -> s, when it began and ended, what was heard, and when
  that was told."""
  clock = resolve_clock("auto", "cpu")
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
  sharding = NamedSharding(mesh, P("data"))
  data = jax.make_array_from_callback((jax.device_count(), size), sharding,
                                      lambda index: np.zeros((1, size), np.float32))

  def one(values: jax.Array) -> tuple[jax.Array, ...]:
    begin = clock.stamp(words.zero(), values)
    (token,) = hold(clock, begin, [values[0]])
    end = clock.stamp(begin, jax.lax.psum(token, "data"))
    took = words.seconds_between(begin, end)[None]
    least = jax.lax.pmin(took, "data") if kind == "listen" else took
    return begin[None], end[None], least, clock.stamp(end, least)[None]

  run = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
                              check_vma=False))

  def once() -> list[float]:
    begin, end, least, told = (np.asarray(value.addressable_shards[0].data)[0]
                               for value in run(data))
    return [1e-9 * int(words.to_ns(begin)), 1e-9 * int(words.to_ns(end)), float(least),
            1e-9 * int(words.to_ns(told))]

  for _ in range(3):
    once()
  return once


def main() -> None:
  """Answers requests until stdin ends."""
  jaxpace.distributed.initialize()
  once: Any = None
  draw = np.random.default_rng(7)
  rest = _EVERY
  for line in sys.stdin:
    request = json.loads(line)
    if "kind" in request:
      once, rest = (make(request["kind"], request["size"]),
                    _EVERY if request["kind"] == "listen" else _REST)
      print(json.dumps({"answer": "ready"}), flush=True)
      continue
    time.sleep(max(0.0, request["start"] - time.monotonic()))
    found: list[list[float]] = []
    # So many times on every rank alike: they meet each time, and would wait for ever for one that
    # stopped.
    total = int(request["seconds"] / (rest + request["each"]))
    for pause in draw.exponential(rest, total).tolist():
      found.append(once())
      time.sleep(pause)
    print(json.dumps({"answer": found}), flush=True)


if __name__ == "__main__":
  main()
