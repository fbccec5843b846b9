"""What changed between two recorded runs. See docs/how_to/compare.md."""
