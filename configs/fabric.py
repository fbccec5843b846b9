"""A small cluster in network namespaces: two racks, an oversubscribed trunk, two jobs that each
span both racks."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the default fabric and the jobs on it."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  # Hosts of each rack. Every rack is a bridge; its uplink to the spine is its part of the trunk.
  config.racks = (("a0", "b0"), ("a1", "b1"))
  # Which hosts a job's ranks sit on, rank 0 first.
  config.jobs = ml_collections.ConfigDict({"a": ("a0", "a1"), "b": ("b0", "b1")})
  config.link_mbit = 0.0  # Mbit/s of a host's own link; 0: not shaped
  config.trunk_mbit = 100.0  # Mbit/s of each rack's uplink, each way; 0: not shaped
  # KB that may wait in front of each uplink; what comes on top is dropped
  config.trunk_queue_kb = 128.0
  config.burst_kb = 16.0  # KB a shaper lets through at once
  config.shaper = "tbf"  # or "htb"
  # TCP congestion control of every route, and of the routes among one job's hosts; "": the kernel's
  # default.
  config.congestion = "cubic"
  config.job_congestion = ml_collections.ConfigDict()
  # What a step of `experiments.labs.fabric.two_jobs` costs: 300 KB take 24 ms at 100 Mbit/s, two
  # fifths of its period.
  config.compute_ms = 36.0  # ms, mean
  config.jitter = 0.02  # standard deviation of the compute time, as a share of it
  config.gradient_kb = 300.0  # KB (1,000 bytes), all buckets together
  config.buckets = 4
  return config
