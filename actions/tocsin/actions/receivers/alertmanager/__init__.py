"""Alertmanager: alerts of its API v2, which it routes, groups and silences."""
