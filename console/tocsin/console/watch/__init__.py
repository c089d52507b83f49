"""`tocsin watch`: the live view in a terminal."""
