"""Programs as the compiler made them, with timestamps between what was compiled."""
