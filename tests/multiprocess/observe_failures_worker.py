"""One of two processes that observe and record a step; in the second one part after another fails.

Prints as FACTS, for each part: whether parameters are those of the bare step, and why the step runs
unmodified.
"""

import json
import pathlib
import sys

import jax
import numpy as np

from tests.multiprocess import joining
from tests.multiprocess.joining import laid_out, local, train_step

joining.join()

from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxpace  # noqa: E402
from jaxpace.observation import comparing  # noqa: E402
from jaxpace.observation.clocks import host_ring  # noqa: E402
from jaxpace.observation.partitioned import compiling, program  # noqa: E402
from jaxpace.record.ring import collect, intake  # noqa: E402
from jaxpace.record.ring.copier import RingCopier  # noqa: E402

PARTS = {
    "nothing": [], "read": [(program, "text_of")], "load": [(compiling.Request, "load")],
    "clock": [(host_ring, "unavailable")], "agree": [(comparing.distributed, "barrier")],
    "vote": [(program, "text_of"), (comparing.distributed, "key_value_set")],
    "compare": [(comparing, "copied")], "ring": [(RingCopier, "start")],
    "record": [(intake.Intake, "record")], "collect": [(collect.Collector, "collect")],
    "observe": [],
}
second = jax.process_index() == 1
# The others need not wait that long in a test.
comparing.WAIT_SECONDS = 5.0

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
ones = np.ones(4, np.float32)


def fails(*_, **__):
  raise RuntimeError("no luck")


w, x = laid_out(ones, mesh, P()), laid_out(rows, mesh, P("data"))
bare, wanted = jax.jit(train_step), w
for _ in range(3):
  wanted = bare(wanted, x)

facts = {}
for name, parts in PARTS.items():
  working = [(*part, getattr(*part)) for part in parts]
  if second:
    for part in parts:
      setattr(*part, fails)
  step, found = jax.jit(train_step), w
  if name == "observe" and second:
    # One process does not call it.
    for _ in range(3):
      found = step(found, x)
    facts[name] = [local(found) == local(wanted), []]
    continue
  observed = jaxpace.observe(step, exact=name == "compare")
  with jaxpace.recorded(pathlib.Path(sys.argv[1]) / name, observed) as recorded_step:
    for _ in range(3):
      found = jax.block_until_ready(recorded_step(found, x))
  for one in working:
    setattr(*one)
  facts[name] = [local(found) == local(wanted), [one.bare for one in observed.plan.programs]]
print("FACTS " + json.dumps(facts))
