"""`tocsin check`, `init` and `schema`: the configuration file and its people."""
