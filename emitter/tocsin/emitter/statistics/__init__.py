"""Numbers of arrays and tensors, on CPU and GPU."""
