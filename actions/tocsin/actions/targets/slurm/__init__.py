"""Slurm: one job, array task or heterogeneous job that is cancelled and not queued again."""
