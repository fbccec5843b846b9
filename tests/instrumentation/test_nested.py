"""Collectives in loops, branches and `jax.checkpoint` of instrumented steps: timed where the step
is compiled, the bits and the messages those of the bare step."""

import contextlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import jaxpace
from jaxpace.core.ring_layout import slot_tags
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.partitioned import compiling, thunks
from tests.instrumentation import models
from tests.instrumentation.running import P, extra_operands, instrumented, mesh_of, pair, restless
from tests.patience import patiently
from tests.record.recording import parts

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


def summed(x):
  return x - jax.lax.psum(x, "data") / 4


def several(c, _):
  a, b = jax.lax.psum(c, "data"), jax.lax.psum(2 * c, "data")
  return c + 0.1 * jax.lax.psum(a * b, "data") - jax.lax.pmax(c, "data"), None


def of_half_precision(c, _):
  half = c.astype(jnp.bfloat16)
  gathered = jax.lax.all_gather(half, "data").astype(jnp.float32).sum(0)
  return c + jax.lax.psum(half, "data").astype(jnp.float32) + gathered, None


def repeat(body, times, x):
  return jax.lax.scan(body, x, None, length=times)[0]


BODIES = {
    "checkpoint": (jax.checkpoint(summed), [[]], [1]),
    "scan": (lambda x: repeat(lambda c, _: (summed(c), None), 3, x), [[3]], [1]),
    "fori": (lambda x: jax.lax.fori_loop(0, 2, lambda _, c: summed(c), x), [[2]], [1]),
    "while": (lambda x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, summed(c[1])), (0, x))[1], [[3]], [1]),
    "cond": (lambda x: jax.lax.cond(jax.lax.pmax(x, "data").sum() > 0, summed, lambda x: x - 1, x),
             [[]], [1]),
    "scans": (lambda x: repeat(lambda c, _: (repeat(lambda d, _: (
        jax.jit(jax.checkpoint(summed))(d), None), 4, c), None), 3, x), [[3, 4]], [1]),
    "combined": (lambda x: repeat(several, 2, x), [[2]] * 3, [1, 1, 2]),
    "half": (lambda x: repeat(of_half_precision, 2, x), [[2]] * 2, [1, 1]),
    "axes": (lambda x: repeat(
        lambda c, _: (c - jax.lax.psum(c, "model") / 4 + 0 * summed(c), None), 2, x), [[2]], [1]),
    "constant": (lambda x: repeat(lambda c, _: (c / jax.lax.psum(jnp.ones(3), "data"), None), 2, x),
                 [], []),
}


@pytest.mark.parametrize("name, mapped", [*((name, False) for name in BODIES), ("scans", True)])
def test_where_and_how_often_they_run(name, mapped):
  body, loops, operands = BODIES[name]
  x = jnp.linspace(0, 1, 24, dtype=jnp.float32).reshape(4, 2, 3)
  if mapped:
    paced = jaxpace.instrument(body, "data")
    pace = paced.init(devices=jax.local_devices()[:4])
    jax.pmap(paced, axis_name="data", devices=jax.local_devices()[:4]).lower(pace, x).compile()
  else:
    mesh = mesh_of(data=2, model=2)
    paced, run, pace = instrumented(body, mesh, P(("data", "model")), out=P(("data", "model")))
    run.lower(pace, x).compile()
  inside, own = paced.plan.inside, len(paced.plan.collectives)
  assert [[loop.trips for loop in one.loops] for one in inside] == loops
  assert sorted(one.operands for one in inside) == operands and not paced.plan.unstamped
  assert [one.index for one in inside] == list(range(own, own + len(inside)))
  tags = [tag for one in inside for tag in (one.enter_tag, one.exit_tag)]
  assert sorted(tags) == [tag for one in inside for tag in slot_tags(one.index)]
  for one in inside:
    assert one.axes == ("data",) and one.conditional == (name == "cond")
    assert (one.source or "").startswith("tests/instrumentation/test_nested.py:")
    assert "jaxpace" not in one.operation, "processes number their programs each by itself"


def test_what_is_not_compiled_has_no_timestamps():
  paced, run, pace = instrumented(training(scanned), mesh_of(data=2), P(), P("data"))
  jax.eval_shape(run, pace, params(), batches(1)[0])
  assert not paced.plan.inside and len(paced.plan.unstamped) == 6
  run.lower(pace, params(), batches(1)[0]).compile()
  plan = paced.plan
  jax.eval_shape(run, pace, params(), jnp.concatenate(batches(2)))
  assert paced.plan is plan and len(plan.inside) == 6 and not plan.unstamped


def failing(*_args):
  raise RuntimeError("It can't.")


@pytest.mark.parametrize("broken, reason, settings", [
    (None, "takes the native clock, not 'callback'", {"clock": "callback"}),
    ((host_ring, "unwritable", lambda clock: "It can't."), "nothing of this step is recorded", {}),
    ((host_ring, "MOST_PROGRAMS", 0), "nothing of this step is recorded", {}),
    ((compiling, "watch", failing), "It can't.", {}),
    ((thunks, "timestamped", failing), "It can't.", {}),
    ((compiling.Request, "replace", failing), "It can't.", {})])
def test_where_they_can_not_be_timed_the_step_runs_and_says_so(broken, reason, settings,
                                                              monkeypatch):
  if broken:
    monkeypatch.setattr(*broken)
  made = pair(training(scanned), mesh_of(data=2), params(), batches(1)[0], **settings)
  made.check_bits(params(), batches(1), 2)
  plan = made.paced.plan
  assert not plan.inside and len(plan.unstamped) == 6
  assert any("are not timed" in notice and reason in notice for notice in plan.notices)
  assert (made.paced.number is None) == reason.startswith("nothing")


@pytest.mark.parametrize("beside", [False, True])
def test_a_step_compiled_again_is_recorded_beside_another_recording(tmp_path, beside):
  """Its timestamps and those of whoever records everything go around the same collectives."""
  paced, step, pace = instrumented(training(scanned), mesh_of(data=2), P(), P("data"))
  state = params()
  with (jaxpace.observed(tmp_path / "all") if beside else contextlib.nullcontext(),
        jaxpace.Recorder(tmp_path / "own", paced) as recorder):
    for x in [*batches(6), *(jnp.concatenate([x, x]) for x in batches(6))]:
      pace, (state, value) = step(pace, state, x)
      jax.block_until_ready(value)
      recorder.record()
  waits = rows(tmp_path / "own", "collectives")
  assert recorder.lost["lost_rows"] == 0 and len(paced.plan.inside) == 6
  assert len(waits) == 2 * 12 * (1 + 6 * LAYERS)
  assert all(row["enter_ns"] <= row["exit_ns"] for row in waits)
  if beside:
    assert len(rows(tmp_path / "all", "collectives")) == len(waits)


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
  [one] = paced.plan.inside
  inside = [row for row in waits if row["name"].partition("@")[0] == one.name]
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
    assert min(parts(row)) >= 0 and sum(parts(row)) == row["end_ns"] - row["start_ns"]
    own = sum(each["exit_ns"] - each["enter_ns"] for each in waits
              if (each["rank"], each["step"]) == (row["rank"], row["step"]))
    assert row["sync_ns"] == own, "nothing overlaps in this step"
    assert row["last_exit_ns"] <= row["end_ns"]
  assert told is None or [each.name for each in told.collectives] == [one.name, "psum"]
  assert (tmp_path / "marks" / "0.ring").exists() and (tmp_path / "marks" / "0.plan.json").exists()
