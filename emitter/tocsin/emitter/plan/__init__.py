"""What is captured at which step, and what that may cost."""
