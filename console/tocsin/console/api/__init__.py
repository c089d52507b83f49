"""`/api/v1`: all that the page shows, as JSON for programs."""
