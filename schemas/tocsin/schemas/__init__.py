"""What all parts of tocsin agree on: records, topics, signatures and the config file."""
