"""The `tocsin` command: the only place where all parts meet."""
