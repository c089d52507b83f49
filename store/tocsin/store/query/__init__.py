"""SQL over all runs of a store, which can read nothing else and change nothing."""
