"""Trainings on several gloo ranks."""
