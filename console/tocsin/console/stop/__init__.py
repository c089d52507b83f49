"""`tocsin stop`: a person's stop, sent, followed and reported."""
