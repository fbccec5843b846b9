"""Settings changed while a job runs: at one step, without compiling again, and nothing that can
stop training."""

import functools
import json
import os
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.cli import main as cli
from jaxpace.hosts import distributed
from jaxpace.hosts.distributed import rounds
from jaxpace.live import control_file
from jaxpace.live.control_file import ControlRequest, RequestError
from tests.instrumentation import models
from tests.instrumentation.running import P, column, instrumented, mesh_of

RANKS, DELAY = 2, 2e-4
COMPILED: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def listening():
  """Notes every compilation of this process; jax has no public way to stop listening again."""
  jax.monitoring.register_event_duration_secs_listener(
      lambda event, *_, **__: COMPILED.append(event) if "backend_compile" in event else None)


def eager():
  """Asks every rank for the same delay always, cut by its knob."""
  def update(seen, state):
    return jaxpace.Decision(jnp.float32(DELAY), {"mine": jnp.float32(1)}), state
  return jaxpace.Pacer(lambda ranks: (), update)


@functools.cache
def compiled(form, pacer):
  """The instrumented step, its compiled form, and how to make its state: once for all tests."""
  traces: list[int] = []

  def counted(params, batch):
    traces.append(1)
    return (models.vma_step if form == "check_vma" else models.plain_step)(params, batch)

  if form == "pmap":
    paced = jaxpace.instrument(counted, "data", pacer(), share=True)
    devices = jax.local_devices()[:RANKS]
    return (paced, jax.pmap(paced, "data", devices=devices, donate_argnums=0), {"devices": devices},
            traces)
  mesh = mesh_of(data=RANKS)
  paced, step, _ = instrumented(counted, mesh, P(), P("data"), check_vma=form == "check_vma",
                                donate=(0,), pacer=pacer(), share=True)
  return paced, step, {"mesh": mesh}, traces


def steered():
  return jaxpace.steerable(eager())


class Job:
  """A training loop, step by step."""

  def __init__(self, form="shard_map", pacer=steered):
    self.paced, self.step, place, self.traces = compiled(form, pacer)
    self.pace, self.state, self.batch = (self.paced.init(**place), models.mlp_params(),
                                         models.batches(RANKS)[0])
    if form == "pmap":
      self.state = jax.tree.map(lambda leaf: jnp.stack([leaf] * RANKS), self.state)
      self.batch = jax.tree.map(lambda leaf: leaf.reshape(RANKS, -1, *leaf.shape[1:]), self.batch)
    self.steps = 0

  def run(self, control, steps=1):
    for _ in range(steps):
      self.pace = control(self.pace)
      self.pace, (self.state, _) = jax.block_until_ready(
          self.step(self.pace, self.state, self.batch))
      self.steps += 1

  def until(self, control, said, most=4000):
    """Runs until the control's request is `said`. Returns the first step whose delay was decided
    under it."""
    for k in range(most):
      self.run(control)
      if control.request == said:
        return self.steps
      # For minutes, on a machine that leaves the thread that reads without a core.
      time.sleep(0.001 if k < 200 else 0.05)
    raise AssertionError(f"never {said}: {control.request}")

  def asked(self):
    """Delays asked for, [RANKS, steps]."""
    return column(self.pace, self.paced.plan, "delay")[:, :self.steps]


def control_of(path, **options):
  return jaxpace.Control(path, **{"every_seconds": 0.05, **options})


def put(path, **settings):
  put_text(path, json.dumps(settings))


def put_text(path, text):
  (path / "new").write_text(text)
  os.replace(path / "new", path / "control.json")


@pytest.mark.parametrize("form", [
    "shard_map", *(pytest.param(form, marks=pytest.mark.long) for form in ("check_vma", "pmap"))])
def test_off_and_on_at_a_step_without_compiling_again(tmp_path, form):
  job = Job(form)
  with control_of(tmp_path) as control:
    job.run(control, 12)
    traced, compilations = len(job.traces), len(COMPILED)
    put(tmp_path, enabled=False)
    off = job.until(control, ControlRequest(enabled=False))
    job.run(control, 5)
    put(tmp_path, ranks=[1], max_delay=DELAY / 2, from_step=off + 3)
    some = job.until(control, ControlRequest(ranks=(1,), max_delay=DELAY / 2, from_step=off + 3))
    job.run(control, 5)
    os.remove(tmp_path / "control.json")
    made = job.until(control, ControlRequest())
    job.run(control, 3)
  assert (traced >= 1 and compilations >= 1
          and (len(job.traces), len(COMPILED)) == (traced, compilations))
  asked = job.asked()
  assert (asked[:, 1:off] == np.float32(DELAY)).all()
  assert (asked[:, off:some] == 0).all()
  assert (asked[0, off:made] == 0).all() and (asked[1, some:made] == np.float32(DELAY / 2)).all()
  assert (asked[:, made:] == np.float32(DELAY)).all()
  lines = [json.loads(line) for line in (tmp_path / control_file.APPLIED).read_text().splitlines()]
  assert ([(line["step"], line["settings"]["enabled"]) for line in lines]
          == [(off, False), (some, True), (made, True)])
  assert control_file.last_note(tmp_path / "control.json") == (made, ControlRequest())


