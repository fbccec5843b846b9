"""Whatever of the package fails in the user's process, training ends as it would without it: of a
step that is named, and of one that is found."""

import signal
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.core import own_context
from jaxpace.hosts import distributed
from jaxpace.observation import comparing, everywhere, observe
from jaxpace.observation import programs as registered
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.partitioned import collectives, compiling, program, thunks
from jaxpace.record import describe, host_use, signals, writer
from jaxpace.record.host_sampler import HostSampler
from jaxpace.record.observed import FoundRecorder
from jaxpace.record.parts import PartStore
from jaxpace.record.recorder import Recorder
from jaxpace.record.ring import collect, finding, intake
from jaxpace.record.ring import observed as programs
from jaxpace.record.ring.copier import RingCopier
from jaxpace.runs import rundir
from tests.observation import observed_steps
from tests.quick import long

BOTH = {
    "read": (program, "program_of"), "find": (collectives, "found_in"),
    "serialize": (compiling.Request, "serialized"), "put timestamps in": (thunks, "timestamped"),
    "load": (compiling.Request, "load"), "describe": (program, "_described"),
    "clock": (host_ring, "unavailable"), "ranks": (host_ring, "ranks"),
    "watch": (compiling, "watch"), "ring": (RingCopier, "__init__"),
    "copy ring": (RingCopier, "copy"), "run": (rundir, "claim"), "place": (describe, "read"),
    "process": (describe, "process"), "share": (distributed, "share_string"),
    "sample": (HostSampler, "__init__"), "intake": (intake.Intake, "__init__"),
    "begin": (collect.Collector, "skip"), "collect": (collect.Collector, "collect"),
    "order": (collect.Collector, "settle"), "lay out": (programs.PlannedPrograms, "device"),
    "meet": (intake.ring_file, "write_plan"), "write": (PartStore, "append"),
    "close ring": (RingCopier, "close"), "signals": (signals.Termination, "install"),
    "signals' end": (signals.Termination, "restore"),
}
NAMED = BOTH | {
    "plan": (observe.Observed, "_add"), "own": (observe.Observed, "_is_own"),
    "copy": (own_context, "on"), "agree": (comparing, "all_say"),
    "compare": (comparing, "differences"), "record": (intake.Intake, "record"),
    "causes": (host_use.StepCauseMeter, "sample"), "process file": (rundir, "write_json"),
    "end": (Recorder, "bring_in"),
}
FOUND = BOTH | {
    "note": (registered, "add"), "usage": (host_ring.Usage, "take"),
    "open": (FoundRecorder, "open"), "decide": (finding, "find"), "cut": (finding.Step, "steps"),
    "wait": (intake.Intake, "reached"), "end": (FoundRecorder, "bring_in"),
}
REST = ("describe", "ranks", "own", "run", "place", "process", "share", "sample", "begin", "causes",
        "order", "lay out", "meet", "process file", "close ring", "signals' end")


class Failed(Exception):
  """Of a point."""


def sgd(w, x):
  return w - jnp.float32(0.1) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def steps_of(step):
  """What four steps give."""
  mesh = observed_steps.mesh_of(data=4)
  rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  w = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P()))
  x = jax.device_put(rows, NamedSharding(mesh, P("data")))
  for _ in range(4):
    w = jax.block_until_ready(step(w, x))
  return observed_steps.bits(w)


@pytest.fixture(scope="module")
def wanted():
  """What they give without the package."""
  return steps_of(jax.jit(sgd))


@pytest.fixture
def failed(monkeypatch):
  """Lets a point fail; returns what says that it did."""
  # Of a recording that an earlier test kept from being closed, too.
  monkeypatch.setattr(threading, "excepthook", lambda args: None)
  times, kept = [], []

  def fail(where, name):
    def fails(*args, **kwargs):
      times.append(name)
      if name == "restore":
        kept.extend(args)
      raise Failed(name)
    monkeypatch.setattr(where, name, fails)
    return times
  yield fail
  monkeypatch.undo()
  for termination in kept:  # else later tests have its handler, and a descriptor that is closed
    signal.set_wakeup_fd(-1)
    termination.restore()


@pytest.mark.parametrize("point", [*(point for point in NAMED if point not in REST), *long(*REST)])
def test_a_step_that_is_named_runs_as_without(tmp_path, monkeypatch, failed, wanted, point):
  times = failed(*NAMED[point])
  observed = jaxpace.observe(jax.jit(sgd), exact=point in ("copy", "compare"))
  with jaxpace.recorded(tmp_path, observed) as recorded_step:
    found = steps_of(recorded_step)
  monkeypatch.undo()
  assert found == wanted and times


@pytest.mark.parametrize("point", FOUND)
def test_a_program_whose_step_is_found_runs_as_without(tmp_path, monkeypatch, failed, wanted,
                                                       point):
  times = failed(*FOUND[point])
  with jaxpace.observed(tmp_path):
    found = steps_of(jax.jit(lambda *args: sgd(*args)))
  monkeypatch.undo()
  assert found == wanted and times
  # Later programs are nobody's.
  assert everywhere._recording is None


def test_a_loop_goes_on_after_sigterm_though_its_devices_can_not_be_awaited(
    tmp_path, monkeypatch, failed, wanted):
  """A program that saves its state first, say."""
  observed = jaxpace.observe(jax.jit(sgd))
  with jaxpace.recorded(tmp_path, observed, handle_sigterm=False) as recorded_step:
    recorded_step.recorder._writer.termination.received = True
    times = failed(intake.Intake, "reached")
    found = steps_of(recorded_step)
    monkeypatch.undo()
  assert found == wanted and times


def test_a_program_that_lives_on_after_sigterm_is_recorded_as_before():
  """For a while each turn of the writer goes to the disk by itself, not for the rest of the job."""
  its = writer.Writer.__new__(writer.Writer)
  its.termination, its._terminates_until = types.SimpleNamespace(received=False), None
  assert not its._terminates()
  its.termination.received = True
  assert its._terminates() and its._terminates()
  its._terminates_until = time.monotonic()
  assert not its._terminates()
