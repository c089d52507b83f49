"""Services of others: real ones on loopback, and servers that answer as theirs are documented."""
