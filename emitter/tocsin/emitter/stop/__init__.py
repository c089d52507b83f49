"""Leaving the loop: commands, agreement of the ranks, exit points."""
