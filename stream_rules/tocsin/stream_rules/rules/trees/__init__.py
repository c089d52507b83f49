"""Rules on trees: depth, importance of features."""
