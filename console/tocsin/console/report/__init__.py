"""`tocsin report`: one run in one file, for people and for programs."""
