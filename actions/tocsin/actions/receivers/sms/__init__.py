"""SMS: at most two parts of a short message, through AWS SNS."""
