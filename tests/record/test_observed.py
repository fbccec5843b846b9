"""Recording around whatever trains: no function is named, none is wrapped."""

import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.hosts import distributed
from jaxpace.observation import comparing, programs
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.partitioned import compiling
from jaxpace.record import host_use, observed, writer
from jaxpace.record.columns import DeviceSteps
from jaxpace.record.ring import found
from jaxpace.runs import rundir
from jaxpace.runs.reader import RunError, read_run
from tests.patience import awaited, patiently
from tests.record.unnamed_step import STEPS, arrays, rows_written, train

PAUSE = 0.5


def test_whatever_trains_inside_is_recorded_and_its_results_are_the_same(tmp_path):
  bare = train()
  with jaxpace.observed(tmp_path / "run") as inside:
    seen = train()
  assert seen.tobytes() == bare.tobytes()
  run = read_run(tmp_path / "run")
  assert len(run.steps) == STEPS and run.ranks == 4 and not run.problems
  assert inside.step.programs == ("sgd",)
  said = rundir.read_json(tmp_path / "run" / "run.json")["settings"]["step"]
  assert said["programs"] == ["sgd"] and said["why"] == inside.step.why


@patiently(PAUSE=0.5)
def test_what_the_process_did_in_each_step_is_recorded_though_nobody_says(tmp_path):
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data")))
  add = jax.jit(lambda x: x + x.sum())
  with jaxpace.observed(tmp_path / "run"):
    for step in range(8):
      if step == 5:
        gc.collect()
      if step == 6:
        time.sleep(PAUSE)
      x = jax.block_until_ready(add(x))
  causes = read_run(tmp_path / "run").host_causes.columns
  collected, between = causes["gc"][0], causes["between"][0]
  assert np.isnan(collected[0]) and np.argmax(collected[1:]) + 1 == 5
  assert np.isnan(between[0]) and np.argmax(between[1:]) + 1 == 6 and between[6] > 0.4 * PAUSE
  # Steps of less than 10 ms share what the kernel says of them together.
  assert causes["cpu"][0, 1:].sum() > 0 and not np.isnan(causes["cpu"][0, 1:]).any()
  assert (causes["majflt"][0, 1:] >= 0).all()


def test_a_tracer_of_the_program_sees_no_thread_of_the_recording(tmp_path):
  seen = set()

  def trace(frame, *_):
    seen.add((threading.current_thread().name.partition("-")[0], frame.f_code.co_name))

  before = threading.gettrace()
  threading.settrace(trace)
  try:
    with jaxpace.observed(tmp_path / "run"):
      train()
  finally:
    threading.settrace(before)
  assert {what for whose, what in seen if whose == "jaxpace"} == {"run"}
  assert len(read_run(tmp_path / "run").steps) == STEPS


def test_a_debugger_that_minds_its_tracing_is_left_alone(tmp_path, monkeypatch):
  complaints = []
  monkeypatch.setattr("sys.settrace", lambda trace: complaints.append(trace))
  with jaxpace.observed(tmp_path / "run"):
    train()
  assert complaints == [] and len(read_run(tmp_path / "run").steps) == STEPS


def test_garbage_that_is_collected_while_pauses_are_read_does_no_harm():
  meter, before = host_use.StepCauseMeter(), gc.get_threshold()
  meter.start()
  try:
    gc.set_threshold(1)
    kept = [[] for _ in range(100)]
    collected = [meter.collected(np.array([time.monotonic_ns()])) for _ in kept]
  finally:
    gc.set_threshold(*before)
    meter.stop()
  assert 0 < collected[0] < collected[-1]


def devices_of(*spans):
  """What two devices did in steps that began and ended so, in ms; the second ends 1 ms later."""
  start, end = np.array(spans, np.int64).T * 1_000_000
  whole = np.ones(len(spans), bool)
  return [DeviceSteps(whole, ~whole, start, end + late, {}, {}) for late in (0, 1_000_000)]


