"""What is to be done about an issue, a module for each stage, and about an attempt. Pure."""
