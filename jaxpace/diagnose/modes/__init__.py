"""The failure modes of the taxonomy, one a file: each looks at a run that was added up, and finds
itself or nothing."""
