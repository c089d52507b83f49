"""To the bus: numbered records, queues, the sender's thread."""
