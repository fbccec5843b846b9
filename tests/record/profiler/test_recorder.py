"""A plain-jit loop on four devices, one of them late by a known time."""

import errno
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING
from tests.patience import patiently
from tests.record.recording import one_warning

LATE, LATE_SECONDS = 2, 0.04


def make_step(mesh):
  def wait(x):
    def sleep(x):
      time.sleep(LATE_SECONDS * float(x))
      return np.float32(0)
    return jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])

  def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

  @jax.jit
  def step(w, x):
    late = jax.shard_map(lambda x: x + wait(x), mesh=mesh, in_specs=P("data"), out_specs=P("data"),
                         check_vma=False)(x)
    value, slope = jax.value_and_grad(loss)(w, late)
    return w - jnp.float32(0.1) * slope, value

  return step


def inputs(mesh):
  x = np.zeros((4, 8), np.float32)
  x[LATE] = 1.0
  return (jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P())),
          jax.device_put(x, NamedSharding(mesh, P("data"))))


def record(directory):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
  step, (w, x) = make_step(mesh), inputs(mesh)
  with jaxpace.ProfiledRecorder(directory, every=5, steps=3, handle_sigterm=False) as recorder:
    for _ in range(17):
      with recorder.measure("data"):
        pass
      w, value = step(w, x)
      recorder.record(value, loss=1.0)
      # on a busy machine the next session would be due before the trace is written
      recorder._free.wait(300)
  return directory, recorder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  return record(tmp_path_factory.mktemp("profiled"))


def test_on_gpus_the_loop_runs_without_the_profiler(tmp_path, monkeypatch, caplog):
  """To take it down there has killed a job, and its traces can't be read."""
  begun = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **options: begun.append(args))
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  with jaxpace.ProfiledRecorder(tmp_path, every=3, steps=2, handle_sigterm=False) as recorder:
    for _ in range(7):
      recorder.record(jnp.zeros(()))
  assert not begun and not recorder.recording
  one_warning(caplog, "traces of GPUs do not say which execution")


@patiently(LATE_SECONDS=0.04)
def test_the_late_device_is_found_late_by_what_it_slept(recorded, tmp_path):
  directory, recorder = recorded if LATE_SECONDS == 0.04 else record(tmp_path)
  run = read_run(directory)
  assert recorder.sessions == 2  # the third is under way when the loop ends
  first = run.collectives[0]
  known = (first.enter_ns[:4] != MISSING).all(axis=0)
  assert run.steps[known].tolist() == [5, 6, 7, 10, 11, 12]
  enter, leave = first.enter_ns[:4][:, known], first.exit_ns[:4][:, known]
  busy, wait = (enter[:, [1, 2, 4, 5]] - leave[:, [0, 1, 3, 4]]) * 1e-9, (leave - enter) * 1e-9
  # own exit to own entry, within a session: the sleep is in it, always
  assert (busy[LATE] > LATE_SECONDS).all()
  for other in (0, 1, 3):  # a busy machine may hold up anybody, now and then
    assert busy[other].min() < LATE_SECONDS and wait[other].max() > 0.5 * LATE_SECONDS
    assert np.median(enter[LATE] - enter[other]) > 0.5 * LATE_SECONDS * 1e9
  assert wait[LATE].min() < 0.5 * LATE_SECONDS
  assert recorder.lost["lost_rows"] == 0 and recorder.lost["stopped"] is None


def test_the_run_says_where_its_times_come_from(recorded):
  directory, _ = recorded
  run = read_run(directory)
  assert run.info["clock"] == "profiler" and run.info["settings"]["source"] == "jax.profiler"
  assert "sampled traces" in run.plan["notices"][0]
  assert run.collectives[0].bytes is None
  assert abs(run.collectives[0].enter_ns[0][5 - run.steps[0]] - time.monotonic_ns()) < 600e9
  rows = pq.read_table(directory / "steps").to_pydict()
  assert None not in rows["data_ns"] and set(rows["host_loss"]) == {1.0}


def test_no_thread_is_left_and_no_session(recorded):
  assert not [t for t in threading.enumerate() if t.name == "jaxpace-profile-reader"]
  with jax.profiler.TraceAnnotation("free"):
    pass


def test_the_users_own_profile_goes_first(tmp_path, caplog):
  w = jnp.zeros(())
  jax.profiler.start_trace(str(tmp_path / "own"))
  try:
    with jaxpace.ProfiledRecorder(tmp_path / "run", every=3, steps=2,
                                  handle_sigterm=False) as recorder:
      for _ in range(8):
        recorder.record(w)
  finally:
    jax.profiler.stop_trace()
  assert recorder.sessions == 0 and caplog.text.count("profiler can't be started") == 1
  assert list((tmp_path / "own").glob("**/*.xplane.pb"))


def test_a_loop_without_collectives_is_told_so_and_goes_on(tmp_path, caplog):
  step = jax.jit(lambda x: x + 1)
  x = jnp.zeros(())
  with jaxpace.ProfiledRecorder(tmp_path, every=3, steps=2, handle_sigterm=False) as recorder:
    for _ in range(9):
      x = step(x)
      recorder.record(x)
  assert float(x) == 9.0 and "has a collective" in caplog.text


def test_a_loop_goes_on_where_no_trace_can_be_written(tmp_path, monkeypatch, caplog):
  def full(prefix):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(tempfile, "mkdtemp", full)
  with jaxpace.ProfiledRecorder(tmp_path, every=3, steps=2, handle_sigterm=False) as recorder:
    for _ in range(7):
      recorder.record(jnp.zeros(()))
  assert recorder.sessions == 0 and caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize(("every", "steps"), [(4, 4), (10, 1), (2, 5), (5.0, 2)])
def test_no_room_for_a_session(tmp_path, every, steps):
  with pytest.raises(ValueError, match="2 <= steps < every"):
    jaxpace.ProfiledRecorder(tmp_path, every=every, steps=steps)


def test_record_outside_of_with(tmp_path):
  with pytest.raises(RuntimeError, match="with"):
    jaxpace.ProfiledRecorder(tmp_path).record(None)
  with jaxpace.ProfiledRecorder(None) as off:
    off.record(None)
