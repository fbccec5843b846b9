"""Where each rank is when nothing goes on, and whom the others wait for."""
