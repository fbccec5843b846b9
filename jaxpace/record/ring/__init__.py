"""Reads rings: events, the executions they belong to, and each time a collective ran."""
