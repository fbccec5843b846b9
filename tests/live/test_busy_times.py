"""How long devices were busy, as the ring on the host shows it."""

import time
import types

import jax
import numpy as np

from jaxpace.live import busy_times
from jaxpace.live.busy_times import BusyTimes, busy_seconds
from jaxpace.record.ring.executions import Executions
from tests.live.test_speeds import Job
from tests.record.ring.programs import collective


def test_a_process_that_stood_still_for_long_is_waited_for_again(monkeypatch):
  job = Job()
  job.run(1)
  monkeypatch.setattr(busy_times, "_PATIENCE", 0.0)
  busy = BusyTimes(job.step, list(job.mesh.devices.flat))
  assert np.isnan(busy.of([job.step.calls])).all(), "out of patience"
  monkeypatch.setattr(busy_times, "_PATIENCE", 60.0)
  job.run(2)
  assert (busy.of([job.step.calls - 2]) > 0).all()
  # Waiting lets the step end.
  monkeypatch.setattr(busy_times, "time", types.SimpleNamespace(
      monotonic=time.monotonic, sleep=lambda seconds: job.run(1)))
  assert (busy.of([job.step.calls + 1]) > 0).all()


def test_the_ring_is_read_once_a_part_of_it_is_new(monkeypatch):
  job = Job()
  job.run(1)
  busy = BusyTimes(job.step, list(job.mesh.devices.flat))
  job.run(2)
  jax.block_until_ready(job.w)
  busy.keep_up()
  assert busy._collector.unread > 0, "little is new"
  monkeypatch.setattr(busy_times, "_PART", 0.0)
  busy.keep_up()
  assert busy._collector.unread == 0


def test_busy_is_what_lies_outside_of_collectives():
  # The second execution's collectives overlap from 130 to 140.
  events = [(0, 2, 20), (0, 3, 50), (1, 2, 120), (1, 4, 130), (1, 3, 140), (1, 5, 170)]
  of, tag, ns = (np.array(column) for column in zip(*events, strict=True))
  ran = Executions(np.array([7, 8]), np.array([10, 100]), np.array([60, 200]), of,
                   tag.astype(np.uint32), ns)
  np.testing.assert_allclose(busy_seconds(ran, [collective(0), collective(1)]), [20e-9, 50e-9])
