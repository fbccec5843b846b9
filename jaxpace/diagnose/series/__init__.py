"""What changes over the run, as numbers to draw: the section `series` of the JSON report."""
