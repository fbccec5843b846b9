"""Which steps count."""

import numpy as np

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.selected_steps import count_steps
from jaxpace.runs.run import MISSING
from tests.diagnose.traces import barrier, make_run

MS = 1_000_000


def busy_with(slow, size=100):
  busy = np.full((2, size), 20 * MS)
  for k, factor in slow.items():
    busy[:, k] *= factor
  return barrier(busy, 2 * MS)


def test_the_first_step_has_nothing_to_start_from():
  selected = count_steps(make_run(*busy_with({})))
  assert not selected.mask[0]
  assert selected.size == 99
  assert selected.warmup.size == 0


def test_warmup_ends_at_the_last_slow_one_of_the_first_steps():
  selected = count_steps(make_run(*busy_with({1: 100, 4: 5, 30: 50})))
  assert selected.warmup.tolist() == [1, 2, 3, 4]
  assert selected.mask[30]  # a pause later on is what the job lives with
  assert selected.size == 95


def test_a_window_within_the_run_has_no_warmup():
  run = make_run(*busy_with({52: 50}), window=(51, 90))
  selected = count_steps(run)
  assert selected.size == 39
  assert selected.mask[51]
  assert selected.mask[52]
  assert not selected.mask[50]
  assert not selected.mask[90]


def test_every_attempt_warms_up():
  attempt = np.repeat([[0] * 50 + [1] * 50], 2, axis=0)
  selected = count_steps(make_run(*busy_with({1: 100, 51: 100, 52: 40}), attempt=attempt))
  assert selected.warmup.tolist() == [1, 51, 52]
  assert not selected.mask[50]  # first step of the second attempt


def test_holes_are_not_measured_across():
  enter, leave = busy_with({})
  steps = np.arange(100) + (np.arange(100) >= 40) * 5
  assert not count_steps(make_run(enter, leave, steps=steps)).mask[40]
  enter[:, :, 60] = leave[:, :, 60] = MISSING
  selected = count_steps(make_run(enter, leave, steps=steps))
  assert not selected.mask[60]
  assert not selected.mask[61]
  assert selected.mask[62]


def test_blocks_are_even_and_in_order():
  selected = count_steps(make_run(*busy_with({}, size=1000)))
  blocks = selected.block[selected.mask]
  assert (np.diff(blocks) >= 0).all()
  sizes = np.bincount(blocks)
  assert len(sizes) == selected.blocks == 199
  assert sizes.max() - sizes.min() <= 1


def test_a_rank_missing_for_a_while_does_not_hide_or_shift_the_others():
  enter, leave = barrier(np.array([[20], [26], [20]]) * MS + np.zeros((3, 200), np.int64), 2 * MS)
  enter[:, 2, 50:150] = leave[:, 2, 50:150] = MISSING
  diagnosis = diagnose(make_run(enter, leave))
  assert diagnosis.findings[0].ranks == (1,)
  assert abs(diagnosis.step_time.mean - 0.028) < 1e-12
  assert diagnosis.totals.present.tolist() == [199, 199, 98]
  assert abs(sum(diagnosis.shares.values()) - 1) < 1e-9
