"""The commands: their arguments and help, nothing else."""
