"""The live view: a run that still grows, from its files alone."""
