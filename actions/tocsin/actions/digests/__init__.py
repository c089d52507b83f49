"""Digests: a notice to receivers, once in an interval, that all is well."""
