"""Collectives in loops of instrumented steps: timed by timestamps, the bits and the messages those
of the bare step."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import jaxpace
from jaxpace.observation.clocks import host_ring
from tests.instrumentation import models
from tests.instrumentation.running import P, extra_operands, instrumented, mesh_of, pair, restless
from tests.patience import patiently

LAYERS, WIDTH, TURNS = 3, 12, 4
PAUSE = 0.02


def params():
  return {"w": models.normal(0, LAYERS, WIDTH, WIDTH) / 3, "v": models.normal(1, WIDTH, 2)}


def batches(count):
  return [models.normal(10 + k, 16, WIDTH) for k in range(count)]


def normed(c, w):
  y = c @ w
  mean = jax.lax.pmean(y.mean(0), "data")
  return jnp.tanh((y - mean) * jax.lax.rsqrt(jax.lax.pmean(jnp.square(y - mean).mean(0), "data")
                                             + 1e-3))


def training(layers, summed=True):
  def step(state, x):
    value, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.square(layers(p["w"], x) @ p["v"])))(
        state)
    grads = jax.lax.pmean(grads, "data") if summed else grads
    return models.sgd(state, grads), jax.lax.pmean(value, "data")
  return step


def scanned(w, x):
  return jax.lax.scan(jax.checkpoint(lambda c, one: (normed(c, one), None)), x, w)[0]


def nested(w, x):
  def outer(c, one):
    return jax.lax.scan(lambda d, k: (normed(d * k, one), None), c, jnp.arange(1.0, 3.0))[0], None
  return jax.lax.scan(outer, x, w)[0]


def branching(w, x):
  for one in w:
    # The same on all ranks, and another in each step.
    here = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x)), "data") > 2.4
    x = jax.lax.cond(here, lambda c, one=one: normed(c, one),
                     lambda c, one=one: jnp.tanh(c @ one), x)
  return x


def repeated(state, x):
  value, grads = jax.value_and_grad(
      lambda p: jnp.mean(jnp.square(jnp.tanh(x @ p["w"][0]) @ p["v"])))(state)
  turns = jnp.where(jax.lax.pmax(value, "data") > 1e9, 1, 2)
  grads = jax.lax.fori_loop(0, turns,
                            lambda _, g: jax.tree.map(lambda a: jax.lax.pmean(a * 1.01, "data"), g),
                            grads)
  return models.sgd(state, grads), jax.lax.pmean(value, "data")


CASES = {
    "scan, remat": (training(scanned), False),
    "scan, remat, check_vma": (training(scanned, summed=False), True),
    "nested scans": (training(nested), False),
    "cond": (training(branching), False),
    "while": (repeated, False),
}


@pytest.mark.optimized
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.long) if name in ("scan, remat", "nested scans", "cond")
    else name
    for name in CASES])
def test_bits_and_messages_are_the_bare_steps(name):
  step, check_vma = CASES[name]
  made = pair(step, mesh_of(data=2), params(), batches(1)[0], check_vma=check_vma, pacer=restless(),
              share=None)
  made.check_bits(params(), batches(4), 20)
  plan = made.paced.plan
  assert plan.inside and not plan.unstamped and plan.program is not None
  assert extra_operands(made.bare_hlo, made.hlo) == []
  assert made.hlo.count('custom_call_target="jaxpace_mark"') >= 2 * len(plan.inside)


def without_native_marks(monkeypatch):
  monkeypatch.setattr(host_ring, "unwritable", lambda clock: "There is no library here.")


def test_stamps_slots_and_messages_are_the_same_with_marks_and_without(monkeypatch):
  """So a pacer sees the same: it is shown what is timestamped, and only that."""
  made = pair(training(scanned), mesh_of(data=2), params(), batches(1)[0], pacer=restless(),
              share=True)
  without_native_marks(monkeypatch)
  bare = pair(training(scanned), mesh_of(data=2), params(), batches(1)[0], pacer=restless(),
              share=True)
  one, other = made.paced.plan, bare.paced.plan
  assert (one.marks, one.collectives, one.carrier, one.decisions) == (
      other.marks, other.collectives, other.carrier, other.decisions)
  assert extra_operands(made.bare_hlo, made.hlo) == extra_operands(bare.bare_hlo, bare.hlo)
  assert (not other.inside
          and len(other.unstamped) == sum(len(each.enter_tags) for each in one.inside))
  assert "jaxpace_mark" in made.hlo and "jaxpace_mark" not in bare.hlo
  assert any("can be recorded. There is no library here." in notice for notice in other.notices)


def test_with_host_callbacks_they_are_listed_with_the_reason():
  made = pair(training(scanned), mesh_of(data=2), params(), batches(1)[0], clock="callback")
  assert not made.paced.plan.inside and made.paced.plan.unstamped
  assert any("takes the native clock, not 'callback'" in notice
             for notice in made.paced.plan.notices)


def late_in_a_turn():
  """A step whose second rank sleeps in one turn of its scan, given with the batch."""
  def nap(rank, turn, which, _):
    if rank == 1 and turn == which:
      time.sleep(PAUSE)
    return np.float32(0)

  def step(state, batch):
    x, which = batch

    def turn(c, given):
      number, w = given
      rank = jax.lax.axis_index("data")
      # Waited for by what follows, and of what comes before.
      c = (c + jax.pure_callback(nap, jax.ShapeDtypeStruct((), jnp.float32), rank, number, which,
                                 c[0, 0]))
      y = jnp.tanh(c @ w)
      return y - jax.lax.pmean(y.mean(0), "data"), None

    c, _ = jax.lax.scan(turn, x, (jnp.arange(TURNS), state))
    return state * 0.999, jax.lax.pmean(jnp.mean(c), "data")
  return step


def rows(directory, table):
  return [row for path in (directory / table).glob("*.parquet")
          for row in pq.read_table(path).to_pylist()]


@patiently(PAUSE=0.02)
def test_a_delay_in_a_turn_comes_back_at_that_rank_and_turn(tmp_path):
  paced, step, pace = instrumented(late_in_a_turn(), mesh_of(data=2), P(), (P("data"), P()))
  state, steps = models.normal(3, TURNS, WIDTH, WIDTH), 24
  x = batches(1)[0]
  with jaxpace.Recorder(tmp_path, paced) as recorder:
    for k in range(steps):
      pace, (state, value) = step(pace, state, (x, jnp.int32(k % TURNS)))
      jax.block_until_ready(value)
      recorder.record()
    [told] = recorder.programs if recorder.programs else [None]
  assert recorder.lost["lost_rows"] == 0
  waits, sums = rows(tmp_path, "collectives"), rows(tmp_path, "steps")
  inside = [row for row in waits if row["name"].startswith("psum.0")]
  assert len(inside) == 2 * steps * TURNS and len(sums) == 2 * steps
  began = {(row["rank"], row["step"]): row["start_ns"] for row in sums}
  times = {(row["rank"], row["step"],
            int((row["name"] + "@0").split("@")[1])): (row["enter_ns"], row["exit_ns"])
           for row in inside}
  late, others = [], []
  for (rank, k, turn), (enter, leave) in times.items():
    assert enter <= leave
    busy = enter - (times[rank, k, turn - 1][1] if turn else began[rank, k])
    (late if (rank, turn) == (1, k % TURNS) else others).append(busy)
  # Truth, however loaded the machine: the rank sleeps so long before that turn, and no other does.
  assert len(late) == steps and min(late) >= 0.98e9 * PAUSE
  assert np.median(others) < np.median(late) and min(others) < 0.25e9 * PAUSE
  for row in sums:
    known = [row[f"{name}_ns"] or 0
             for name in ("forward", "backward", "compute", "sync", "update")]
    assert min(known) >= 0 and sum(known) == row["end_ns"] - row["start_ns"]
    own = sum(each["exit_ns"] - each["enter_ns"] for each in waits
              if (each["rank"], each["step"]) == (row["rank"], row["step"]))
    assert row["sync_ns"] == own, "nothing overlaps in this step"
    assert row["last_exit_ns"] <= row["end_ns"]
  assert told is None or [one.name for one in told.collectives] == ["psum.0", "psum"]
  assert (tmp_path / "marks" / "0.ring").exists() and (tmp_path / "marks" / "0.plan.json").exists()
