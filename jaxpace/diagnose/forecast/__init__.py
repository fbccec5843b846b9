"""Step time at other numbers of ranks, from one recorded run. See docs/forecast.md."""
