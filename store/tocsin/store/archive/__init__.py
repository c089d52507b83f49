"""From a bus into files: buffers, flushes, merges, and what is deleted when there is too much."""
