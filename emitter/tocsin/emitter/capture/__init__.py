"""From steps to records: which probes are due, and what they found."""