def test_time_between_steps_is_what_nothing_else_explains(monkeypatch):
  def reading(ms, cpu=0, queued=0):
    return (ms * 1_000_000, cpu * 1_000_000, 0, 0, queued * 1_000_000 if queued >= 0 else -1, 0)

  # An evaluation ends at 45; of the last gap the machine takes 6 ms, the collector 4.
  read = np.array([reading(10), reading(30), reading(45), reading(60), reading(100, queued=6),
                   reading(120, queued=-1)], host_ring.USAGE)
  host = host_use.HostUse(meter := host_use.StepCauseMeter())
  monkeypatch.setattr(host._usage, "take", lambda: read)
  meter._pauses = ((70_000_000, 74_000_000),)
  samples = host.samples(devices_of((0, 10), (20, 30), (50, 60), (85, 100), (105, 120)))
  at = [cause.column for cause in host_use.HOST_CAUSES].index("between_ns")
  # Gaps of 9, 5, 24 and 4 ms, from the second device's end or the evaluation's.
  assert samples[:, at].tolist() == [None, 9_000_000, 5_000_000, 14_000_000, None]
  # From the end of the second step, on the second device, to the evaluation's.
  assert samples[:, at - 1].tolist() == [None, 0, 14_000_000, 0, 0]


def test_what_was_used_between_two_readings_counts_evenly_and_once(monkeypatch):
  def ended(ms, cpu=-1, switches=0):
    return ms * 1_000_000, cpu, switches, 0, 0, 0

  def samples_of(read, spans):
    monkeypatch.setattr(host._usage, "take", lambda: np.array(read, host_ring.USAGE))
    found = host.samples(devices_of(*spans))
    return found[:, cpu].tolist(), found[:, switches].tolist()

  host = host_use.HostUse(host_use.StepCauseMeter())
  columns = [cause.name for cause in host_use.HOST_CAUSES]
  cpu, switches = columns.index("cpu"), columns.index("nivcsw")
  # Steps end every 2 ms, and the kernel is asked at 2, 12 and 22 ms: it says 10 and 20 more.
  said = {2: (100, 0), 12: (110, 4), 22: (130, 4)}
  read = [ended(ms, *said.get(ms, ())) for ms in range(2, 24, 2)]
  spans = [(end - 1, end) for end in range(2, 24, 2)]
  first, second = samples_of(read[:8], spans[:8]), samples_of(read[8:], spans[8:])
  assert first[0] == [None, 2, 2, 2, 2, 2, 0, 0]  # nobody has asked since 12 ms
  assert sum(second[0]) == 20 and sum(first[1][1:]) + sum(second[1]) == 4


def test_the_kernel_is_asked_at_most_every_ten_milliseconds():
  functions, usage = host_ring.library.functions(), host_ring.Usage()
  functions.jaxpace_mark_here(0, 0, 1, 1000)
  read = usage.take()
  asked = read["ns"][read["cpu_ns"] >= 0]
  assert len(read) == 1000 and len(asked) < 1000 and (np.diff(asked) >= 10_000_000).all()


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_run_that_must_be_exact_is_compared_recorded_and_the_same(tmp_path, donate):
  w, x = arrays()
  descend = jax.jit(lambda w, x: w - 1e-4 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w),
                    donate_argnums=donate)
  bare = w + 0
  for _ in range(STEPS):
    bare = descend(bare, x)
  jax.clear_caches()
  with jaxpace.observed(tmp_path / "run", exact=True):
    for _ in range(STEPS):
      w = descend(w, x)
  assert np.asarray(w).tobytes() == np.asarray(bare).tobytes()
  run = read_run(tmp_path / "run")
  assert len(run.steps) == STEPS and not run.problems
  assert rundir.read_json(tmp_path / "run" / "run.json")["settings"]["exact"]


def test_a_program_whose_first_bits_differ_runs_unmodified_and_that_is_said(tmp_path, monkeypatch,
                                                                           caplog):
  monkeypatch.setattr(comparing, "differences", lambda bare, found: "1 of 2 results differ.")
  bare = train()
  with jaxpace.observed(tmp_path / "run", exact=True) as inside:
    assert train().tobytes() == bare.tobytes()
  assert "sgd runs unmodified from now on and is not recorded: 1 of 2 results" in caplog.text
  assert inside.step is None


def test_what_is_compiled_ahead_of_time_can_be_serialized_and_runs(tmp_path, caplog):
  w, x = arrays()
  with jaxpace.observed(tmp_path / "run"):
    compiled = jax.jit(lambda w, x: jnp.tanh(x @ w).sum()).lower(w, x).compile()
    results = [compiled(w, x) for _ in range(4)]
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(compiled), execution_devices=jax.devices()[:4])
  run = read_run(tmp_path / "run")
  assert len(run.steps) == 4
  assert float(loaded(w, x)) == float(results[0])
  [notice] = run.info["plan"]["notices"]
  assert "loaded from a serialized executable" in notice
  assert "is not recorded: it was loaded from a serialized executable" in caplog.text


