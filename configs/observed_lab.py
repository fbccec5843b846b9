"""The fault lab on a trainer under plain `jit`, observed, on processes of their own: which runs are
made."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the config of 40 runs, 10 of them healthy, on two and on four processes."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.observed = True
  config.steps = ml_collections.ConfigDict({"2x1": 240, "4x1": 240})  # of each run
  config.jitter = 0.02  # standard deviation of each rank's work in each step, as a share of it
  # each the twin of the runs with a fault that follow
  config.healthy = ml_collections.ConfigDict({"2x1": 5, "4x1": 5})
  # What a step of each layout costs: sleep inside the compiled step, ms, and about what comes on
  # top of it.
  config.work_ms = ml_collections.ConfigDict({"2x1": 24.0, "4x1": 24.0})
  config.rest_ms = ml_collections.ConfigDict({"2x1": 8.0, "4x1": 16.0})
  config.onset = 0.45  # of the run, for faults that begin in the middle of it
  config.trunk_mbit = 200.0  # Mbit/s between the racks
  config.hosts_seconds = 0.25  # between two samples of the hosts' counters: runs are short
  config.gradient_kb = 0.0  # the trainer's own parameters are what it sums
  return config
