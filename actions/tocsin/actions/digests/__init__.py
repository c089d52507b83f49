"""Digests: that all is well, told to receivers once in an interval."""