def test_a_program_that_was_exported_is_recorded_where_it_is_called(tmp_path):
  w, x = arrays()
  exported = jax.export.export(jax.jit(lambda w, x: w - (x @ w).mean()))(w, x)
  step = jax.jit(exported.call)
  with jaxpace.observed(tmp_path / "run"):
    for _ in range(4):
      w = step(w, x)
  assert len(read_run(tmp_path / "run").steps) == 4


def test_steps_are_on_the_disk_before_it_is_sure_what_they_are(tmp_path, monkeypatch):
  monkeypatch.setattr(found, "_SURE_SECONDS", 1e9)
  monkeypatch.setattr(writer, "_FIRST_SECONDS", 0.0)
  directory = tmp_path / "run"
  with jaxpace.observed(directory) as inside:
    for steps in (STEPS, STEPS + 3):
      train(steps if steps == STEPS else 3)
      while rows_written(directory) < 4 * steps:
        time.sleep(0.01)
      assert inside.step is None and len(read_run(directory).steps) == steps
    seen = read_run(directory)
  run = read_run(directory)
  assert len(run.steps) == STEPS + 3 and not run.problems
  assert seen.info["settings"]["step"]["programs"] == run.info["settings"]["step"]["programs"]
  assert len(list((directory / "steps").iterdir())) == 1


def test_what_seemed_to_be_steps_is_gone_once_it_is_none(tmp_path, monkeypatch):
  monkeypatch.setattr(writer, "_FIRST_SECONDS", 0.0)
  directory, (w, x) = tmp_path / "run", arrays()

  @jax.jit
  def evaluate(w, x):
    return (x @ w).sum()

  @jax.jit
  def fit(w, x):
    return w + (x @ w).sum()

  with jaxpace.observed(directory):
    for _ in range(4):
      evaluate(w, x).block_until_ready()
    while rows_written(directory) < 4 * 4:
      time.sleep(0.01)
    fit(w, x).block_until_ready()
  assert not list((directory / "steps").iterdir())
  with pytest.raises(RunError, match="without a single recorded step"):
    read_run(directory)


def test_the_second_of_two_blocks_records_its_own_steps(tmp_path):
  w, x = arrays()

  @jax.jit
  def descend(w, x):
    return w - jnp.float32(1e-4) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

  for name, steps in (("first", 5), ("second", 7)):
    with jaxpace.observed(tmp_path / name):
      for _ in range(steps):
        w = descend(w, x)
    assert len(read_run(tmp_path / name).steps) == steps
    w = descend(w, x)


def test_steps_that_have_not_begun_when_the_block_ends_are_recorded(tmp_path):
  w, x = arrays()

  @jax.jit
  def descend(w, x):
    return w - jnp.float32(1e-4) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

  long = jax.jit(lambda w: jax.lax.fori_loop(0, 200, lambda _, w: jnp.tanh(w @ w), w)[:8, :8])
  inputs = [jax.device_put(jnp.ones((200, 200)), device) for device in jax.devices()[:4]]
  jax.block_until_ready([long(one) for one in inputs])
  with jaxpace.observed(tmp_path / "run"):
    step = descend.lower(w, x).compile()
    # The steps wait for these on every device.
    w = jax.make_array_from_single_device_arrays((8, 8), w.sharding, [long(one) for one in inputs])
    for _ in range(5):
      w = step(w, x)
  assert len(read_run(tmp_path / "run").steps) == 5


def test_a_program_that_is_over_at_once_is_recorded_though_no_thread_starts_then(
    tmp_path, monkeypatch, no_more_threads):
  monkeypatch.setattr(observed, "_LOOK_SECONDS", 300.0)
  with jaxpace.observed(tmp_path):
    train()
    no_more_threads()
  monkeypatch.undo()
  run = read_run(tmp_path)
  assert len(run.steps) == STEPS and run.ranks == 4


def test_a_step_that_is_named_is_recorded_though_no_other_program_has_collectives(tmp_path,
                                                                                  monkeypatch):
  monkeypatch.setattr(programs, "_known", ())
  w, x = arrays()
  step = jaxpace.observe(jax.jit(lambda w, x: w + (x @ w).mean()))
  with jaxpace.observed(tmp_path):
    for _ in range(3):
      w = step(w, x)
  assert len(read_run(tmp_path).steps) == 3


