"""Ways to keep data-parallel ranks in step, side by side: what each costs in time and bytes, and
its mathematics.

`settings` has one config object a strategy, `cluster` what all of them run on, `schedule` plays
them in simulated time, `timeline` reads what came of it, and `compression` is the mathematics of
sending less.
"""
