"""`tocsin query`: SQL over all runs, for people and programs."""
