"""Pure coordination: estimators over a window of steps, what arrivals say, pacers and their
combinations.

Everything here is a pure function of pytrees: no clock, no I/O, no collective, no process index.
The same functions run in the live step, in simulation and over a recorded run.
"""

from jaxpace.coordination.combinators import chain, limit, only_ranks
from jaxpace.coordination.early_ranks import EarlyRanks, pace_early_ranks

__all__ = ["EarlyRanks", "chain", "limit", "only_ranks", "pace_early_ranks"]
