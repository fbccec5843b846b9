"""Counts of a running job are those that are played, guarded or not; of per-device steps, too; and
what a guard has found is said, recorded and reported."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.cli.main import main
from jaxpace.live import speeds
from jaxpace.runs.reader import read_run
from jaxpace.simulation.shared_work import play
from tests.instrumentation.running import P, mesh_of
from tests.live.test_shares import RANKS, TOTAL, loss_fn
from tests.live.test_speeds import EVEN, SOURCE, TURNS, Job, ring_shows, turning
from tests.quick import long

SPEEDS = np.array([1e-3, 1e-3, 3e-3, 1e-3])
"""Seconds of a micro-batch on each rank."""
UNEVEN = [3, 3, 1, 1]


@pytest.fixture
def timed(monkeypatch):
  """Jobs whose ring shows ranks of these speeds, to the last digit, and that exchange them in every
  fourth step."""
  def begin(balancer):
    job = Job(balancer=balancer)
    ring_shows(monkeypatch, job, SPEEDS)
    monkeypatch.setattr(speeds, "_PATIENT", 1000)
    return job
  return begin


def always(counts):
  return jaxpace.Balancer(lambda ranks: (), lambda seen, state: (jnp.array(counts, jnp.int32),
                                                                 state), TOTAL)


@pytest.mark.parametrize("balancer", [
    turning(), jaxpace.guard(always(UNEVEN), block=16),
    jaxpace.guard(jaxpace.share_by_speed(TOTAL, 5, window=8), block=16)])
def test_a_job_runs_what_is_played(timed, balancer):
  job = timed(balancer)
  job.run(100)
  played = play(balancer, np.tile(SPEEDS, (100, 1)))
  assert job.ran == played.counts.tolist() and len(set(map(tuple, job.ran))) > 1


@pytest.mark.parametrize(("counts", "kept", "level"), [
    ([2, 2, 1, 3], True, logging.INFO), *long(([1, 1, 5, 1], False, logging.WARNING))])
def test_a_guard_keeps_what_pays_and_says_what_it_found(timed, counts, kept, level, tmp_path,
                                                        caplog, capsys):
  caplog.set_level(logging.INFO, "jaxpace")
  job = timed(jaxpace.guard(always(counts), block=16, harm=100.0))
  with jaxpace.observed(tmp_path):
    job.run(450)
  assert job.ran[-24:] == [counts if kept else EVEN] * 24 and counts in job.ran[:200]
  said = [record for record in caplog.records if "Work shared by speed" in record.message]
  assert [record.levelno for record in said] == [level]
  assert ("stays" if kept else "is off") in said[0].message
  effect = -50 if kept else 150
  # Differences are cut to half a step.
  assert f"{np.clip(effect, -50, 50):+.1f} %" in said[0].message
  found = read_run(tmp_path).guard
  assert found["work_on"][-1] == kept and found["work_pairs"][-1] > 5
  assert main(["report", str(tmp_path)]) == 0
  assert "Work was shared by speed in" in " ".join(capsys.readouterr().out.split())


def per_device(w, batch, counts):
  (_, seen), grads = jaxpace.accumulate(loss_fn, w, batch, counts, "data", has_aux=True)
  return w - grads, seen


@pytest.mark.parametrize("form", ["shard_map", "pmap"])
def test_counts_of_a_per_device_step(form):
  mesh, w, ran = mesh_of(data=RANKS), jnp.float32(0), []
  feed = jaxpace.shares(mesh, examples=48, size=2, total_micro_batches=TOTAL, capacity=5,
                        balancer=turning())
  if form == "pmap":
    step = jaxpace.observe(jax.pmap(per_device, "data", in_axes=(None, 0, None),
                                    devices=list(mesh.devices.flat)))
  else:
    step = jaxpace.observe(jax.jit(jax.shard_map(
        per_device, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=(P(), P()))))
  seen = np.zeros(48, int)
  for _ in range(36):
    share = feed.next(step)
    batch = share.take(SOURCE)
    if form == "pmap":
      batch = jax.tree.map(lambda leaf: leaf.reshape(RANKS, -1, *leaf.shape[1:]), batch)
    w, found = step(w, batch, share.counts)
    if form == "pmap":
      w, found = w[0], found[0]
    seen += np.asarray(found)
    ran.append(share.counts.tolist())
  assert ran == [EVEN] * 16 + [TURNS[1]] * 16 + [TURNS[2]] * 4
  assert seen.tolist() == [12] * 48, "36 steps of 16 are twelve epochs of 48"
