"""Rules on large models: attention, output logits, experts, embeddings."""
