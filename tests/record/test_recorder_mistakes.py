"""A slip of the user's is named, or warned of once."""

import argparse
import dataclasses
import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.record.recorder import Recorder
from tests.record import fake_step as fake
from tests.record.recording import one_warning, table, train


def test_mistakes_are_named(tmp_path):
  step, pace = fake.make_step(fake.mesh()), fake.init(fake.mesh())
  with pytest.raises(TypeError, match="takes no pace state"), Recorder(
      tmp_path / "1", fake.FakePaced()) as recorder:
    recorder.record(pace)
  with pytest.raises(TypeError,
                     match="device value"), Recorder(tmp_path / "7", fake.FakePaced()) as recorder:
    recorder.record(loss=jnp.float32(1))
  with pytest.raises(ValueError, match='"data" or "checkpoint"'), Recorder(
      tmp_path / "8", fake.FakePaced()) as recorder, recorder.measure("nap"):
    pass
  for wrong in (step, [], [1]):
    with pytest.raises(TypeError, match=r"jaxpace\.observe or jaxpace\.instrument.*jax\.jit"):
      Recorder(tmp_path / "9", wrong)
  recorder = Recorder(tmp_path / "9", fake.FakePaced())
  with pytest.raises(RuntimeError, match="`with`"):
    recorder.record()
  with recorder:
    recorder.record()
  with pytest.raises(RuntimeError, match="`with`"):
    recorder.record()
  with pytest.raises(RuntimeError, match="once"):
    recorder.open()


@pytest.mark.parametrize(("given", "words"), [
    ({"hosts": "often"}, "hosts='often' must be True, False or the seconds"),
    ({"hosts": math.inf}, "hosts=inf must be True, False or the seconds"),
    ({"grace_seconds": "5 s"}, "grace_seconds='5 s' must be a number from 0 to 86400"),
    ({"grace_seconds": math.nan}, "grace_seconds=nan must be"),
    ({"grace_seconds": -1}, "grace_seconds=-1 must be"),
    ({"first_step": 10**30}, "must be the number of a step, from 0 to"),
    ({"detail": 10**30}, "must be \"auto\" or a whole number")])
def test_settings_that_would_fail_in_the_loop_or_at_its_end_are_refused(tmp_path, given, words):
  with pytest.raises(ValueError, match=re.escape(words)):
    Recorder(tmp_path, fake.FakePaced(), **given)
  with pytest.raises(ValueError, match="directory='' names no directory"):
    Recorder("", fake.FakePaced())


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, -1e30, 10**400])
def test_a_time_that_is_none_stops_neither_the_loop_nor_the_recording(tmp_path, caplog, value):
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 3)
    for _ in range(2):
      recorder.record(data_ns=value, loss=value)
  one_warning(caplog, f"data_ns={value!r} is no time in nanoseconds, and is left out")
  assert recorder.lost["stopped"] is None


def test_a_complex_number_is_none_of_the_hosts(tmp_path):
  with pytest.raises(TypeError, match="takes a number of the host, not complex64"), Recorder(
      tmp_path, fake.FakePaced()) as recorder:
    recorder.record(loss=np.complex64(1))


def test_a_function_that_was_never_traced_is_noticed(tmp_path, caplog):
  with Recorder(tmp_path, fake.FakePaced(None)) as recorder:
    train(recorder, 3)
  one_warning(caplog, "do not instrument twice")


@pytest.mark.parametrize("renewed", [False, True])
def test_a_pace_state_that_is_not_threaded_is_noticed(tmp_path, caplog, renewed):
  """The loop keeps the new state under another name; or the state is made anew every step."""
  mesh = fake.mesh()
  step = jax.jit(fake.make_step(mesh).__wrapped__)  # nothing donated
  stale = fake.init(mesh)
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    for _ in range(5):
      jax.block_until_ready(step(fake.init(mesh) if renewed else stale))
      recorder.record()
  one_warning(caplog, "does not advance")
  assert {r["step"] for r in table(tmp_path)} == {0}


def test_a_compiled_function_is_no_instrumented_one(tmp_path):
  """jit copies the attributes of what it wraps, `plan` among them."""
  def step(pace):
    return pace

  step.plan = fake.PLAN
  with pytest.raises(TypeError, match=r"jaxpace\.instrument returned.*not the jax\.jit"):
    Recorder(tmp_path, jax.jit(step))


@dataclasses.dataclass
class Settings:
  rate: float
  layers: list


@pytest.mark.parametrize("config, kept", [
    (argparse.Namespace(rate=0.1, name="ü"), {"rate": 0.1, "name": "ü"}),
    (Settings(0.1, [{(1, 2): Settings(1.0, [])}]),
     {"rate": 0.1, "layers": [{"(1, 2)": {"rate": 1.0, "layers": []}}]}),
    ({"a": {3: [types.SimpleNamespace(b=None)]}}, {"a": {"3": [{"b": None}]}})])
def test_configurations_of_many_kinds_are_kept(tmp_path, config, kept):
  with Recorder(tmp_path, fake.FakePaced(), config=config) as recorder:
    train(recorder, 3)
  assert json.loads((tmp_path / "run.json").read_text())["config"] == kept


@pytest.mark.parametrize("config", [[1], Settings])
def test_a_configuration_without_names_is_told_at_once(tmp_path, config):
  with pytest.raises(TypeError, match="config takes names with values"):
    Recorder(tmp_path, fake.FakePaced(), config=config)
