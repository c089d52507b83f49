"""Plugins of pytest, and what tries them."""
