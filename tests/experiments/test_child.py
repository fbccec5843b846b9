"""Commands in processes of their own: what is measured of them is theirs."""

import os
import resource
import sys

import pytest

from experiments.lib import child


def test_what_a_command_said_and_took():
  spin = ("import os, time; begin = time.process_time()\nwhile time.process_time() < begin + "
          "0.2: pass\n")
  ended = child.run([sys.executable, "-c",
                     spin + "print(len(os.sched_getaffinity(0)), bytes(1 << 26)[0])"], cores=1)
  assert ended.said == "1 0\n" and len(os.sched_getaffinity(0)) >= 1
  assert min(ended.cpu, ended.wall) >= 0.2
  # which Linux counts in, until the child executes
  own = child.gibibytes(resource.getrusage(resource.RUSAGE_SELF))
  assert 1 / 16 <= ended.peak <= max(0.5, own)
  assert ended.figures() == {"wall_s": ended.wall, "cpu_s": ended.cpu, "peak_gib": ended.peak}


def test_one_that_fails_is_told_with_its_last_words():
  with pytest.raises(RuntimeError, match="ended with status 3: no such run"):
    child.run([sys.executable, "-c", "import sys; sys.stderr.write('no such run'); sys.exit(3)"])


def test_median_and_worst_of_runs():
  runs = [{"wall_s": 1.0, "cpu_s": 0.5}, {"wall_s": 3.0, "cpu_s": 0.25},
          {"wall_s": 1.5, "cpu_s": 0.25}]
  assert (child.summary(runs) == {"wall_s": {"median": 1.5, "worst": 3.0},
                                  "cpu_s": {"median": 0.25, "worst": 0.5}})
