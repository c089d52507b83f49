"""The sections that decide who is notified of which issue, and when."""
