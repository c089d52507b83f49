"""A service of your own: it is asked to end a job, and polled until the job is gone."""