def test_the_threshold_changes_a_running_pacer(tmp_path):
  job = Job(pacer=lambda: jaxpace.steerable(jaxpace.pace_early_ranks(window=8)))
  with control_of(tmp_path) as control:
    put(tmp_path, threshold=0.25)
    job.until(control, ControlRequest(threshold=0.25))
    job.run(control, 2)
  knobs = job.paced.pacer_state(job.pace).inner.knobs
  assert knobs.threshold.tolist() == [0.25] * RANKS and np.isnan(knobs.max_delay).all()


def test_a_file_that_was_there_applies_from_the_start_and_says_so(tmp_path, caplog):
  put(tmp_path, enabled=False)
  job = Job()
  with control_of(tmp_path) as control:
    job.run(control, 6)
  assert (job.asked() == 0).all()
  assert ("pacing off" in caplog.text
          and f"{tmp_path / 'control.json'} was there when the job began" in caplog.text)


@pytest.mark.parametrize(("text", "words"), [
    ("{", "torn or not JSON"), ("[]", "holds no object"),
    ('{"enable": false}', "unknown field `enable`"), ('{"enabled": 1}', "Expected `bool`"),
    ('{"ranks": [7]}', "there is no rank 7: the data axis has"),
    ('{"from_step": 1.5}', "Expected `int`, got `float` for from_step")])
def test_a_bad_file_is_one_warning_and_changes_nothing(tmp_path, caplog, text, words):
  job = Job()
  with control_of(tmp_path) as control:
    job.run(control)
    put(tmp_path, max_delay=1e-4)
    job.until(control, ControlRequest(max_delay=1e-4))
    put_text(tmp_path, text)
    while not caplog.records:
      job.run(control)
    job.run(control, 30)
    assert control.request == ControlRequest(max_delay=1e-4)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and words in warnings[0] and "longest delay 0.1 ms" in warnings[0]
    put(tmp_path, enabled=False)
    job.until(control, ControlRequest(enabled=False))


@pytest.mark.parametrize(("text", "words"), [
    (f'{{"max_delay": 1{"0" * 400}}}', "for max_delay"),
    (f'{{"max_delay": 1{"0" * 5000}}}', "for max_delay"), ("[" * 100_000, "it nests more"),
    ('{"max_delay": 1e999}', "for max_delay"),
    ('{"ranks": "0-16777215"}', "list of rank numbers"),
    ('{"from_step": 9, "until_step": 9}', "must be above from_step=9"),
    ('{"enabled": tr', "torn or not JSON"), ("", "torn or not JSON"),
    (" " * (1 << 20) + "{}", "more than 1,048,576"),
    ('{"ranks": "' + "0," * 70_000 + '0"}', "more than 65,536 pieces"),
    ('{"ranks": {"0": 1}}', "list of rank numbers"),
    ('{"ranks": "' + "0-1048575," * 120 + '0"}', "there is no rank 1048575"),
    ('{"ranks": [[0]]}', "list of rank numbers"),
    ('{"enabled": "' + "x" * 10_000 + '"}', "Expected `bool`"),
    ('{"' + "x" * 10_000 + '": 1}', "unknown field"), (b"\xff\xfe{", "it can't be read")])
def test_whatever_a_file_holds_it_is_refused_in_a_sentence(tmp_path, text, words):
  """Anything else raised in process 0's thread would keep the other processes waiting for its
  message."""
  path = tmp_path / control_file.NAME
  path.write_bytes(text.encode() if isinstance(text, str) else text)
  with pytest.raises(RequestError, match=re.escape(words)) as refused:
    control_file.read(path, RANKS)
  assert len(str(refused.value)) < 400


