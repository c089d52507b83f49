"""Rules that tests make, and workers that are replaced while they run."""
