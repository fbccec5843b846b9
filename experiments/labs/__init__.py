"""Labs: labelled faults, real TCP on a shaped trunk, GPUs."""
