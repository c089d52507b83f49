"""The receivers: each sends a message to one kind of address, and says what became of it."""
