"""A fleet of processes on one bus, what is done to them, and what must be there afterwards."""
