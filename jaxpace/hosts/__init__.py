"""Where a job runs: its hosts' places, how its processes join, and the launcher."""
