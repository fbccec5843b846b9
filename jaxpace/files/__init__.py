"""The door through which files come in that somebody else may have written: bounded, regular, of
their schema."""


class UserError(Exception):
  """Something that the user can mend; the message is a sentence that says what is wrong and how to
  go on. Commands print it, and no traceback."""
