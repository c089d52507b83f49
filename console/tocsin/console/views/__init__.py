"""What is printed of runs, issues, deliveries and topics."""
