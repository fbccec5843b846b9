"""Rings of marks read: events, the executions they belong to, and each time a collective ran."""
