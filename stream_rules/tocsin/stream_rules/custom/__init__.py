"""Rules that users write: loaded and run in one child process of the worker, never in it."""
