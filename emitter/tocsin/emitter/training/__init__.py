"""One training of one rank: its identity, its sender, what the user records."""
