"""In PyTorch. The only room that patches it."""
