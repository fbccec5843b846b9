"""The door through which files come in that somebody else may have written: bounded, regular, of
their schema."""
