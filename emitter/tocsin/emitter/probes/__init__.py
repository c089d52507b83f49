"""What is watched of a training. Each probe watches one thing."""
