"""The paper's evaluation: Table 1 and its figures, by simulation with the live pacers."""
