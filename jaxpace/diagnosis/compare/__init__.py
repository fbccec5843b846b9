"""What changed between two recorded runs. See docs/compare.md."""
