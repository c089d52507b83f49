"""The inputs of the training."""
