"""Models that drive the same pacers as the live step: recorded runs replayed, fabrics, jobs."""
