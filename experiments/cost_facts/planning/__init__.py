"""What a training job would take before it is run: from sizes, hardware and fabric to a step and
its causes."""
