"""Records and runs that are made for tests, and what reads them back."""
