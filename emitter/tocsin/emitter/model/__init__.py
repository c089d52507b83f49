"""The user's program: models, optimizers, meshes."""
