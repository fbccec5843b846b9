"""One process of a job whose steps write timestamps: process 1 is late in one layer of one step.

Usage: marks_worker.py DIRECTORY SECONDS
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpace.record.recorder import Recorder
from tests.multiprocess import joining
from tests.record.ring.handmade import Handmade


def main():
  joining.join()
  step = Handmade(layers=3)
  late = np.zeros((4, 4), np.float32)
  late[2, 1] = float(sys.argv[2])
  x, none, late = (joining.laid_out(values, step.mesh, P("data"))
                   for values in (np.ones((4, 4), np.float32), 0 * late, late))
  x = jax.block_until_ready(step(x, none))
  with Recorder(sys.argv[1], step) as recorder:
    for k in range(12):
      x = step(x, late if k == 7 else none)
      recorder.record()
  print("FACTS " + json.dumps({"lost": recorder.lost,
                               "devices": [device.id for device in jax.local_devices()]}))


if __name__ == "__main__":
  main()
