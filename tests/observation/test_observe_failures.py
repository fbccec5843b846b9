"""Whatever of the package fails in the user's process, training ends as it would without it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.core import own_context
from jaxpace.observation import comparing, observe
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.partitioned import collectives, compiling, program, thunks
from jaxpace.record import describe
from jaxpace.record.host_sampler import HostSampler
from jaxpace.record.parts import PartStore
from jaxpace.record.recorder import Recorder
from jaxpace.record.ring import collect, intake
from jaxpace.record.ring import observed as programs
from jaxpace.record.ring.collect import ExecutionOrder
from jaxpace.record.ring.copier import RingCopier
from jaxpace.runs import rundir, step_causes
from tests.observation import observed_steps

POINTS = {
    "read": (program, "text_of"), "find": (collectives, "found_in"),
    "serialize": (compiling.Request, "serialized"), "put timestamps in": (thunks, "timestamped"),
    "load": (compiling.Request, "load"), "describe": (program, "_described"),
    "plan": (observe.Observed, "_add"), "own": (observe.Observed, "_is_own"),
    "clock": (host_ring, "unavailable"), "ranks": (host_ring, "ranks"), "copy": (own_context, "on"),
    "watch": (compiling, "watch"), "agree": (comparing, "all_say"),
    "compare": (comparing, "differences"),
    "ring": (RingCopier, "__init__"), "copy ring": (RingCopier, "copy"),
    "run": (rundir, "claim"), "place": (describe, "read"),
    "process": (describe, "process"), "share": (describe, "share"),
    "sample": (HostSampler, "__init__"), "intake": (intake.Intake, "__init__"),
    "begin": (ExecutionOrder, "__init__"), "record": (intake.Intake, "record"),
    "causes": (step_causes.StepCauseMeter, "sample"), "collect": (collect.Collector, "collect"),
    "order": (ExecutionOrder, "settle"), "lay out": (programs, "device"),
    "meet": (intake.ring_file, "write_plan"), "write": (PartStore, "append"),
    "process file": (rundir, "write_json"),
    "end": (Recorder, "bring_in_last"), "close ring": (RingCopier, "close"),
}


class Failed(Exception):
  """Of a point."""


def sgd(w, x):
  return w - jnp.float32(0.1) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def arrays():
  mesh = observed_steps.mesh_of(data=4)
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  return (jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P())),
          jax.device_put(x, NamedSharding(mesh, P("data"))))


REST = ("describe", "ranks", "own", "run", "place", "process", "share",
        "sample", "begin", "causes", "order", "lay out", "meet", "process file", "close ring")


@pytest.mark.parametrize("point", [
    pytest.param(point, marks=pytest.mark.long) if point in REST else point for point in POINTS])
def test_a_failure_at_any_point_leaves_training_as_it_is(tmp_path, monkeypatch, point):
  where, name = POINTS[point]
  failed = []

  def fails(*args, **kwargs):
    failed.append(point)
    raise Failed(point)

  w, x = arrays()
  jitted, wanted = jax.jit(sgd), w
  for _ in range(4):
    wanted = jitted(wanted, x)
  # Of a recording that an earlier test kept from being closed, too.
  monkeypatch.setattr(threading, "excepthook", lambda args: None)
  monkeypatch.setattr(where, name, fails)
  observed = jaxpace.observe(jax.jit(sgd), exact=point in ("copy", "compare"))
  with jaxpace.recorded(tmp_path, observed) as recorded_step:
    for _ in range(4):
      w = jax.block_until_ready(recorded_step(w, x))
  monkeypatch.undo()
  assert observed_steps.bits(w) == observed_steps.bits(wanted)
  assert failed
