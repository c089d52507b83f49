"""Records, their wire form, topics, signatures and the config file: what all other parts of tocsin agree on."""
