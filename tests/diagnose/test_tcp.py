"""What TCP busy times tell of slow transfers, on rings worked out by hand, and on synthetic
runs."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.diagnose import tcp
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.mechanism import per_step, per_window
from jaxpace.diagnose.selected_steps import count_steps
from jaxpace.diagnose.tcp import BusyConnections
from jaxpace.diagnose.words.codes import Verdict
from tests.diagnose.synthetic import run_of
from tests.diagnose.test_findings import job
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

CASE = SimpleNamespace(mean_step=25e-3)
WINDOWS = 12


def ring(ranks: int, usual: float, slow: dict[int, float]) -> np.ndarray:
  """[P] seconds per step for which each host of a ring is busy; `slow` adds to what is sent over a
  host's link each way.

  A host sends to the next one over both their links, and acknowledges nothing by itself.
  """
  busy = np.full(ranks, usual)
  for host, seconds in slow.items():
    busy[host] += 2 * seconds
    busy[(host - 1) % ranks] += seconds
    busy[(host + 1) % ranks] += seconds
  return busy


def busy_of(*stretches: np.ndarray, noise: float = 0.0, seed: int = 0,
            carried: bool = True) -> BusyConnections:
  """Busy times of some stretches of equal length, one block a window."""
  random = np.random.default_rng(seed)
  each = WINDOWS // len(stretches)
  seconds = np.concatenate([np.tile(s[:, None], (1, each)) for s in stretches], axis=1)
  return BusyConnections(tuple(range(len(seconds))), np.arange(seconds.shape[1] + 1),
                         seconds * random.gamma(1 / max(noise, 1e-3)**2, max(noise, 1e-3)**2,
                                                seconds.shape), carried,
                         np.full(seconds.shape, np.nan))


def whose(busy: BusyConnections) -> tcp.BusyLinks:
  return tcp.whose(CASE, busy, [(0, WINDOWS)])


def slower(busy: BusyConnections) -> bool:
  """Whether the second half is."""
  return tcp.says_slower(busy, [(6, 12)], [(0, 6)])


@given(st.integers(3, 12), st.integers(0, 11), st.floats(8e-3, 30e-3), st.integers(0, 99))
def test_the_host_of_a_slow_link_is_told(ranks, host, seconds, seed):
  busy = busy_of(ring(ranks, 4e-3, {host % ranks: seconds}), noise=0.1, seed=seed)
  assert whose(busy).slow == (host % ranks,)


def test_a_ring_tells_less_than_half_as_much_again():
  """Busy for 10, 7 and 4 ms: 1.43 times its partners, with these halfway between it and the
  others."""
  assert whose(busy_of(ring(6, 4e-3, {2: 3e-3}))).slow == (2,)
  assert whose(busy_of(np.array([8e-3, 7.5e-3, 3.9e-3, 4e-3]))).slow == ()


@given(st.integers(4, 12), st.floats(0, 30e-3), st.integers(0, 99))
def test_nobody_is_told_where_all_links_are_alike(ranks, seconds, seed):
  level = np.full(ranks, 4e-3 + seconds)
  level[::2] *= 1.3  # hosts that share a processor
  links = whose(busy_of(level, noise=0.1, seed=seed))
  assert links.slow == () and links.everywhere


def test_two_hosts_are_told_apart_only_if_one_is_busy_much_longer():
  for seconds, slow in ((10e-3, ()), (18e-3, (0,))):
    assert whose(busy_of(np.array([4e-3 + seconds, 8e-3]))).slow == slow


@pytest.mark.parametrize(("level", "told"), [(5e-3, False), (8e-3, False), (12e-3, True)])
def test_connections_must_be_busy_longer_than_a_quiet_ring_keeps_them(level, told):
  """A quiet transfer of 3 ms keeps two connections busy for 6 ms; transfers are 8 ms longer."""
  assert tcp.says_slow(busy_of(np.full(4, level)), 3e-3, 8e-3) is told


def test_what_counters_can_not_tell_is_left_open():
  assert tcp.says_slow(busy_of(np.full(2, 30e-3)), 3e-3, 8e-3) is None  # of two hosts
  # another network carries them
  assert tcp.says_slow(busy_of(np.full(4, 30e-3), carried=False), 3e-3, 8e-3) is None
  assert slower(busy_of(np.full(4, 4e-3), np.full(4, 9e-3), carried=False)) is False


@pytest.mark.parametrize(("after", "told"), [
    (np.full(4, 4.4e-3), False), (ring(4, 4e-3, {2: 2e-3}), False),
    (ring(4, 4e-3, {2: 5e-3}), True), (np.full(4, 12e-3), True)])
def test_a_stretch_is_contended_if_connections_are_busier_in_it(after, told):
  assert slower(busy_of(np.full(4, 4e-3), after, noise=0.05)) is told


def test_a_host_that_takes_slowly_keeps_its_partners_busy_longer_than_itself():
  taking = whose(busy_of(np.array([5e-3, 31e-3, 20e-3, 32e-3])))
  assert (tcp.taken_slowly(taking, {2}) and not tcp.taken_slowly(taking, {0})
          and not tcp.taken_slowly(taking, {3}))
  slow = whose(busy_of(ring(4, 4e-3, {2: 9e-3})))
  assert not tcp.taken_slowly(slow, {2})


def test_windows_add_up_to_the_whole():
  run, _ = run_of(job(Fault("contention", 6e-3, (6, 7), begin=0.3)))
  selected = count_steps(run)
  edges, found = per_window(run, selected, "tcp_busy_ns", 6)
  assert edges[0] == 0 and edges[-1] == selected.blocks and len(edges) == 7
  assert len(per_window(run, selected, "tcp_busy_ns", 99)[0]) == 8  # 15 samples, two a window
  whole = per_step(run, selected, "tcp_busy_ns", 0, selected.blocks)
  steps = np.array([np.count_nonzero(selected.within(b, e))
                    for b, e in zip(edges[:-1], edges[1:], strict=True)])
  for process, rise in found.items():
    assert (rise * steps).sum() / steps.sum() == pytest.approx(whole[process], rel=0.02)
  assert found[3][3:].mean() > 2 * found[0][3:].mean()
  assert per_window(dataclasses.replace(run,
                                        host_samples=None), selected, "tcp_busy_ns", 10)[1] == {}


def test_processes_of_one_host_have_no_network_between_them():
  """Over loopback connections are busy while a process waits for a processor: no fabric is
  crowded."""
  crowded = tuple(Fault("contention", seconds, probability=0.4)
                  for seconds in (2e-3, 4e-3, 6e-3, 8e-3))
  run, _ = run_of(SyntheticJob(ranks=4, steps=960, processes=4, hosts=4, noise=0.02,
                            transfer_noise=0.2, host_columns=True, faults=crowded))
  (finding,) = diagnose(run).findings
  assert finding.mode == Verdict.CONTENTION
  together = tuple(dataclasses.replace(p, info={**p.info, "hostname": "a"}) for p in run.processes)
  assert diagnose(dataclasses.replace(run, processes=together)).findings == ()
  unknown = tuple(dataclasses.replace(p, info={**p.info, "hostname": ""}) for p in run.processes)
  assert ([f.mode for f in diagnose(dataclasses.replace(run, processes=unknown)).findings]
          == [Verdict.CONTENTION])


def with_trips(busy: BusyConnections, *stretches: np.ndarray, noise: float = 0.1,
               seed: int = 0) -> BusyConnections:
  """The same connections, with round trips of some stretches of equal length."""
  random = np.random.default_rng(seed)
  each = busy.seconds.shape[1] // len(stretches)
  trips = np.concatenate([np.tile(s[:, None], (1, each)) for s in stretches], axis=1)
  return busy._replace(trips=trips * random.gamma(1 / noise**2, noise**2, trips.shape))


@given(st.integers(2, 6), st.floats(2.2, 40), st.integers(0, 99))
def test_longer_round_trips_tell_where_busy_times_do_not(hosts, times, seed):
  """Of two hosts, too, and where connections are hardly busier."""
  busy = busy_of(np.full(hosts, 10e-3), np.full(hosts, 11e-3))
  assert slower(busy) is False
  trips = np.linspace(0.1e-3, 0.3e-3, hosts)
  assert slower(with_trips(busy, trips, times * trips, seed=seed)) is True


def test_round_trips_that_vary_as_healthy_ones_do_tell_nothing():
  busy, trips = busy_of(np.full(4, 10e-3), np.full(4, 15e-3)), np.full(4, 0.3e-3)
  assert slower(with_trips(busy, trips, 1.3 * trips, noise=0.01)) is False
  # One window with many: a pause, and no stretch in which data queue.
  once = with_trips(busy, trips, trips, noise=0.01)
  once.trips[:, 8] *= 50
  assert slower(once) is False
  # As long as that in half of the windows before, and short in a third of those after: it comes and
  # goes.
  wavers = with_trips(busy, trips, trips, noise=0.01)
  wavers.trips[:, [3, 4, 5]] *= 3
  wavers.trips[:, 8:] *= 4
  assert slower(wavers) is False
  one_unknown = with_trips(busy, trips, 9 * trips)
  one_unknown.trips[2] = np.nan
  assert slower(one_unknown) is True
  only_one = with_trips(busy, trips, 9 * trips)
  only_one.trips[1:] = np.nan
  assert slower(only_one) is False


def links_of(*busy: float) -> tcp.BusyLinks:
  return whose(busy_of(1e-3 * np.array(busy)))


def test_a_process_that_stands_still_keeps_its_partners_waiting_and_nobody_else():
  """Busy times in ms per step as measured, hosts in the ring's order."""
  stopped = links_of(3.0, 10.5, 4.9, 11.3)
  assert tcp.taken_slowly(stopped, {0}) and not tcp.taken_slowly(stopped, {3})
  assert tcp.taken_slowly(links_of(8.0, 3.1, 7.3, 2.6), {3})
  assert (tcp.taken_slowly(links_of(13.3, 30.2), {0})
          and not tcp.taken_slowly(links_of(13.3, 30.2), {1}))
  crowded = links_of(20.9, 16.7, 20.6, 16.5)
  assert not any(tcp.taken_slowly(crowded, {late}) for late in range(4))
  both = links_of(87.7, 88.4)
  assert not tcp.taken_slowly(both, {0}) and not tcp.taken_slowly(both, {1})
  # A slow link of the host on the other side of the ring, whose partners are the late one's as
  # well.
  assert not tcp.taken_slowly(links_of(6.7, 3.8, 6.7, 12.8), {1})
  assert not tcp.taken_slowly(stopped, {0, 2}), "of two late hosts it can't be told"
  assert not tcp.taken_slowly(tcp.BusyLinks({0: 1e-3}, (), 0.0, False), {0}), "only one was sampled"


