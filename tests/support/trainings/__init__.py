"""Trainings in the process of the test."""
