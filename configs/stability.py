"""The stability scenario: thousands of accelerators, sharded models, checkpoints, failures, thermal
drift.

    python -m experiments.stability.run --config=configs/stability.py --config.plays=8

Each number names its source, or is marked as assumed.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the scenario."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.sizes = (64, 128, 256, 512, 1024, 2048, 4096)  # accelerators
  config.steps = 1600  # of each run simulated from a cold start
  config.runs = 12  # such runs at each size
  config.days = 5.0  # of undisturbed work, played out of those runs with failures
  config.plays = 32  # of that at each size
  config.window = 20  # useful steps of an equal amount of work, for the variance
  config.draws = 8  # warm steps drawn for a projection
  config.machine = ml_collections.ConfigDict({
      "group": 8,  # accelerators that hold one model: a node with tensor parallelism; assumed
      # in each step inside a group; assumed: real ones are hundreds, of less jitter each
      "barriers": 4,
      # Llama 3 405B: 16 M tokens a step, 16,384 GPUs at 400 TFLOP/s each ("The Llama 3 Herd of
      # Models", arXiv:2407.21783, table 4), and 6 FLOP a parameter and token: 5.9 s.
      "compute": 6.0,  # s
      "gap": 0.05,  # s; assumed
      # bytes of an accelerator: 70 B parameters in 16 bits over the 8 of a group; assumed
      "gradient": 17.5e9,
      # B/s: 400 Gb/s a card (`experiments.cost_facts.planning.catalogue`, ib-400); not overlapped:
      # assumed
      "rate": 50e9,
      "latency": 5e-6,  # s a message; assumed, as in the catalogue
      "jitter": 0.01,  # of one accelerator's step; assumed
      # Sinha et al., "Not All GPUs Are Created Equal" (SC 2022, arXiv:2208.11035): accelerators of
      # a kind differ by 8 % on average, 22 % at most, through power management; the mean and the
      # spread taken here, and that they come with warming up, are assumed.
      "drift": 0.03,
      "spread": 0.5,
      "warm": 600.0,  # s; assumed
      "wander": 0.01,  # assumed: load of the cooling, clocks
      "memory": 900.0,  # s; assumed
      # s: a full garbage collection, docs/measurements/collections.md, the middle row
      "pause": 0.117,
      "pause_rate": 1 / 600,  # a second of one accelerator's process; assumed
  })
  config.trouble = ml_collections.ConfigDict({
      "node": 8,  # accelerators
      "checkpoint": 60.0,  # s that all wait; assumed
      "restart": 600.0,  # s from a failure to the first step; assumed
  })
  config.mtbf = ml_collections.ConfigDict({  # s, of a node of 8
      # "The Llama 3 Herd of Models" (arXiv:2407.21783): 419 unexpected interruptions in 54 days on
      # 16,384 GPUs.
      "rare": 2048 * 54 * 86400.0 / 419,
      # Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
      # (HPCA 2025, arXiv:2410.21680): 47.7 days between failures of jobs of 8 GPUs, 7.9 hours of
      # jobs of 1,024. From the first, by size, would follow 8.9 hours for 1,024.
      "frequent": 47.7 * 86400.0,
  })
  config.interval = 3 * 3600.0  # s of work between two checkpoints, before control; assumed
  config.local = 8  # steps between two averages, where control may choose it; assumed
  config.power = ml_collections.ConfigDict({
      "busy": 700.0,  # W: the most an H100 SXM takes, NVIDIA's datasheet
      "waiting": 300.0,  # W in a collective that polls; assumed
      "idle": 100.0,  # W; assumed
  })
  return config