def test_process_0_that_says_nothing_does_not_stop_training(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(distributed, "process_index", lambda: 1)
  monkeypatch.setattr(rounds, "key_value_get",
                      lambda key, timeout: time.sleep(0.05) or raise_timeout())
  job = Job()
  with control_of(tmp_path, timeout=0.2) as control:
    job.run(control, 20)
  assert (len(caplog.records) == 1 and "stays as it is in this process" in caplog.text
          and "0.2 s" in caplog.text)
  assert (job.asked()[:, 1:] == np.float32(DELAY)).all()


def said(first, until, version, **settings):
  """What process 0 says of a round."""
  return json.dumps([first, until, [version, settings]])


def raise_timeout():
  raise TimeoutError


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_is_no_file_in_its_place_holds_up_nothing_and_off_works_after_it(
    tmp_path, caplog, what):
  """A pipe stopped training for 120 s, then control was gone, with delays left on."""
  job, target = Job(), tmp_path / control_file.NAME
  with control_of(tmp_path) as control:
    job.run(control, 3)
    if what == "pipe":
      os.mkfifo(target)
    elif what == "device":
      target.symlink_to("/dev/zero")
    else:
      target.mkdir()
    while not caplog.records:
      job.run(control)
    job.run(control, 30)
    assert len(caplog.records) == 1 and "is not followed" in caplog.text
    assert control.request == ControlRequest()
    if what == "folder":
      target.rmdir()
    assert cli.main(["control", str(tmp_path), "--off"]) == 0
    job.until(control, ControlRequest(enabled=False))
  assert control_file.last_note(target)[1] == ControlRequest(enabled=False)


def test_a_file_system_that_hangs_holds_up_no_step(tmp_path, monkeypatch):
  """Everything that touches the directory hangs; the steps go on with the settings there are."""
  go_on, hangs = threading.Event(), threading.Event()
  job = Job()

  def hanging(do):
    def function(*args, **options):
      assert threading.current_thread() is not threading.main_thread()
      if hangs.is_set():
        assert go_on.wait(600)
      return do(*args, **options)
    return function

  for name in ("signature", "read", "note"):
    monkeypatch.setattr(control_file, name, hanging(getattr(control_file, name)))
  with control_of(tmp_path, timeout=30) as control:
    job.run(control, 12)
    hangs.set()
    put(tmp_path, enabled=False)
    rounds = control._rounds.number
    while control._rounds.number < rounds + 3:
      job.run(control)
    assert control.request == ControlRequest()
    go_on.set()
    job.until(control, ControlRequest(enabled=False))
  assert control_file.last_note(tmp_path / control_file.NAME)[1] == ControlRequest(enabled=False)


def test_a_process_that_heard_nothing_in_time_joins_again(tmp_path, monkeypatch, caplog):
  """It keeps its settings and goes on; when process 0 is heard of again, at whatever round, it
  follows."""
  words, asked = {}, []

  def get(key, timeout):
    asked.append(key)
    if key not in words:
      time.sleep(0.01)
      raise TimeoutError
    return words[key]

  monkeypatch.setattr(distributed, "process_index", lambda: 1)
  monkeypatch.setattr(rounds, "key_value_get", get)
  monkeypatch.setattr(rounds, "key_value_directory", lambda name: dict(words))
  job = Job()
  with control_of(tmp_path, timeout=0.3) as control:
    name = control._rounds.name
    words[f"{name}/0"] = said(0, 8, 0)
    job.run(control, 40)
    assert "until process 0 is heard of again" in caplog.text
    # Process 0 has gone on meanwhile, and deleted what nobody was to be waiting for any more.
    words.clear()
    words[f"{name}/29"] = said(0, job.steps - 4, 1, max_delay=DELAY / 2)
    words[f"{name}/30"] = said(0, job.steps + 4, 2, enabled=False)
    job.until(control, ControlRequest(enabled=False))
    assert control._rounds.number == 31
    words[f"{name}/31"] = said(0, 10**6, 3)
    job.until(control, ControlRequest())
  told = [record.getMessage() for record in caplog.records]
  assert len(told) == 2 and "goes on in this process" in told[1]
  assert job.steps < 2000


def test_a_call_does_nothing_between_rounds(tmp_path):
  job = Job()
  with control_of(tmp_path) as control:
    job.run(control, 3)
    assert control(job.pace) is job.pace
  assert control(job.pace) is job.pace, "closed: the pacer keeps its settings"
  off = jaxpace.Control(None)
  with off:
    assert off("anything") == "anything"


def test_wrong_uses_name_the_fix(tmp_path):
  job = Job(pacer=eager)
  with control_of(tmp_path) as control, pytest.raises(ValueError, match="jaxpace.steerable"):
    control(job.pace)
  with control_of(tmp_path) as control:
    for _ in range(2):
      with pytest.raises(TypeError, match=r"pace = control\(pace\)"):
        control((job.pace, None))
  with pytest.raises(RuntimeError, match="outside of its `with` block"):
    control_of(tmp_path)(job.pace)
  control = control_of(tmp_path)
  with control, pytest.raises(RuntimeError, match="used once"):
    control.open()
  for wrong in (0, "2", True, None):
    with pytest.raises(ValueError, match=f"every_seconds={wrong!r} must be seconds, a positive"):
      jaxpace.Control(tmp_path, every_seconds=wrong)


def test_ranks_are_checked_before_they_are_written_out():
  assert (control_file.parse_ranks("0-5,3-9,3,20") == (*range(10), 20)
          and control_file.parse_ranks([5, 1, 5]) == (1, 5))
  many = "0-1048575," * 6000 + "0"
  assert len(control_file.parse_ranks(many)) == 1 << 20
  long = ControlRequest(ranks=tuple(range(1000)))
  assert (long.to_json()["ranks"] == "0-999"
          and ControlRequest.from_json(long.to_json(), 1000) == long)


@pytest.mark.parametrize("taken_at, call, calls", [
    (999.0, 200, 200), (999.0, 100, 4),  # a slow step: not more rarely than every four
    # A loop that runs ahead of its devices calls many times at once, and then not for long: no more
    # than two of the round before.
    (999.999, 120, 40)])
def test_a_round_is_of_four_calls_and_two_of_the_one_before(monkeypatch, taken_at, call, calls):
  control = jaxpace.Control("x", every_seconds=2)
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  control._taken_at, control._taken_call = taken_at, 100
  assert control._round_calls(call) == calls
