"""Shared words: observations, decisions, pacers, the plan of a step and the layout of its
timestamps."""
