"""What stands beside the training loop: housekeeping, control, watchdog, link probe, profiler."""
