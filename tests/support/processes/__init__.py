"""Processes that tests start: tocsin as its users run it, and workers of the tests."""
