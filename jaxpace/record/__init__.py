"""From the ring to the tables of a run, beside the training loop."""
