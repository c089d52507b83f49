"""What rules read: series of ranks, rows of tensors, other runs, recordings."""
