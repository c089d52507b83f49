"""Rules on loss and progress: whether the run learns, and whether it goes on at all."""
