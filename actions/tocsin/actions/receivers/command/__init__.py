"""Commands: a program of this machine that gets each issue on its standard input."""
