"""Programs as the compiler partitioned them: read back, given marks, compiled again in their
place."""
