"""What the node does: memory, disk, GPUs."""
