"""`tocsin serve`: the live page of a bus and its store, for people with a browser."""
