"""Reads what NCCL's Inspector wrote of a job into a run."""
