"""Schedulers and other backends that can end a job, where its own launcher has not."""
