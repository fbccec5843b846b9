"""Recorded runs: schema, files, and the one reader, of runs that are over and that grow."""
