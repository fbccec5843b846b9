"""A step from sizes and data sheets, and the cost facts of a much-cited text."""
