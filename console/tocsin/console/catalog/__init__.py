"""The catalogue of rules as people read it, and templates of rules of their own."""
