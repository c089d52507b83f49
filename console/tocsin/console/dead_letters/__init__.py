"""Records and deliveries that failed: what they are, and how they are sent once more."""