def test_another_process_asks_for_the_step_once_a_second(monkeypatch):
  asked, now = [], [0.0]
  monkeypatch.setattr(found.jax, "process_index", lambda: 1)
  monkeypatch.setattr(found.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(found.distributed, "key_value_directory", lambda key: asked.append(key) or {})
  agree = found.agreement("key")
  for now[0] in np.arange(0.0, 3.0, 0.05):
    assert agree(None, False, 0) is None
  assert len(asked) == 3


def test_other_threads_are_recorded_too(tmp_path):
  with jaxpace.observed(tmp_path / "run"):
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
  assert len(read_run(tmp_path / "run").steps) == STEPS


def test_ctrl_c_while_a_program_ends_is_no_traceback(tmp_path, monkeypatch):
  def interrupted(*_, **__):
    raise KeyboardInterrupt

  for one, name in ((jaxpace.observed(tmp_path / "run"), "close"),
                    (jaxpace.Recorder(None, jaxpace.observe(jax.jit(jnp.sum))), "_close")):
    monkeypatch.setattr(one, name, interrupted)
    one._at_exit()


@pytest.mark.parametrize("recorder", [
    lambda run: jaxpace.Recorder(run, jaxpace.observe(jax.jit(jnp.sum))), jaxpace.observed])
def test_a_program_that_records_itself_is_left_to_it(tmp_path, monkeypatch, recorder):
  said, shared, share = [], {}, distributed.share_string

  def noted(name, value, *rest):
    shared[name] = value
    return share(name, value, *rest)
  monkeypatch.setattr(distributed, "share_string", noted)
  inside = observed.observed(tmp_path / "run", say=said.append)
  inside.give_way()
  with inside, recorder(tmp_path / "own"):
    train()
  assert not (tmp_path / "run").exists() and (tmp_path / "own").exists()
  assert said == ["This program opens a recorder of its own: that alone records."]
  # Others may have begun to wait for process 0 before their recorder was open.
  assert shared.pop("jaxpace/run") == f"!{said[0]}" and len(shared) == 1


def test_what_jax_runs_before_a_recorder_opens_begins_no_other_recording(tmp_path, monkeypatch):
  monkeypatch.setattr(observed, "_LOOK_SECONDS", 0.002)
  monkeypatch.setattr(observed.Recording, "opened", False)
  said, looks = [], []
  inside = observed.observed(tmp_path / "run", say=said.append)
  wait = inside._over.wait
  monkeypatch.setattr(inside._over, "wait", lambda seconds: looks.append(0) or wait(seconds))
  inside.give_way()
  with inside:
    # Of a shape that no other test has had compiled.
    jnp.sum(jax.device_put(jnp.ones((44, 3)), arrays()[1].sharding)).block_until_ready()
    so_far = len(looks)
    awaited(lambda: len(looks) > so_far + 3 or (tmp_path / "run").exists(), 20)
    with jaxpace.observed(tmp_path / "own"):
      train()
  assert not (tmp_path / "run").exists() and (tmp_path / "own").exists()
  assert said == ["This program opens a recorder of its own: that alone records."]


def test_a_program_of_jax_functions_alone_is_recorded_all_the_same(tmp_path, monkeypatch):
  monkeypatch.setattr(observed, "_MOST_UNREAD", 1e-4)
  monkeypatch.setattr(observed.Recording, "opened", False)
  inside = observed.observed(tmp_path / "run")
  inside.give_way()
  with inside:
    x = jax.device_put(jnp.ones((44, 5)), arrays()[1].sharding)
    for _ in range(STEPS):
      jnp.sum(x).block_until_ready()
    awaited(lambda: (tmp_path / "run" / "run.json").exists(), 20)
  assert len(read_run(tmp_path / "run").steps) == STEPS


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"match": 3}, TypeError, "match=3 must be a pattern of names"),
    ({"say": 3}, TypeError, "say=3 must be a function"),
    ({"exact": "no"}, ValueError, "exact='no': it is True, or left out")])
def test_slips_are_errors_before_anything_runs(tmp_path, given, error, words):
  with pytest.raises(error, match=words):
    jaxpace.observed(tmp_path / "run", **given)


def test_what_fails_to_compile_fails_as_without(tmp_path, monkeypatch):
  def refuses(_request, _module=None):
    raise ValueError("no")
  w, x = arrays()
  monkeypatch.setattr(compiling.Request, "compile", refuses)
  with jaxpace.observed(tmp_path / "run"), pytest.raises(ValueError, match="no"):
    jax.jit(lambda w, x: (x @ w).sum() * 5)(w, x)
