"""What is to be done about an issue, and why: a module for each stage. Pure."""
