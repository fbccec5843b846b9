"""A simulated cluster: two jobs of 4 nodes each, over two racks with an oversubscribed spine. Every
field is here.

    jaxpace simulate configs/simulate.py --output runs/simulated
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the default scenario."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.steps = 2000
  config.max_delay = 0.25  # s, the longest delay a pacer may ask for
  config.shared_fabric = True  # False: each job has the fabric to itself, a coupling less
  config.fabric = ml_collections.ConfigDict({
      "nodes": 8,
      "per_node": 4,  # ranks (devices) of a node
      "node_rate": 300e9,  # B/s of each device to the others of its node
      "cards": 4,  # network cards of a node
      "card_rate": 25e9,  # B/s of each: 200 Gb/s
      "path_rate": 0.0,  # B/s of each device to its card; 0: no limit
      "slow_paths": {},  # rank -> factor: {3: 0.5} for a card across the socket
      "rack": 4,  # nodes below one switch; 0: all
      "uplinks": 4,  # of each such switch, to the spine
      "uplink_rate": 50e9,  # B/s of each; 0: no oversubscription
      "routing": "even",  # or "hash": each pair of ranks over one uplink, drawn by `seed`
      "seed": 0,
      "node_latency": 3e-6,  # s
      "rack_latency": 8e-6,
      "spine_latency": 12e-6,
  })
  job = {
      "nodes": (0, 1, 4, 5),  # of the fabric, in the order of the ranks; left out: all
      "forward": 20e-3,  # s
      "backward": 40e-3,
      "update": 1e-3,
      "gap": 0.5e-3,  # between steps
      "gradient_bytes": 500e6,
      "buckets": 4,
      "overlap": True,  # buckets are sent while the backward pass goes on
      "algorithm": "hierarchical",  # ring, recursive_doubling, halving_doubling, double_tree
      # s a rank loses for each second the others of its node wait for it: a coupling
      "polling": 0.0,
      "start": 0.0,  # s
      "leaves": 0,  # after so many steps; 0: never
      "pacer": "",  # such as "pace_early_ranks(threshold=0.05)"
      "processes": "node",  # or "rank": one process a rank
      "far": 0.0,  # share of the compute by which the ranks of slow_paths are slower
      "noise": {
          "normal": {"deviation": 0.02},
          # or data, checkpoint
          "pauses": {"probability": 0.002, "seconds": 30e-3, "aligned": False, "cause": "gc"},
          # Others: exponential(mean), heavy(scale, tail), wandering(deviation, steps),
          # common(deviation, steps), slow(ranks, extra), drift(extra, spread, steps),
          # schedule(every, seconds, aligned, cause), bursts(begins, length, probability, seconds,
          # cause). Two of a kind: give each a name and "kind".
      },
      # of others, now and then; left out: none
      "traffic": {"begins": 0.001, "length": 50, "load": 0.3},
      # s, steps; left out: none
      "failures": {"mtbf": 3e6, "every": 500, "checkpoint": 2.0, "restart": 120.0},
  }
  config.jobs = ml_collections.ConfigDict({"a": job,
                                           "b": {**job, "nodes": (2, 3, 6, 7), "start": 0.01}})
  return config
