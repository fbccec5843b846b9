"""The names of what may be done with the garbage collector."""

ALONE, ALIGNED, FROZEN, IN_SLACK = "alone", "aligned", "frozen", "in-slack"
MODES = (ALONE, ALIGNED, FROZEN, IN_SLACK)
"""In this order: a mode's index is what the trace's column `host_housekeeping` holds."""

AUTO = "auto"
