"""`tocsin compare`: what differs between two runs, and whether that is more than noise."""
