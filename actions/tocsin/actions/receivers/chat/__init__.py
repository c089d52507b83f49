"""Chat: a few lines of text through apprise, in a guarded process."""
