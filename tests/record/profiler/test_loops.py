"""Plain-jit steps whose collectives are in loops: layers scanned, data parallel and FSDP, one
device late in a turn."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.record.ring import plan
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING
from tests.patience import patiently
from tests.quick import long

DEVICES, LAYERS, WIDTH = 4, 3, 192
LATE, LATE_SECONDS, LATE_TURN = 2, 0.05, 1
COLLECTIVES = {"data parallel": {"all-reduce": LAYERS + 1},
               "fsdp": {"all-gather": 2 * LAYERS, "all-reduce": LAYERS + 1}}


def mesh():
  return jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("data",),
                           axis_types=(AxisType.Auto,))


def placed(value, spec):
  return jax.device_put(value, NamedSharding(mesh(), spec))


def of_weights(kind):
  return P(None, "data", None) if kind == "fsdp" else P()


def held_up(grad, mark, turn):
  """The gradient of a layer, after one device has slept in the turn of `LATE_TURN`."""
  def one(grad, mark):
    def sleep(mark, _):
      time.sleep(LATE_SECONDS * float(mark[0]))
      return np.float32(0)
    now = mark * jnp.float32(turn == LATE_TURN)
    return grad + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), now, grad[0, 0])
  return jax.shard_map(one, mesh=mesh(), in_specs=(P("data"), P("data")), out_specs=P("data"),
                       check_vma=False)(
                           grad, mark)


def make_step(kind, late):
  weights = NamedSharding(mesh(), of_weights(kind))

  @jax.custom_vjp
  def here(h, mark, turn):
    return h

  # The sleep is in the backward pass: there, each turn of either kind of step ends in an
  # all-reduce.
  here.defvjp(lambda h, mark, turn: (h, (mark, turn)),
              lambda kept, grad: (held_up(grad, *kept), None, None))

  def loss(w, x, mark):
    def layer(h, own):
      kernel, turn = own
      h = here(h, mark, turn) if late else h
      return jnp.tanh(h @ kernel), None
    return jnp.mean(jax.lax.scan(layer, x, (w, jnp.arange(float(LAYERS))))[0] ** 2)

  @jax.jit
  def step(w, x, mark):
    value, slope = jax.value_and_grad(loss)(w, x, mark)
    return jax.lax.with_sharding_constraint(w - jnp.float32(0.1) * slope, weights), value

  return step


def record(directory, kind, late, sessions=4, every=9, length=8):
  w = placed(jnp.full((LAYERS, WIDTH, WIDTH), 0.01), of_weights(kind))
  x = placed(jnp.ones((32 * DEVICES, WIDTH)), P("data"))
  mark = placed(jnp.zeros(DEVICES).at[LATE].set(1.0), P("data"))
  step = make_step(kind, late)
  with jaxpace.ProfiledRecorder(directory, every=every, steps=length,
                                handle_sigterm=False) as recorder:
    for _ in range(every * (sessions + 1)):
      w, value = step(w, x, mark)
      recorder.record(value)
      recorder._free.wait(300)
  assert recorder.sessions == sessions
  return read_run(directory)


@pytest.mark.parametrize("kind", [*long("data parallel"), "fsdp"])
def test_each_turn_of_a_loop_is_a_collective_of_its_own(tmp_path, kind):
  run = record(tmp_path, kind, late=False)
  names = [times.name.partition("@")[0].partition(".")[0] for times in run.collectives]
  assert {name: names.count(name) for name in names} == COLLECTIVES[kind]
  enter, leave = (np.stack([getattr(times, end)[:DEVICES] for times in run.collectives])
                  for end in ("enter_ns", "exit_ns"))
  known = (enter != MISSING).all(axis=(0, 1))
  # what lies between two turns is in neither
  assert (enter[1:, :, known] >= leave[:-1, :, known]).all()
  assert "@2" in " ".join(times.name for times in run.collectives)
  shares = diagnose(run).shares
  assert shares["compute"] > 0.02  # it was 0.001, the loop as a whole was one collective


@pytest.mark.long
@pytest.mark.parametrize("kind", COLLECTIVES)
@patiently(LATE_SECONDS=LATE_SECONDS)
def test_all_of_a_delay_in_one_turn_is_found(tmp_path, kind):
  run = record(tmp_path, kind, late=True)
  found = diagnose(run)
  assert found.findings[0].ranks == (LATE,)
  lateness = [episode.lateness for episode in found.lateness.episodes if episode.rank == LATE]
  assert max(lateness) > 0.8 * LATE_SECONDS
  assert f"rank {LATE} " in found.verdict
  held = found.lateness.persistent.by_collective  # of one turn, not spread over the loop
  assert held.max() > 0.8 * held.sum()


def test_more_turns_than_have_slots_are_in_the_sums(tmp_path, monkeypatch):
  monkeypatch.setattr(plan, "MOST", 6)
  run = record(tmp_path, "fsdp", late=False, sessions=1)
  assert len(run.collectives) == 4  # of each of three loops the first turn, and the one outside
  assert "the first 1 iterations are recorded one by one" in " ".join(diagnose(run).notes)


@pytest.mark.parametrize("result", [None, 1.5, (), {"loss": np.float32(1)}])
def test_what_cannot_be_waited_for_is_refused(tmp_path, result):
  with jaxpace.ProfiledRecorder(tmp_path, every=3, steps=2, handle_sigterm=False) as recorder:
    with pytest.raises(TypeError, match="what the step returned"):
      recorder.record(result)
    for _ in itertools.repeat(None, 2):
      recorder.record({"loss": jnp.zeros(())})
    with pytest.raises(TypeError, match="what the step returned"):
      recorder.record(result)  # a sample begins here
