"""Pure coordination: estimators over a window of steps, what arrivals say, pacers and their
combinations.

Everything here is a pure function of pytrees: no clock, no I/O, no collective, no process index.
The same functions run in the live step, in simulation and over a recorded run.
"""
