"""What the programs share: measuring, timing in turns, child processes. No programs."""
