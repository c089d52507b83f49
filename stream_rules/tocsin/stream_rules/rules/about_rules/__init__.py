"""Rules about the rules themselves."""
