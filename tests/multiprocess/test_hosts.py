"""Counters of hosts in a real job: gloo opens its sockets in native code, and they belong to the
process as well."""

import sys

import numpy as np
import pytest

from jaxpace.runs.dense import read_host_samples
from jaxpace.runs.reader import read_run
from tests.multiprocess import jobs

STEPS = 30


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"),
                    reason="the kernel's counters are Linux's")
def test_traffic_of_gloo_is_counted_in_each_process(tmp_path):
  jobs.pair("hosts_worker.py", tmp_path, STEPS)
  run = read_run(tmp_path)
  problems = []
  samples = read_host_samples(tmp_path, run.id, problems)
  assert problems == [] and set(samples.process.tolist()) == {0, 1}
  assert ([place.process for place in run.locality] == [0, 1]
          and run.locality[1].devices[0].process == 1)
  busy, sent = ([np.nanmax(own) - np.nanmin(own) for process in (0, 1)
                 for own in [samples.columns[name][samples.process == process]]]
                for name in ("tcp_busy_ns", "loopback_bytes"))
  assert busy[0] > 0 and busy[1] > 0
  trips, shortest = (samples.columns[name][samples.process == 0]
                     for name in ("tcp_rtt_ns", "tcp_min_rtt_ns"))
  known = np.isfinite(trips)
  assert known.any() and (known == np.isfinite(shortest)).all() and (shortest[known] > 0).all()
  assert (shortest[known] <= trips[known]).all() and trips[known].max() < 10e9
  # A ring of two sends each megabyte once from each process; both processes see the whole loopback
  # interface.
  assert min(sent) > 0.8 * 2 * STEPS * (1 << 20), ("all but what passed after the slower "
                                                            "one's last sample")
