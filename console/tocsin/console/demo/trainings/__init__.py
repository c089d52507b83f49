"""Real trainings in plain PyTorch, shared by the demo, the tests and the benchmarks.

Each module is a script as a user would write it: it knows nothing of tocsin, and it runs the same
with and without it. They need the `demo` extra (torch, scikit-learn) and no network.
"""
