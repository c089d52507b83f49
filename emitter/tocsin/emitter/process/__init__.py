"""What this process is: its identity, its place in the job, what it may raise."""
