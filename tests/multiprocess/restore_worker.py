"""A training loop that checkpoints with orbax, for tests that kill it and start it again.

Usage: restore_worker.py DIRECTORY STEPS EVERY PAUSE. Devices are those of XLA_FLAGS; the
environment may join a job of several processes. Prints "step K" after each step, "restored ..."
before the first, and FACTS at the end.
"""

import json
import logging
import pathlib
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from tests.instrumentation.running import instrumented
from tests.multiprocess.joining import laid_out, scaled_down


def own(pace):
  """The pace state of this process's first rank."""
  return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0], pace)


def main() -> None:
  directory, steps, every, pause = (pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]),
                                    float(sys.argv[4]))
  logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
  jaxpace.distributed.initialize()
  ranks = jax.device_count()
  mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,))
  paced, step, pace = instrumented(scaled_down, mesh, P(), P("data"), share=True,
                                   pacer=jaxpace.pace_early_ranks(window=16))
  w, x = (laid_out(np.ones(shape, np.float32), mesh, spread)
          for shape, spread in (((4,), P()), ((ranks, 2), P("data"))))
  first, arrivals = 0, []
  # for `item_metadata`
  handlers = {name: ocp.StandardCheckpointHandler() for name in ("state", "pace")}
  with ocp.CheckpointManager(directory / "checkpoints", options=ocp.CheckpointManagerOptions(
      max_to_keep=2),
                             item_handlers=handlers) as manager:
    latest = manager.latest_step()
    if latest is not None:
      stored = manager.item_metadata(latest)["pace"].tree
      saved = manager.restore(latest, args=ocp.args.Composite(
          state=ocp.args.StandardRestore({"w": w}),
          pace=ocp.args.StandardRestore(jaxpace.pace_target(stored, mesh))))
      w, first = saved["state"]["w"], latest
      pace = jaxpace.restore_pace(saved["pace"], paced, mesh)
      mine = own(pace)
      print("restored "
            + json.dumps({"step": int(mine.step), "seen": int(paced.pacer_state(mine).low.seen),
                          "end": bool(mine.end.any())}), flush=True)
    with jaxpace.Recorder(directory / "run", paced, resume=latest is not None) as recorder:
      for k in range(first, steps):
        pace, w = jax.block_until_ready(step(pace, w, x))
        recorder.record()
        arrivals.append(own(pace).arrivals)
        if (k + 1) % every == 0:
          manager.save(k + 1, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": w}),
                                                      pace=ocp.args.StandardSave(pace)))
          manager.wait_until_finished()
        print(f"step {k}", flush=True)
        time.sleep(pause)
  print("FACTS " + json.dumps({
      "ranks": ranks, "unknown": [int(np.isnan(a).sum()) for a in arrivals[:3]],
      "longest": float(np.nanmax(arrivals)), "step": int(own(pace).step)}), flush=True)


if __name__ == "__main__":
  main()
