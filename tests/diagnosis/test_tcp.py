"""What TCP busy times tell of slow transfers, on rings worked out by hand, and on made-up runs."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.diagnosis import tcp
from jaxpace.diagnosis.counted import count_steps
from jaxpace.diagnosis.counters import per_step, per_window
from jaxpace.diagnosis.diagnose import diagnose
from jaxpace.diagnosis.findings import CONTENTION
from jaxpace.diagnosis.tcp import Busy
from jaxpace.trace.synthetic import Job
from jaxpace.trace.synthetic_faults import Fault
from tests.diagnosis.made_up import run_of
from tests.diagnosis.test_findings import job

CASE = SimpleNamespace(step_time=25e-3)
WINDOWS = 12


def ring(ranks: int, usual: float, slow: dict[int, float]) -> np.ndarray:
  """[P] seconds a step for which each host of a ring is busy; `slow` adds to what is sent over a host's link each way.

  A host sends to the next one over both their links, and acknowledges nothing by itself.
  """
  busy = np.full(ranks, usual)
  for host, seconds in slow.items():
    busy[host] += 2 * seconds
    busy[(host - 1) % ranks] += seconds
    busy[(host + 1) % ranks] += seconds
  return busy


def busy_of(*stretches: np.ndarray, noise: float = 0.0, seed: int = 0, carried: bool = True) -> Busy:
  """Busy times of some stretches of equal length, one block a window."""
  random = np.random.default_rng(seed)
  each = WINDOWS // len(stretches)
  seconds = np.concatenate([np.tile(s[:, None], (1, each)) for s in stretches], axis=1)
  return Busy(tuple(range(len(seconds))), np.arange(seconds.shape[1] + 1),
              seconds * random.gamma(1 / max(noise, 1e-3)**2, max(noise, 1e-3)**2, seconds.shape), carried)


@given(st.integers(3, 12), st.integers(0, 11), st.floats(8e-3, 30e-3), st.integers(0, 99))
def test_the_host_of_a_slow_link_is_told(ranks, host, seconds, seed):
  busy = busy_of(ring(ranks, 4e-3, {host % ranks: seconds}), noise=0.1, seed=seed)
  assert tcp.whose(CASE, busy, [(0, WINDOWS)], []).slow == (host % ranks,)


def test_a_ring_tells_less_than_half_as_much_again():
  """Busy for 8.8, 6.4 and 4 ms: 1.375 times its partners, and twice the others, with the partners halfway between."""
  assert tcp.whose(CASE, busy_of(ring(6, 4e-3, {2: 2.4e-3})), [(0, WINDOWS)], []).slow == (2,)
  assert tcp.whose(CASE, busy_of(np.array([8e-3, 7.5e-3, 3.9e-3, 4e-3])), [(0, WINDOWS)], []).slow == ()


@given(st.integers(4, 12), st.floats(0, 30e-3), st.integers(0, 99))
def test_nobody_is_told_where_all_links_are_alike(ranks, seconds, seed):
  level = np.full(ranks, 4e-3 + seconds)
  level[::2] *= 1.3  # hosts that share a processor
  links = tcp.whose(CASE, busy_of(level, noise=0.1, seed=seed), [(0, WINDOWS)], [])
  assert links.slow == () and links.everywhere


def test_what_became_busier_tells_where_what_is_busy_does_not():
  before, after = np.array([9e-3, 3e-3, 9e-3, 3e-3]), ring(4, 0.0, {1: 3e-3})
  busy = busy_of(before, before + after)
  inside, outside = [(6, 12)], [(0, 6)]
  level = before + after
  assert level.argmax() != 1 and tcp.whose(CASE, busy, inside, outside).slow == ()  # no host is named but the busiest
  before = np.array([7e-3, 5e-3, 7e-3, 3e-3])
  busy = busy_of(before, before + ring(4, 0.0, {1: 3e-3}))
  assert tcp.whose(CASE, busy, inside, []).slow == () and tcp.whose(CASE, busy, inside, outside).slow == (1,)


def test_two_hosts_are_told_apart_only_if_one_is_busy_much_longer():
  for seconds, slow in ((10e-3, ()), (18e-3, (0,))):
    assert tcp.whose(CASE, busy_of(np.array([4e-3 + seconds, 8e-3])), [(0, WINDOWS)], []).slow == slow


@pytest.mark.parametrize(("level", "told"), [(5e-3, False), (8e-3, False), (12e-3, True)])
def test_connections_must_be_busy_longer_than_a_quiet_ring_keeps_them(level, told):
  """A quiet transfer of 3 ms keeps two connections busy for 6 ms; transfers are 8 ms longer."""
  assert tcp.says_slow(busy_of(np.full(4, level)), 3e-3, 8e-3) is told


def test_what_counters_can_not_tell_is_left_open():
  assert tcp.says_slow(busy_of(np.full(2, 30e-3)), 3e-3, 8e-3) is None  # of two hosts
  assert tcp.says_slow(busy_of(np.full(4, 30e-3), carried=False), 3e-3, 8e-3) is None  # another network carries them
  assert tcp.says_slower(busy_of(np.full(4, 4e-3), np.full(4, 9e-3), carried=False), [(6, 12)], [(0, 6)]) is None


@pytest.mark.parametrize(("after", "told"), [
    (np.full(4, 4.4e-3), False), (ring(4, 4e-3, {2: 2e-3}), None), (ring(4, 4e-3, {2: 5e-3}), True),
    (np.full(4, 12e-3), True)])
def test_a_stretch_is_contended_if_connections_are_busier_in_it(after, told):
  busy = busy_of(np.full(4, 4e-3), after, noise=0.05)
  assert tcp.says_slower(busy, [(6, 12)], [(0, 6)]) is told


def test_a_host_that_takes_slowly_keeps_its_partners_busy_longer_than_itself():
  taking = tcp.whose(CASE, busy_of(np.array([5e-3, 31e-3, 20e-3, 32e-3])), [(0, WINDOWS)], [])
  assert tcp.taken_slowly(taking, {2}) and not tcp.taken_slowly(taking, {0}) and not tcp.taken_slowly(taking, {3})
  slow = tcp.whose(CASE, busy_of(ring(4, 4e-3, {2: 9e-3})), [(0, WINDOWS)], [])
  assert not tcp.taken_slowly(slow, {2})


def test_windows_add_up_to_the_whole():
  run, _ = run_of(job(Fault("contention", 6e-3, (6, 7), begin=0.3)))
  counted = count_steps(run)
  edges, found = per_window(run, counted, "tcp_busy_ns", 6)
  assert edges[0] == 0 and edges[-1] == counted.blocks and len(edges) == 7
  assert len(per_window(run, counted, "tcp_busy_ns", 99)[0]) == 8  # 15 samples, two a window
  whole = per_step(run, counted, "tcp_busy_ns", 0, counted.blocks)
  steps = np.array([np.count_nonzero(counted.within(b, e)) for b, e in zip(edges[:-1], edges[1:], strict=True)])
  for process, rise in found.items():
    assert (rise * steps).sum() / steps.sum() == pytest.approx(whole[process], rel=0.02)
  assert found[3][3:].mean() > 2 * found[0][3:].mean()
  assert per_window(dataclasses.replace(run, host_samples=None), counted, "tcp_busy_ns", 10)[1] == {}


def test_transfers_that_are_slow_while_connections_are_not_are_the_hosts():
  run, _ = run_of(job(Fault("contention", 8e-3, begin=0.5)))
  assert [f.mode for f in diagnose(run).findings] == [CONTENTION]
  samples, quiet = run.host_samples, run_of(job())[0].host_samples
  steady = {**samples.columns, "tcp_busy_ns": quiet.columns["tcp_busy_ns"]}
  assert diagnose(dataclasses.replace(run, host_samples=samples._replace(columns=steady))).findings == ()


def test_a_fabric_that_is_crowded_now_and_then_shows_by_its_connections():
  """A third of the steps of the second half: the median transfer stays as it was."""
  crowded = Fault("contention", 20e-3, begin=0.5, probability=0.33)
  run, truth = run_of(Job(ranks=4, steps=960, processes=4, hosts=4, noise=0.02, transfer_noise=0.1, host_columns=True,
                          faults=(crowded,)))
  (finding,) = diagnose(run).findings
  assert (finding.mode, finding.hosts) == (CONTENTION, ())
  assert finding.first_step == pytest.approx(480, abs=45)
  step = np.diff(truth.exit[-1], axis=1).mean() * 1e-9
  assert finding.share == pytest.approx(truth.extra.transfer.mean() / step, abs=0.02)


def test_processes_of_one_host_have_no_network_between_them():
  """Over loopback connections are busy while a process waits for a processor: no fabric is crowded."""
  crowded = tuple(Fault("contention", seconds, probability=0.4) for seconds in (2e-3, 4e-3, 6e-3, 8e-3))
  run, _ = run_of(Job(ranks=4, steps=960, processes=4, hosts=4, noise=0.02, transfer_noise=0.2, host_columns=True,
                      faults=crowded))
  (finding,) = diagnose(run).findings
  assert finding.mode == CONTENTION
  together = tuple(dataclasses.replace(p, host="a") for p in run.processes)
  assert diagnose(dataclasses.replace(run, processes=together)).findings == ()
  unknown = tuple(dataclasses.replace(p, host="") for p in run.processes)
  assert [f.mode for f in diagnose(dataclasses.replace(run, processes=unknown)).findings] == [CONTENTION]
