"""Puts timers, collectives and pacing together around a user's step."""
