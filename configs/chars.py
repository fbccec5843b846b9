"""The character transformer: small enough for two CPU cores."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the default hyperparameters."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.steps = 500
  config.batch_size = 64  # windows a step, over all devices
  config.context = 32  # characters the model sees
  config.width = 64
  config.heads = 4
  config.blocks = 2
  config.learning_rate = 3e-3
  config.log_every = 50  # steps
  return config
