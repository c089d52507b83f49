"""Hooks in PyTorch: on steps, backward calls, losses and checkpoint writes."""
