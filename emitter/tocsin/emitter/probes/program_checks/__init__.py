"""Mistakes in the program itself."""
