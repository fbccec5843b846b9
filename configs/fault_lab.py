"""The fault lab: which runs are made, how long and how costly their faults are, what the judge
asks."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the full lab: at least 200 runs with faults and 150 without."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  # of each run
  config.steps = ml_collections.ConfigDict({"in8": 300, "in4": 300, "4x1": 240, "2x2": 240})
  config.jitter = 0.02  # standard deviation of each rank's work in each step, as a share of it
  # Runs without a fault, by layout: `in8` is one process of 8 devices, `4x1` four processes of one
  # device each. Each is the twin, made just before, of the runs with a fault that have its seed.
  config.healthy = ml_collections.ConfigDict({"in8": 60, "in4": 30, "4x1": 36, "2x2": 24})
  # What a step of each layout costs: sleep inside the compiled step, ms, and about what comes on
  # top of it.
  config.work_ms = ml_collections.ConfigDict({"in8": 10.0, "in4": 10.0, "4x1": 16.0, "2x2": 16.0})
  config.rest_ms = ml_collections.ConfigDict({"in8": 2.0, "in4": 1.5, "4x1": 5.0, "2x2": 3.0})
  # layouts in which every kind of fault is injected; the others have a part of them
  config.whole = ("in8", "4x1")
  # share of the step that a fault costs while it lasts, asked for
  config.severities = (0.03, 0.06, 0.1, 0.2, 0.35)
  config.onset = 0.45  # of the run, for faults that begin in the middle of it
  config.pairs = (0.1, 0.2)  # severity of each of two faults at once
  config.gradient_kb = 48.0  # KB (1,000 bytes) that each rank sums with the others in a step
  config.trunk_mbit = 200.0  # Mbit/s of each rack's uplink in the layouts of several processes
  config.hosts_seconds = 0.25  # between two samples of the hosts' counters: runs are short
  config.repeat = 1  # times every fault is injected
  return config
