"""What `tocsin run`, `rules`, `actions` and `sample` put together and keep running."""
