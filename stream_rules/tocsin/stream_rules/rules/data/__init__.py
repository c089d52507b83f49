"""Rules on data and outputs: labels, predictions, inputs, tokens."""
