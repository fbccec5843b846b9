"""The digits CNN: seconds on two CPU cores."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the default hyperparameters."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.steps = 300
  config.batch_size = 256  # examples a step, over all devices
  config.learning_rate = 1e-2
  config.features = 8  # channels of the one convolution
  config.log_every = 20  # steps
  return config
