"""What counts as much, as most and as sure: the numbers that all stages of the diagnosis share.

Set looking at the fault lab's runs of seeds 0 to 3, and taken together where the runs of held-out
seeds 21 and 22 are judged alike by one number; measurements/fault_lab_seed4 is what they are worth
on runs that nobody looked at.
"""

from __future__ import annotations

# Shares of the mean step.
COSTLY = 0.05
"""What costs this share is a finding, makes the headline, and is named before anything is called
healthy. What begins within this share of the run from each other is one."""
SHOWS = COSTLY / 2
"""Causes that the hosts measure, transfers that are slow in a stretch, one host's
link or all of them. A fault of `COSTLY` shows at least half of itself."""
EFFECT = 0.02
"""By which a rank arrives after the typical one if it is late, and other times differ."""
UNEXPLAINED = 0.2
"""Pauses of which the host's columns don't show the cause are a finding from this share of the step
on: where other programs run on the hosts, gaps are ragged, and that is neither the job's fault nor
mendable in it."""
LEAST = 0.01
"""Below it waiting for late ranks is no finding, nor what a step would save without them: ranks
never arrive at quite the same time."""

# Parts of a whole.
MOST = 0.5
"""What holds this part of a cost, of the steps or of the ranks holds most of it."""
NEARLY_ALL = 0.75
"""What holds this part holds nearly all: one rank is to blame, one stretch is the whole."""
PART = 0.25
"""What is more by this part, or holds this part, matters: a transfer, a cause of lateness, a
pause."""
SELDOM = 0.1
"""What is so in less than this part is so now and then."""
SAME = 1e-9
"""Seconds by which times differ that are the same."""

# How sure.
CONFIDENCE = 0.99
"""What is named is so with this confidence, all ranks tested together; and what chance does less
often than in one of a hundred healthy runs is no chance."""
INTERVAL = 0.95
"""Coverage of the intervals that people read."""

# Times as much.
BUSIER = 1.4
"""Connections of one host that are busy this many times as long as others' stand out. A crowded
trunk keeps the hosts that send over it busy 1.25 times as long as those they send to (measured)."""
TWICE = 2.0
"""What takes this many times as long as the rest stands out beyond any doubt."""

# Numbers of things.
MIN_STEPS = 20
"""Fewer steps than these carry no finding, and no stretch."""
FEWEST = 3
"""Hosts, ranks or samples that it takes to say what is usual."""
OFTEN = 6
"""Stops from which on it is one rank that stops, and not chance."""
SCHEMA = 1
"""Version of the JSON documents that the diagnosis makes."""
LISTED = 10
"""Entries of a list in a report, those that cost most first."""

# How much is worked on at a time.
CELLS = 1 << 20
"""Values of an array, whatever its axes: some arrays of as many stay within the memory that any
machine has, and few of them within the caches."""
KEPT = 64 * CELLS
"""Bytes, or values, of a run that are kept at once."""
SAMPLED = 4096
"""Steps that a median or a split needs no more of."""
