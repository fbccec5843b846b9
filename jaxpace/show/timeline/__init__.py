"""A merged timeline of all ranks: clocks aligned by the exits of collectives, written for Perfetto
and Chrome."""
