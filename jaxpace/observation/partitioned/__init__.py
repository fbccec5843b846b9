"""Programs as the compiler made them, with timestamps: for CPUs between what was compiled, for GPUs
in what the partitioner made, compiled again."""
