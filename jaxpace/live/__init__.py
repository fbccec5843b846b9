"""What stands beside the training loop: control, aligned pauses, the link probe."""
