"""Where a bad value came from: the evidence of each rank, its forward pass, and the words."""