def test_of_two_hosts_the_one_that_waits_for_a_stopped_process_seems_to_have_a_slow_link():
  """Busy times in ms per step as measured with an observed step of many small collectives, a
  process stopped."""
  for busy, late in (((17.3, 6.8), 1), ((6.5, 16.5), 0)):
    links = links_of(*busy)
    assert links.slow == (1 - late,) and tcp.waits_for(links, {late})
    assert not tcp.waits_for(links, {1 - late}) and not tcp.waits_for(links, {0, 1})
  assert not tcp.waits_for(links_of(87.7, 88.4), {0}), "a slow link between two keeps both busy"
  slow = whose(busy_of(ring(4, 4e-3, {2: 9e-3})))
  assert slow.slow and not tcp.waits_for(slow, {1}), "of more hosts the link is told"


def sampled(run, trips, name="tcp_rtt_ns"):
  """The run with round trips: `trips(process, share of the run)` in seconds, at each of its
  samples."""
  samples = run.host_samples
  values = np.full(samples.time_ns.size, np.nan)
  for process in np.unique(samples.process):
    own = np.flatnonzero(samples.process == process)
    values[own] = [1e9 * trips(int(process), i / own.size) for i in range(own.size)]
  return dataclasses.replace(run,
                             host_samples=samples._replace(
                                 columns={**samples.columns, name: values}))
