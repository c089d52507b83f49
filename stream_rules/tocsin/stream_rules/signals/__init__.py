"""What rules derive from what they read: streaks, windows, trends, hysteresis, totals."""
