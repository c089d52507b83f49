"""Partitions to runs to rules to issues, with snapshots. Pure; time is a parameter."""
