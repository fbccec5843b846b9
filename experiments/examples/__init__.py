"""Examples that a user copies: the demo, and trainers before and after."""
