"""What the node does: processors, memory, disk, GPUs, data loading, ranks that wait."""
