"""What people answer to issues, and what that makes of the rules."""
