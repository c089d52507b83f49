"""What is in the checkpoints of a training: read beside it, never by it, and never unpickled."""
