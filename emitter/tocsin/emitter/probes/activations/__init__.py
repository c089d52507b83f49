"""What modules put out."""
