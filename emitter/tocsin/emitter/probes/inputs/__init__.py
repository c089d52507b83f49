"""What the training is fed."""
