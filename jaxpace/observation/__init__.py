"""What sees: timestamps around the collectives of compiled programs, and the clocks that write
them."""
