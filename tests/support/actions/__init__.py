"""The action service in tests, most of it in virtual time."""
