"""What every process of tocsin needs of its machine: its own Python, and folders of one user."""
